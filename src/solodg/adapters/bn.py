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
        self.memory = Memory(stored_statistics(self.norms))

    def forward(self, x: Tensor) -> Tensor:
        with batch_statistics(self.norms):
            return logits_of_batch(self.algorithm, x)

    def reset(self) -> None:
        self.memory.restore()


def batch_norms(algorithm: Algorithm) -> list[BatchNorm]:
    found = [m for m in algorithm.backbone.modules() if isinstance(m, BatchNorm)]
    if not found:
        raise UserError(
            "this adapter works on BatchNorm, and the backbone has none (or runs on stored "
            "features). Try t3a, or a backbone with BatchNorm."
        )
    return found


def stored_statistics(norms: list[BatchNorm]) -> list[Tensor]:
    """What a batch with a number that is none would spoil, whatever the momentum."""
    return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]


@contextmanager
def batch_statistics(norms: list[BatchNorm]) -> Iterator[None]:
    """Normalise by the batch, and leave the stored statistics as they are."""
    before = [(norm.momentum, norm.training) for norm in norms]
    counters = Memory([n.num_batches_tracked for n in norms if n.num_batches_tracked is not None])
    for norm in norms:
        norm.momentum = 0.0
        norm.train()
    try:
        yield
    finally:
        counters.restore()
        for norm, (momentum, training) in zip(norms, before, strict=True):
            norm.momentum = momentum
            norm.train(training)


def logits_of_batch(algorithm: Algorithm, x: Tensor) -> Tensor:
    """Of a single image too; where its maps shrink to one pixel, which torch refuses to normalise
    by itself, it goes in twice: the same statistics."""
    try:
        logits: Tensor = algorithm(x)
    except ValueError as error:
        if len(x) > 1 or "more than 1 value per channel" not in str(error):
            raise
        logits = algorithm(torch.cat([x, x]))[:1]
    return logits
