"""Fishr (Rame, Dancette, Cord, ICML 2022): gradients vary alike in all domains.

With g_i the gradient of the cross-entropy of image i by the weight and bias of the classifier, v_d
the variance of g_i over the images of domain d (its diagonal, without Bessel's correction), and
m_d a moving average of it over steps that starts from zero, m_d <- ema m_d + (1 - ema) v_d:

    u_d = m_d / (1 - ema)    v_d reaches the loss unscaled; earlier variances have no gradient
    loss = CE + w * mean over d and entries of (u_d - mean over d of u_d)^2

w is 0 for the first `anneal_steps` steps: they are ERM. Then it is `penalty_weight`.

The classifier is linear, so g_i is the product of r_i = softmax - one-hot label and of the
embedding z_i with a 1 appended, and the means of g_i and of its square over a domain are one matrix
product each. The authors compute g_i image by image with BackPACK.

1000, 1500 and 0.95 are the authors' and DomainBed's, for 5,001 steps; 180 steps on frozen features
are the same share of the steps that are the default there. Departures: the authors forget Adam's
moments when the penalty begins. A domain that a step has no image of takes no part in it.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from solodg.algorithms.erm import ERM
from solodg.algorithms.ranges import LogUniform, SearchRange, StepShare
from solodg.models.extractor import Extractor
from solodg.types import Episode


class Fishr(ERM):
    """ERM with a penalty on how the variance of the classifier's gradients differs by domain.

    `penalty_weight` weighs the penalty after `anneal_steps` steps; `ema` is the decay of the moving
    average of variances.
    """

    recipes: ClassVar[dict[str, dict[str, Any]]] = ERM.recipes | {
        "frozen": {"arguments": {"anneal_steps": 180}}
    }
    search: ClassVar[dict[str, SearchRange]] = {
        "penalty_weight": LogUniform(10.0, 1e4),
        "anneal_steps": StepShare(0.0, 1.0),
    }

    def __init__(
        self,
        backbone: Extractor,
        *,
        num_classes: int,
        num_domains: int,
        penalty_weight: float = 1000.0,
        anneal_steps: int = 1500,
        ema: float = 0.95,
    ) -> None:
        super().__init__(backbone, num_classes=num_classes)
        if not 0 <= ema < 1:
            raise ValueError("ema must be at least 0 and below 1")
        self.penalty_weight, self.anneal_steps, self.ema = penalty_weight, anneal_steps, ema
        size = (num_domains, num_classes, backbone.embedding_dim + 1)  # the bias is last
        self.register_buffer("mean_variances", torch.zeros(size))
        self.register_buffer("steps_made", torch.tensor(0))
        self.mean_variances: Tensor
        self.steps_made: Tensor

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        """Returns the cross-entropy plus the weighted penalty, and both terms."""
        batch = episode.merged
        z = self.embed(batch.x)
        logits = self.classifier(z)
        class_loss = self.cross_entropy(logits, batch.y)
        present = batch.domain.unique()
        members = [batch.domain == domain for domain in present]
        now = torch.stack([gradient_variance(z[m], logits[m], batch.y[m]) for m in members])
        penalty = self._penalty(now, present)
        weight = self.penalty_weight if self.steps_made >= self.anneal_steps else 0.0
        self.steps_made += 1
        return {
            "loss": class_loss + weight * penalty,
            "class": class_loss.detach(),
            "penalty": penalty.detach(),
        }

    def _penalty(self, now: Tensor, present: Tensor) -> Tensor:
        """Updates the averages of these domains; returns how far they are from their mean."""
        mean = self.ema * self.mean_variances[present] + (1 - self.ema) * now  # (K, C, D + 1)
        with torch.no_grad():
            self.mean_variances[present] = mean.to(self.mean_variances.dtype)
        unscaled = mean / (1 - self.ema)
        return (unscaled - unscaled.mean(0)).square().mean()


def gradient_variance(z: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """Returns the variance over images of the gradients by weight and bias: (C, D + 1).

    z (B, D) is what the linear classifier reads, logits (B, C) what it returns.
    """
    residual = logits.softmax(1) - F.one_hot(y, logits.shape[1])  # (B, C)
    inputs = torch.cat([z, torch.ones_like(z[:, :1])], 1)  # (B, D + 1)
    mean = residual.T @ inputs / len(z)
    mean_square = residual.square().T @ inputs.square() / len(z)
    return mean_square - mean.square()
