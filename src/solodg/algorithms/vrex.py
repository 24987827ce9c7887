"""V-REx, variance risk extrapolation (Krueger et al., ICML 2021): equal losses in all domains.

With l_d the mean cross-entropy on the images of domain d:

    loss = mean over d of l_d + w * variance over d of l_d

w is 1 for the first `anneal_steps` steps and `penalty_weight` after them. 10 and 500 are
DomainBed's, for 5,001 steps; 60 steps on frozen features are the same share of the steps that are
the default there. Departure: DomainBed forgets Adam's moments when the weight changes.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from solodg.algorithms.domain_losses import domain_losses
from solodg.algorithms.erm import ERM
from solodg.algorithms.ranges import LogUniform, SearchRange, StepShare
from solodg.models.extractor import Extractor
from solodg.types import Episode


class VREx(ERM):
    """ERM with a penalty on the variance of the domains' losses.

    `penalty_weight` weighs the penalty after `anneal_steps` steps; before, its weight is 1.
    """

    recipes: ClassVar[dict[str, dict[str, Any]]] = ERM.recipes | {
        "frozen": {"arguments": {"anneal_steps": 60}}
    }
    search: ClassVar[dict[str, SearchRange]] = {
        "penalty_weight": LogUniform(1e-1, 1e5),
        "anneal_steps": StepShare(0.0, 0.5),
    }

    def __init__(
        self,
        backbone: Extractor,
        *,
        num_classes: int,
        penalty_weight: float = 10.0,
        anneal_steps: int = 500,
    ) -> None:
        super().__init__(backbone, num_classes=num_classes)
        self.penalty_weight, self.anneal_steps = penalty_weight, anneal_steps
        self.register_buffer("steps_made", torch.tensor(0))
        self.steps_made: Tensor

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        """Returns the mean loss of the domains plus the weighted penalty, and both terms."""
        batch = episode.merged
        each, _ = domain_losses(self, self(batch.x), batch)
        penalty = each.var(correction=0)
        weight = self.penalty_weight if self.steps_made >= self.anneal_steps else 1.0
        self.steps_made += 1
        return {
            "loss": each.mean() + weight * penalty,
            "class": each.detach().mean(),
            "penalty": penalty.detach(),
        }
