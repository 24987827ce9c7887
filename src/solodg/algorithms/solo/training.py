"""Training of the paper's method: the loss of equation 7 on an episode."""

import math
from typing import Literal

from torch import Tensor

from solodg.algorithms.solo.gaussian import (
    Gaussian,
    LogitMoments,
    kl,
    logit_scale,
    safe_sqrt,
    shared_logits,
)
from solodg.algorithms.solo.meta_shifts import (
    MetaShift,
    episode_shift,
    no_shift,
    shift_to_each_domain,
)
from solodg.algorithms.solo.networks import MergedLayer, SoloNetworks
from solodg.algorithms.solo.posterior_terms import posterior_terms
from solodg.types import Batch, Episode, Features


class SoloTraining(SoloNetworks):
    """The training half of `Solo`: cross-entropies under posterior and meta-prior, and the KL."""

    meta_learning: bool
    turns: Literal["one", "all"]
    posterior_samples: int  # M
    prior_samples: int  # N
    prior_weight: float
    kl_weight: float
    kl_reduction: Literal["mean", "sum"]
    kl_warmup: int
    updates: Tensor  # () training steps so far

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        """Returns the loss of equation 7 and its terms, as means over all queries.

        A query whose class S' lacks is left out: its classifier cannot be written.
        """
        merged = episode.merged
        features, extra = self._episode_features(merged)
        merged_layer = None if self.posterior == "invariant" else self._merged_layer()
        totals: dict[str, Tensor] = {}
        num_queries = 0
        for shift in self._meta_shifts(episode, merged, features.embedding):
            rows = shift.queries
            has_class = shift.source.present[merged.y[rows]]
            if not bool(has_class.all()):
                rows = rows[has_class]
            if len(rows) == 0:
                continue
            queries = Features(features.embedding[rows], features.style[rows])
            terms = self._shift_losses(queries, merged.y[rows], shift, merged_layer)
            for name, value in terms.items():
                totals[name] = totals.get(name, 0.0) + value * len(rows)
            num_queries += len(rows)
        if num_queries == 0:
            raise ValueError("no query of this episode has a class that the meta-source contains")
        terms = {name: value / num_queries for name, value in totals.items()}
        if self.training:
            self.updates += 1
        loss = self._weighted_sum(terms, num_queries)
        for value in extra.values():
            loss = loss + value
        return {"loss": loss} | {name: value.detach() for name, value in (terms | extra).items()}

    def _weighted_sum(self, terms: dict[str, Tensor], num_queries: int) -> Tensor:
        loss = terms["posterior_ce"]
        if self.prior_weight:
            loss = loss + self.prior_weight * terms["prior_ce"]
        if self.kl_weight:
            weight = self._kl_factor() * (num_queries if self.kl_reduction == "sum" else 1)
            loss = loss + weight * terms["kl"]
        return loss

    def _episode_features(self, merged: Batch) -> tuple[Features, dict[str, Tensor]]:
        """Returns the features of the episode's images, and further losses by name."""
        return self._modulated(merged.x), {}

    def _meta_shifts(self, episode: Episode, merged: Batch, z: Tensor) -> list[MetaShift]:
        if not self.meta_learning:
            return [no_shift(merged, z, self.num_classes)]
        if self.turns == "all":
            return shift_to_each_domain(merged, z, self.num_classes)
        return [episode_shift(episode, merged, z, self.num_classes)]

    def _shift_losses(
        self, queries: Features, y: Tensor, shift: MetaShift, merged_layer: MergedLayer | None
    ) -> dict[str, Tensor]:
        """Returns both cross-entropies and the KL of one meta-target shift, means over queries.

        Classes that a distribution's context lacks are left out of its softmax and of the KL.
        """
        z = queries.embedding
        base = 0.0 if self.base is None else self.base(z)  # (B, C)
        prior_hidden = self.amortiser.hidden(shift.target.mean)  # (C, H)
        prior = Gaussian(self.amortiser.mean(prior_hidden), self.amortiser.scale(prior_hidden))
        moments, divergence = self._posterior_moments(queries, shift, prior, merged_layer)
        terms = {
            "posterior_ce": self._sampled_cross_entropy(
                moments, base, self.posterior_samples, y, shift.source.present
            )
        }
        if self.prior_weight:
            terms["prior_ce"] = self._sampled_cross_entropy(
                shared_logits(prior, z), base, self.prior_samples, y, shift.target.present
            )
        if divergence is not None:
            both = (shift.source.present & shift.target.present).to(z.dtype)  # (C,)
            terms["kl"] = (divergence * both).sum(-1).mean()
        return terms

    def _posterior_moments(
        self,
        queries: Features,
        shift: MetaShift,
        prior: Gaussian,
        merged_layer: MergedLayer | None,
    ) -> tuple[LogitMoments, Tensor | None]:
        """Returns the posterior's logits without the base, and its KL to the prior.

        The KL is (B, C), or (C,) for the invariant posterior; None where it has no weight.
        """
        z = queries.embedding
        if merged_layer is None:
            posterior: Gaussian = self.amortiser(shift.source.mean)  # (C, D), for all images
            divergence = kl(posterior, prior) if self.kl_weight else None
            return shared_logits(posterior, z), divergence
        codes = self._class_codes(shift.source.mean)
        hidden = self._hidden(queries.style, codes, merged_layer)  # (B, C, H)
        if not self.kl_weight:
            scale = logit_scale(self.amortiser.scale(hidden), z)
            return LogitMoments(self._mean_logits(hidden, z), scale), None
        variance, divergence = posterior_terms(hidden, z, self.amortiser, prior)  # (B, C)
        return LogitMoments(self._mean_logits(hidden, z), safe_sqrt(variance)), divergence

    def _sampled_cross_entropy(
        self, moments: LogitMoments, base: Tensor | float, samples: int, y: Tensor, present: Tensor
    ) -> Tensor:
        """Returns the mean over sampled logits, among the classes that are present."""
        logits = LogitMoments(moments.mean + base, moments.scale).sample(samples)  # (B, M, C)
        logits = logits.masked_fill(~present, -math.inf)
        return self.cross_entropy(logits.flatten(0, 1), y.repeat_interleave(samples))

    def _kl_factor(self) -> float | Tensor:
        """Returns the weight of the KL, which grows linearly during the warm-up."""
        if not self.kl_warmup:
            return self.kl_weight
        return self.kl_weight * (self.updates / self.kl_warmup).clamp(max=1.0)
