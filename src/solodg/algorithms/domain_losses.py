"""The loss of each source domain in a batch, for methods that weigh or compare domains."""

import torch
from torch import Tensor

from solodg.algorithms.base import Algorithm
from solodg.types import Batch


def domain_losses(algorithm: Algorithm, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns the mean cross-entropy (K,) of each domain of a batch, and which domains they are.

    `logits` are (B, C); every domain counts once, however many images it has.
    """
    present = batch.domain.unique()  # (K,)
    members = [batch.domain == domain for domain in present]
    each = [algorithm.cross_entropy(logits[own], batch.y[own]) for own in members]
    return torch.stack(each), present
