"""Group DRO, online (Sagawa, Koh, Hashimoto, Liang, ICLR 2020): the worst domains weigh most.

With l_d the mean cross-entropy on the images of domain d, each step updates weights q of the
domains, which are equal at first, and then minimises the weighted loss:

    q_d <- q_d exp(eta l_d) / sum over e of q_e exp(eta l_e)
    loss = sum over d of q_d l_d

eta = 0.01 is the default of the authors' code and of DomainBed. A group is a domain here, as in
DomainBed; the authors' groups are pairs of a class and an attribute. The authors' adjustment of
losses for the sizes of groups, 0 by default, is left out. A domain that a step has no image of
keeps its weight and has no loss.
"""

from typing import ClassVar

import torch
from torch import Tensor

from solodg.algorithms.domain_losses import domain_losses
from solodg.algorithms.erm import ERM
from solodg.algorithms.ranges import LogUniform, SearchRange
from solodg.models.extractor import Extractor
from solodg.types import Episode


class GroupDRO(ERM):
    """ERM with a weight for each domain, which grows by the rate `eta` times its loss."""

    search: ClassVar[dict[str, SearchRange]] = {"eta": LogUniform(1e-3, 1e-1)}

    def __init__(
        self, backbone: Extractor, *, num_classes: int, num_domains: int, eta: float = 0.01
    ) -> None:
        super().__init__(backbone, num_classes=num_classes)
        self.eta = eta
        # Logarithms: many steps of a large eta must not overflow.
        self.register_buffer("log_weights", torch.zeros(num_domains))
        self.log_weights: Tensor

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        """Returns the weighted loss, the mean loss of the domains and the largest weight."""
        batch = episode.merged
        each, present = domain_losses(self, self(batch.x), batch)
        with torch.no_grad():
            self.log_weights[present] += self.eta * each
            self.log_weights.sub_(self.log_weights.logsumexp(0))
        weights = self.log_weights.exp()[present]
        return {
            "loss": (weights * each).sum(),
            "class": each.detach().mean(),
            "largest_weight": self.log_weights.exp().max(),
        }
