"""BatchNorm with the statistics of the test batch (Nado et al., 2020; Schneider et al., 2020)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn

from solodg.adapters.base import Adapter, Snapshot
from solodg.algorithms import Algorithm
from solodg.errors import UserError
from solodg.models.image_norm import ImageBatchNorm

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


def plain_batch_norms(algorithm: Algorithm) -> list[BatchNorm]:
    """Returns the BatchNorms of the backbone that use their stored statistics alone, if any."""
    found = [m for m in algorithm.backbone.modules() if isinstance(m, BatchNorm)]
    own = [(m, m.running_mean) for m in found if not isinstance(m, ImageBatchNorm)]
    return [m for m, mean in own if mean is not None and mean.ndim == 1]


@contextmanager
def mixed_statistics(norms: list[BatchNorm], stored_share: float) -> Iterator[None]:
    """Inside, BatchNorms use a mix of stored statistics and those of the batch, without gradient.

    `stored_share` is the weight of the stored ones, which are not changed. The variance of the
    batch is the unbiased one; a single value per channel has none: the stored one counts alone.
    """
    stored: dict[BatchNorm, tuple[Tensor, Tensor]] = {}

    def mix(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(norm, BatchNorm)
        mean, var = norm.running_mean, norm.running_var
        assert mean is not None
        assert var is not None
        stored[norm] = (mean, var)
        values = inputs[0].detach().transpose(0, 1).flatten(1)  # (C, values)
        norm.running_mean = mean.lerp(values.mean(1).to(mean.dtype), 1 - stored_share)
        if values.shape[1] > 1:
            norm.running_var = var.lerp(values.var(1).to(var.dtype), 1 - stored_share)

    def unmix(norm: nn.Module, _inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        assert isinstance(norm, BatchNorm)
        norm.running_mean, norm.running_var = stored.pop(norm)

    hooks = [norm.register_forward_pre_hook(mix) for norm in norms]
    hooks += [norm.register_forward_hook(unmix) for norm in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for norm, (mean, var) in stored.items():  # of a layer that failed
            norm.running_mean, norm.running_var = mean, var


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

    The statistics are those of the whole batch in each reading, so there is no early exit. Torch
    refuses to normalise a single value per channel. A single image whose maps shrink to one pixel
    goes in twice, which has the same statistics.
    """
    with algorithm.all_readings():
        try:
            logits: Tensor = algorithm(x)
        except ValueError as error:
            if len(x) > 1 or "more than 1 value per channel" not in str(error):
                raise
            logits = algorithm(torch.cat([x, x]))[:1]
    return logits
