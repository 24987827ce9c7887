"""Deep CORAL (Sun and Saenko, ECCV workshops 2016): embeddings of all domains with equal moments.

With m_d and C_d the mean and the covariance of the embeddings of domain d in the episode:

    loss = CE + gamma * mean over pairs of domains of [MSE(m_d, m_e) + MSE(C_d, C_e)]

The paper aligns covariances of two domains; means and pairs are how it is used on several.
"""

from itertools import combinations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solodg.algorithms.erm import ERM
from solodg.types import Episode


class CORAL(ERM):
    """Cross-entropy and, by `gamma`, the distance between the domains' moments."""

    def __init__(self, backbone: nn.Module, *, num_classes: int, gamma: float = 1.0) -> None:
        super().__init__(backbone, num_classes=num_classes)
        self.gamma = gamma

    def losses(self, episode: Episode) -> dict[str, Tensor]:
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
    """Mean over pairs of domains; one with a single image has no covariance, only a mean."""
    parts = [z[domain == d] for d in domain.unique()]
    distances = []
    for one, other in combinations(parts, 2):
        distance = F.mse_loss(one.mean(0), other.mean(0))
        if min(len(one), len(other)) > 1:
            distance = distance + F.mse_loss(one.T.cov(), other.T.cov())
        distances.append(distance)
    return torch.stack(distances).mean()
