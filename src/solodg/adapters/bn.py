"""BatchNorm with the statistics of the test batch (Nado et al., 2020; Schneider et al., 2020)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn

from solodg.adapters.base import Adapter, Memory
from solodg.algorithms import Algorithm
from solodg.errors import UserError

BatchNorm = nn.modules.batchnorm._BatchNorm


class BatchStatistics(Adapter):
    """Nothing is learned: every batch is normalised by itself."""

    single_sample: ClassVar[bool] = False

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__(algorithm)
        self.norms = batch_norms(algorithm)

    def forward(self, x: Tensor) -> Tensor:
        with batch_statistics(self.norms):
            return twin_of_one(self.algorithm, x)


def batch_norms(algorithm: Algorithm) -> list[BatchNorm]:
    found = [m for m in algorithm.backbone.modules() if isinstance(m, BatchNorm)]
    if not found:
        raise UserError(
            "this adapter works on BatchNorm, and the backbone has none (or runs on stored "
            "features). Try t3a, or a backbone with BatchNorm."
        )
    return found


@contextmanager
def batch_statistics(norms: list[BatchNorm]) -> Iterator[None]:
    """Normalise by the batch, and leave the stored statistics as they are."""
    momenta = [norm.momentum for norm in norms]
    counters = Memory([n.num_batches_tracked for n in norms if n.num_batches_tracked is not None])
    for norm in norms:
        norm.momentum = 0.0
        norm.train()
    try:
        yield
    finally:
        counters.restore()
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.eval()
            norm.momentum = momentum


def twin_of_one(model: nn.Module, x: Tensor) -> Tensor:
    """A single image goes in twice: the same statistics, and torch accepts maps of one pixel."""
    logits: Tensor = model(torch.cat([x, x]))[:1] if len(x) == 1 else model(x)
    return logits
