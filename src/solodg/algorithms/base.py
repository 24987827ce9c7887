"""What a training-time method is: losses for an episode, then logits for images."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from solodg.types import Batch, Episode


class Algorithm(nn.Module):
    """A backbone (`embedding_dim`, `style_dim`, images -> Features) and what a method puts on it.

    An algorithm returns losses; it never steps an optimiser. What prediction needs is a parameter
    or a buffer, nothing else. A prediction depends on its own image only: row i of a batch equals
    the prediction for image i alone.
    """

    variants: ClassVar[dict[str, dict[str, Any]]] = {"default": {}}  # named sets of arguments

    def __init__(self, backbone: nn.Module, *, num_classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.num_classes = num_classes

    def embed(self, x: Tensor) -> Tensor:
        """The embedding without the style, which costs a little and not every method reads."""
        embedding: Tensor = self.backbone.embed(x)  # type: ignore[operator]
        return embedding

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        """`"loss"`, to minimise, and whatever else is worth logging."""
        raise NotImplementedError

    def finalize(self, source: Iterable[Batch]) -> None:
        """Store what prediction needs of the source training images. Called in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) images -> (B, C) logits."""
        raise NotImplementedError

    def probabilities(self, x: Tensor) -> Tensor:
        """(B, ...) images -> (B, C) class probabilities, as honest as the method can."""
        return torch.softmax(self(x), dim=1)
