"""BatchNorm with the statistics of the test batch (Nado et al., 2020; Schneider et al., 2020)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn

from solodg.adapters.base import Adapter, Snapshot
from solodg.algorithms import Algorithm
from solodg.errors import UserError

BatchNorm = nn.modules.batchnorm._BatchNorm


class BatchStatistics(Adapter):
    """Normalises every batch by its own statistics; trains nothing."""

    single_sample: ClassVar[bool] = False

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__(algorithm)
        self.norms = batch_norms(algorithm)
        self.snapshot = Snapshot(stored_statistics(self.norms))

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (B, C) of images normalised by the statistics of their batch."""
        with batch_statistics(self.norms):
            return logits_of_batch(self.algorithm, x)

    def reset(self) -> None:
        """Restores the stored statistics, which a batch with NaN may have spoiled."""
        self.snapshot.restore()


def batch_norms(algorithm: Algorithm) -> list[BatchNorm]:
    """Returns all BatchNorms of the backbone; raises `UserError` where there are none."""
    found = [m for m in algorithm.backbone.modules() if isinstance(m, BatchNorm)]
    if not found:
        raise UserError(
            "this adapter works on BatchNorm, and the backbone has none (or runs on stored "
            "features). Try t3a, or a backbone with BatchNorm."
        )
    return found


def stored_statistics(norms: list[BatchNorm]) -> list[Tensor]:
    """Returns the running statistics, which a batch with NaN spoils even with momentum 0."""
    return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]


@contextmanager
def batch_statistics(norms: list[BatchNorm]) -> Iterator[None]:
    """Inside, BatchNorms use the statistics of the batch and do not update the stored ones."""
    before = [(norm.momentum, norm.training) for norm in norms]
    counters = Snapshot([n.num_batches_tracked for n in norms if n.num_batches_tracked is not None])
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
    """Returns the logits (B, C) of a batch under batch statistics, even of a single image.

    Torch refuses to normalise a single value per channel. A single image whose maps shrink to one
    pixel goes in twice, which has the same statistics.
    """
    try:
        logits: Tensor = algorithm(x)
    except ValueError as error:
        if len(x) > 1 or "more than 1 value per channel" not in str(error):
            raise
        logits = algorithm(torch.cat([x, x]))[:1]
    return logits
