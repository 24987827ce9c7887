"""No test-time method: the algorithm as it was trained."""

from typing import ClassVar

from torch import Tensor

from solodg.adapters.base import Adapter


class NoAdapter(Adapter):
    """Predicts with the algorithm as it is."""

    single_sample: ClassVar[bool] = True

    def forward(self, x: Tensor) -> Tensor:
        """Returns the algorithm's logits (B, C)."""
        logits: Tensor = self.algorithm(x)
        return logits

    def probabilities(self, x: Tensor) -> Tensor:
        """Returns the algorithm's own probabilities (B, C)."""
        return self.algorithm.probabilities(x)
