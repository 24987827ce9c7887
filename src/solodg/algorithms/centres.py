"""Class centres of domains, and means and losses of groups of rows."""

from typing import NamedTuple

import torch
from torch import Tensor


class Centres(NamedTuple):
    """The mean embedding of each class; a class without images has a zero row."""

    mean: Tensor  # (C, D)
    present: Tensor  # (C,) bool


class CentreSums:
    """Sums up embeddings by domain and class, batch by batch, to compute class centres."""

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.sums: dict[int, Tensor] = {}  # domain -> (C, D)
        self.counts: dict[int, Tensor] = {}  # domain -> (C,)

    def add(self, z: Tensor, y: Tensor, domain: Tensor) -> "CentreSums":
        """Adds embeddings (B, D) with their classes (B,) and domains (B,); returns itself."""
        one_hot = torch.nn.functional.one_hot(y, self.num_classes).to(z.dtype)  # (B, C)
        for d in domain.unique().tolist():
            mask = (domain == d).to(z.dtype)[:, None] * one_hot  # (B, C)
            self.sums[d] = mask.T @ z + self.sums.get(d, 0)
            self.counts[d] = mask.sum(0) + self.counts.get(d, 0)
        return self

    @property
    def domains(self) -> list[int]:
        """Returns the domains seen so far, in order."""
        return sorted(self.sums)

    def over(self, domains: list[int]) -> Centres:
        """Returns the mean of the domains' centres, each class over the domains that have it."""
        counts = torch.stack([self.counts[d] for d in domains])  # (domains, C)
        sums = torch.stack([self.sums[d] for d in domains])  # (domains, C, D)
        centres = sums / counts.clamp_min(1)[..., None]
        having = (counts > 0).to(sums.dtype)  # (domains, C)
        mean = (centres * having[..., None]).sum(0) / having.sum(0).clamp_min(1)[:, None]
        return Centres(mean, having.sum(0) > 0)


def group_means(rows: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean row of each group, (groups, D), and the position of each row's group, (N,).

    Rows are (N, D), group numbers (N,); the means are in the order of the numbers.
    """
    _, number = group.unique(return_inverse=True)
    members = torch.nn.functional.one_hot(number).to(rows.dtype)  # (N, groups)
    return members.T @ rows / members.sum(0)[:, None], number


def prototype_loss(code: Tensor, domain: Tensor) -> Tensor:
    """Returns the cross-entropy of the domain (B,) given the code (B, K).

    The logits are minus the squared distances to the domains' mean codes.
    """
    centres, number = group_means(code, domain)
    return torch.nn.functional.cross_entropy(-torch.cdist(code, centres).square(), number)
