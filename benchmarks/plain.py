"""The method as one would write it from the paper: the reference that ours is measured against.

L copies of every image are concatenated with sampled source classifiers, (B, L, C, 2D); every
layer runs on all B*L*C rows; weights are sampled, (B, M, C, D), and multiplied with embeddings.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from solodg.algorithms.solo.gaussian import Gaussian, kl
from solodg.algorithms.solo.method import MergedLayer, Solo, Turn
from solodg.algorithms.solo.writer import MIN_SCALE
from solodg.types import Features


class PlainSolo(Solo):
    """Same parameters, same distribution of the loss, none of the algebra."""

    def _turn_losses(
        self, asked: Features, y: Tensor, turn: Turn, merged_layer: MergedLayer | None
    ) -> dict[str, Tensor]:
        z = asked.embedding
        codes = self.source_prior(turn.source.mean).sample(self.source_samples)  # (L, C, D)
        q = self.plain_posterior(asked.style, codes)
        p: Gaussian = self.amortiser(turn.target.mean)  # (C, D)
        w_q = q.sample(self.posterior_samples).transpose(0, 1)  # (B, M, C, D)
        w_p = p.sample(self.prior_samples)  # (N, C, D)
        base = 0.0 if self.base is None else self.base.weight
        return {
            "posterior_ce": cross_entropy(torch.einsum("bmcd,bd->bmc", w_q + base, z), y),
            "prior_ce": cross_entropy(torch.einsum("ncd,bd->bnc", w_p + base, z), y),
            "kl": kl(q, p).sum(-1).mean(),
        }

    def plain_posterior(self, style: Tensor, codes: Tensor) -> Gaussian:
        """(B, S), (L, C, D) -> mean and scale, (B, C, D)."""
        code = self.style_encoder(style)[:, None, None]  # (B, 1, 1, D)
        shape = (len(style), *codes.shape)  # (B, L, C, D)
        both = torch.cat([code.expand(shape), codes.expand(shape)], dim=-1)  # (B, L, C, 2D)
        hidden = self.amortiser.hidden(self.combined(F.relu(self.combine(both))))  # (B, L, C, H)
        scale = F.softplus(self.amortiser.pre_scale(hidden).mean(1)) + MIN_SCALE
        return Gaussian(self.amortiser.mean(hidden).mean(1), scale)

    def forward(self, x: Tensor) -> Tensor:
        features: Features = self.backbone(x)
        codes = self.source_prior(self.source_centres).sample(self.source_samples)
        weights = self.plain_posterior(features.style, codes).mean  # (B, C, D)
        if self.base is not None:
            weights = weights + self.base.weight
        return torch.einsum("bcd,bd->bc", weights, features.embedding)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """(B, M, C) logits of sampled classifiers."""
    return F.cross_entropy(logits.flatten(0, 1), y.repeat_interleave(logits.shape[1]))
