"""What a training-time method is: losses for an episode, then logits for images."""

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solodg.errors import UserError
from solodg.types import Batch, Episode


class Outputs(NamedTuple):
    """All that a method says of a batch of images, (B, C) each."""

    logits: Tensor
    probabilities: Tensor
    before: Tensor | None  # probabilities before adapting to the image, of methods that adapt


class Algorithm(nn.Module):
    """A backbone (`embedding_dim`, `style_dim`, images -> Features) and what a method puts on it.

    An algorithm returns losses; it never steps an optimiser. What prediction needs is a parameter
    or a buffer, nothing else. A prediction depends on its own image only: row i of a batch equals
    the prediction for image i alone.
    """

    variants: ClassVar[dict[str, dict[str, Any]]] = {"default": {}}  # named sets of arguments
    target_images: ClassVar[int] = 0  # unlabelled images of a test domain that it must see first
    # What the method wants of a run where the user says nothing, from "random" and from
    # "pretrained" weights: values of the run's configuration.
    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        "random": {"label_smoothing": 0.1, "decay": "cosine"},
        "pretrained": {},
    }
    label_smoothing: float = 0.0  # an option of training: every cross-entropy on labels takes it

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

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        """Mean over rows, smoothed as training asks; classes at -inf are no classes here."""
        if not self.label_smoothing:
            return F.cross_entropy(logits, y)
        log_p = logits.log_softmax(1)
        known = torch.isfinite(logits)
        spread = log_p.masked_fill(~known, 0.0).sum(1) / known.sum(1)
        own = log_p.gather(1, y[:, None])[:, 0]
        return -((1 - self.label_smoothing) * own + self.label_smoothing * spread).mean()

    def finalize(self, source: Iterable[Batch]) -> None:
        """Store what prediction needs of the source training images. Called in eval mode."""

    def see_target(self, x: Tensor) -> None:
        """Unlabelled images of the domain that is scored next, where `target_images` asks for them.

        Called in eval mode, anew for every domain; what is kept of them is a buffer.
        """

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) images -> (B, C) logits."""
        raise NotImplementedError

    def embed_and_classify(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`embed` and `forward`; after one pass through the backbone, where a method can."""
        return self.embed(x), self(x)

    def linear_classifier(self) -> tuple[Tensor, Tensor | float]:
        """Rows (C, D) and bias of a classifier on `embed`, where a method has one for all."""
        raise UserError(
            f"{type(self).__name__} has no linear classifier that is one for all images."
        )

    def probabilities(self, x: Tensor) -> Tensor:
        """(B, ...) images -> (B, C) class probabilities, as honest as the method can."""
        return torch.softmax(self(x), dim=1)

    def outputs(self, x: Tensor) -> Outputs:
        """`forward` and `probabilities` after one pass through the backbone."""
        logits = self(x)
        return Outputs(logits, torch.softmax(logits, dim=1), None)


def image_channels(backbone: nn.Module, need: str) -> int:
    """Of the images that the backbone reads; refused where that are stored features."""
    channels = getattr(backbone, "channels", None)
    if channels is None:
        raise UserError(
            f"{need}: it cannot work on stored features of a frozen backbone. Train without "
            "--freeze-backbone, e.g. with --train-stages."
        )
    return int(channels)
