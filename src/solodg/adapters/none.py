"""No adapter: the algorithm as it was trained."""

from typing import ClassVar

from torch import Tensor

from solodg.adapters.base import Adapter


class NoAdapter(Adapter):
    """Plain prediction, with the algorithm's own probabilities."""

    single_sample: ClassVar[bool] = True

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.algorithm(x)
        return logits

    def probabilities(self, x: Tensor) -> Tensor:
        return self.algorithm.probabilities(x)
