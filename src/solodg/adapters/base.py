"""What a test-time method is: a module around a trained algorithm, images to logits."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from solodg.algorithms import Algorithm


class Adapter(nn.Module):
    """Wraps a trained algorithm; `reset` restores it bit for bit."""

    single_sample: ClassVar[bool]  # True: row i of a batch equals image i alone

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__()
        self.algorithm = algorithm

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) images -> (B, C) logits."""
        raise NotImplementedError

    def probabilities(self, x: Tensor) -> Tensor:
        return torch.softmax(self(x), dim=1)

    def reset(self) -> None:
        """Forget everything that test images taught."""
