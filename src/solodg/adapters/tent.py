"""Tent: entropy minimisation on batches of test images (Wang et al., ICLR 2021).

BatchNorm uses the statistics of the batch; its scales and shifts are trained on the entropy of the
predictions, by Adam. The logits are those from before the (last) update. Updates stay until
`reset`.
"""

from typing import ClassVar

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from solodg.adapters.base import Adapter, Snapshot, entropy, learning
from solodg.adapters.bn import (
    batch_norms,
    batch_statistics,
    logits_of_batch,
    stored_statistics,
)
from solodg.algorithms import Algorithm
from solodg.algorithms.ranges import Choice, LogUniform, SearchRange


class Tent(Adapter):
    """Takes `steps` updates of BatchNorm's scales and shifts on each batch."""

    single_sample: ClassVar[bool] = False
    search: ClassVar[dict[str, SearchRange]] = {
        "learning_rate": LogUniform(1e-4, 1e-2),
        "steps": Choice((1, 3, 10)),
    }

    def __init__(
        self, algorithm: Algorithm, *, steps: PositiveInt = 1, learning_rate: PositiveFloat = 1e-3
    ) -> None:
        super().__init__(algorithm)
        self.steps, self.learning_rate = steps, learning_rate
        self.norms = batch_norms(algorithm)
        self.affine: list[nn.Parameter] = [
            p for norm in self.norms for p in (norm.weight, norm.bias) if p is not None
        ]
        self.snapshot = Snapshot([*self.affine, *stored_statistics(self.norms)])
        self.optimizer = self._optimizer()

    def _optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.affine, lr=self.learning_rate)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (B, C) from before the last update on this batch."""
        with learning(self.algorithm, self.affine), batch_statistics(self.norms):
            x = x.clone()  # a tensor of inference mode has no gradient
            for _ in range(self.steps):
                logits = logits_of_batch(self.algorithm, x)
                self.optimizer.zero_grad()
                entropy(logits).mean().backward()
                self.optimizer.step()
        return logits.detach()

    def reset(self) -> None:
        """Restores scales, shifts and statistics, and the state of the optimiser."""
        self.snapshot.restore()
        self.optimizer = self._optimizer()
