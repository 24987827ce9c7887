"""Common-specific decomposition (Piratla, Netrapalli, Sarawagi, ICML 2020).

The classifier of domain d is a mix of K classifiers: a common one W_0 and specific ones,

    W_d = tanh(c_0) W_0 + sum over k > 0 of tanh(c_dk) W_k
    loss = CE under W_0 + CE under W_d + mean of (W W^T - I)^2

where W is (K, D), the rows of the K classifiers for one class, and the last mean is over classes
and pairs. Only the common one predicts. Weights, initialisation and K = 2 are the authors'.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from solodg.algorithms.erm import ERM
from solodg.algorithms.ranges import LogUniform, SearchRange
from solodg.models.extractor import Extractor
from solodg.types import Episode, Size


class CSD(ERM):
    """ERM with `components` classifiers: one common, the others mixed in by domain.

    `specific_weight` weighs the cross-entropy of the mixed classifiers, `orthonormality_weight`
    the penalty that keeps the components apart.
    """

    search: ClassVar[dict[str, SearchRange]] = {
        "specific_weight": LogUniform(0.1, 10.0),
        "orthonormality_weight": LogUniform(0.1, 10.0),
    }

    def __init__(
        self,
        backbone: Extractor,
        *,
        num_classes: int,
        num_domains: int,
        components: Size = 2,
        specific_weight: float = 1.0,
        orthonormality_weight: float = 1.0,
    ) -> None:
        super().__init__(backbone, num_classes=num_classes)
        if components < 2:
            raise ValueError("components must be at least 2: a common classifier and a specific")
        self.specific_weight = specific_weight
        self.orthonormality_weight = orthonormality_weight
        dim, others = self.classifier.in_features, components - 1
        self.specific = nn.Linear(dim, others * num_classes)  # component by component
        for parameter in (*self.classifier.parameters(), *self.specific.parameters()):
            nn.init.normal_(parameter, std=0.1)
        self.common_share = nn.Parameter(torch.tensor(0.1))  # c_0
        self.domain_shares = nn.Parameter(1e-4 * torch.randn(num_domains, others))  # c_dk

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        """Returns the sum of both cross-entropies and the orthonormality penalty, and the terms."""
        batch = episode.merged
        z = self.embed(batch.x)
        common: Tensor = self.classifier(z)
        class_loss = self.cross_entropy(common, batch.y)
        specific = self.cross_entropy(self._domain_logits(z, common, batch.domain), batch.y)
        orthonormality = orthonormality_loss(self._components())
        return {
            "loss": class_loss
            + self.specific_weight * specific
            + self.orthonormality_weight * orthonormality,
            "class": class_loss.detach(),
            "specific": specific.detach(),
            "orthonormality": orthonormality.detach(),
        }

    def _domain_logits(self, z: Tensor, common: Tensor, domain: Tensor) -> Tensor:
        """Returns logits (B, C) under W_d, from those under W_0 (`common`)."""
        each = self.specific(z).unflatten(1, (-1, self.num_classes))  # (B, K - 1, C)
        shares = self.domain_shares[domain].tanh()[:, :, None]  # (B, K - 1, 1)
        logits: Tensor = self.common_share.tanh() * common + (shares * each).sum(1)
        return logits

    def _components(self) -> Tensor:
        """Returns the K classifiers, (K, C, D)."""
        specific = self.specific.weight.unflatten(0, (-1, self.num_classes))
        return torch.cat([self.classifier.weight[None], specific])


def orthonormality_loss(components: Tensor) -> Tensor:
    """Returns how far the K rows of each class are from orthonormal, for (K, C, D)."""
    rows = components.transpose(0, 1)  # (C, K, D)
    products = rows @ rows.mT  # (C, K, K)
    return (products - torch.eye(len(components)).to(products)).square().mean()
