"""The plain form of the method, as one would write it from the paper.

L copies of every image are concatenated with sampled source classifiers, (B, L, C, 2D); every
layer runs on all B*L*C rows; weights are sampled, (B, M, C, D), and multiplied with embeddings.
The benchmarks measure the fast form against it, and the tests take it as the reference.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from solodg.algorithms.solo import Solo
from solodg.algorithms.solo.gaussian import Gaussian, kl
from solodg.algorithms.solo.meta_shifts import MetaShift
from solodg.algorithms.solo.networks import MergedLayer
from solodg.algorithms.solo.writer import MIN_SCALE
from solodg.types import Features


def plain_posterior(solo: Solo, style: Tensor, codes: Tensor) -> Gaussian:
    """Returns the posterior without the base, mean and scale (B, C, D).

    Style (B, S), class codes (L, C, D). Mean and pre-scale are averaged over the L codes.
    """
    code = solo.style_encoder(style)[:, None, None]  # (B, 1, 1, D)
    shape = (len(style), *codes.shape)  # (B, L, C, D)
    both = torch.cat([code.expand(shape), codes.expand(shape)], dim=-1)  # (B, L, C, 2D)
    inner = solo.combined(F.relu(solo.combine(both)))  # (B, L, C, D)
    hidden = F.relu(solo.amortiser.first(inner))  # (B, L, C, H)
    scale = F.softplus(solo.amortiser.pre_scale(hidden).mean(1)) + MIN_SCALE
    return Gaussian(solo.amortiser.mean(hidden).mean(1), scale)


class PlainSolo(Solo):
    """`Solo` with the same parameters and the same distribution of the loss, in the plain form."""

    def _shift_losses(
        self, queries: Features, y: Tensor, shift: MetaShift, merged_layer: MergedLayer | None
    ) -> dict[str, Tensor]:
        z = queries.embedding
        codes = self.source_prior(shift.source.mean).sample(self.source_samples)  # (L, C, D)
        q = plain_posterior(self, queries.style, codes)
        p: Gaussian = self.amortiser(shift.target.mean)  # (C, D)
        w_q = q.sample(self.posterior_samples).transpose(0, 1)  # (B, M, C, D)
        w_p = p.sample(self.prior_samples)  # (N, C, D)
        base = 0.0 if self.base is None else self.base.weight
        return {
            "posterior_ce": cross_entropy(torch.einsum("bmcd,bd->bmc", w_q + base, z), y),
            "prior_ce": cross_entropy(torch.einsum("ncd,bd->bnc", w_p + base, z), y),
            "kl": kl(q, p).sum(-1).mean(),
        }

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits (B, C) of the posterior's mean at sampled source classifiers."""
        features: Features = self.backbone(x)
        codes = self.source_prior(self.source_centres).sample(self.source_samples)
        weights = plain_posterior(self, features.style, codes).mean  # (B, C, D)
        if self.base is not None:
            weights = weights + self.base.weight
        return torch.einsum("bcd,bd->bc", weights, features.embedding)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Returns the mean cross-entropy of the logits (B, M, C) of sampled classifiers."""
    return F.cross_entropy(logits.flatten(0, 1), y.repeat_interleave(logits.shape[1]))
