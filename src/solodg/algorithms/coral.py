"""Deep CORAL (Sun and Saenko, ECCV workshops 2016): aligns the moments of all domains.

With m_d and C_d the mean and the covariance of the embeddings of domain d in the episode:

    loss = CE + gamma * mean over pairs of domains of [MSE(m_d, m_e) + MSE(C_d, C_e)]

The paper aligns the covariances of two domains. For several domains it is common to align means
too, and to average over pairs.
"""

from itertools import combinations
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from solodg.algorithms.erm import ERM
from solodg.algorithms.ranges import LogUniform, SearchRange
from solodg.models.extractor import Extractor
from solodg.types import Episode


class CORAL(ERM):
    """ERM with a penalty, weighted by `gamma`, on the distance between the domains' moments."""

    search: ClassVar[dict[str, SearchRange]] = {"gamma": LogUniform(0.1, 10.0)}

    def __init__(self, backbone: Extractor, *, num_classes: int, gamma: float = 1.0) -> None:
        super().__init__(backbone, num_classes=num_classes)
        self.gamma = gamma

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        """Returns the cross-entropy plus `gamma` times the moment distance, and both terms."""
        batch = episode.merged
        z = self.embed(batch.x)
        class_loss = self.cross_entropy(self.classifier(z), batch.y)
        distance = moment_distance(z, batch.domain)
        return {
            "loss": class_loss + self.gamma * distance,
            "class": class_loss.detach(),
            "distance": distance.detach(),
        }


def moment_distance(z: Tensor, domain: Tensor) -> Tensor:
    """Returns the distance of means and covariances of z (B, D), averaged over pairs of domains.

    A pair with a domain of a single image, which has no covariance, counts its means only.
    """
    parts = [z[domain == d] for d in domain.unique()]
    distances = []
    for one, other in combinations(parts, 2):
        distance = F.mse_loss(one.mean(0), other.mean(0))
        if min(len(one), len(other)) > 1:
            distance = distance + F.mse_loss(one.T.cov(), other.T.cov())
        distances.append(distance)
    return torch.stack(distances).mean()
