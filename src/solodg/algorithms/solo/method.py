"""Single-sample generalisation: every image writes its own classifier in one forward pass.

Xiao, Zhen, Shao, Snoek, "Learning to Generalize across Domains on Single Test Samples",
ICLR 2022. With z = phi(x) the embedding, S' and T' the meta-source and meta-target context:

    p(w | T')     meta-prior: `amortiser` on the class centres of T'              (eq. 1)
    p(w_s | S')   source classifier: `source_prior` on the class centres of S'    (eq. 4)
    q(w | x, S')  posterior: `amortiser` on [style of x ; w_s], mean over samples (eq. 3, 5)
    loss          CE under q + prior_weight CE under p + kl_weight KL(q || p)     (eq. 6, 7)

It is computed in an exact form that never makes a tensor of sampled weights; docs/method.md
derives each step and the tests hold it against the plain form in float64.
"""

import math
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solodg.algorithms.base import Algorithm, Outputs
from solodg.algorithms.centres import CentreSums
from solodg.algorithms.solo.gaussian import Gaussian, LogitMoments, kl, safe_sqrt, shared_logits
from solodg.algorithms.solo.mean_hidden import mean_hidden
from solodg.algorithms.solo.meta_shifts import (
    Turn,
    every_domain_in_turn,
    the_episodes_own,
    without_shift,
)
from solodg.algorithms.solo.posterior_terms import posterior_terms
from solodg.algorithms.solo.writer import GaussianWriter
from solodg.types import Batch, Episode, Features

Posterior = Literal["hierarchical", "concatenation", "invariant"]
MergedLayer = tuple[Tensor, Tensor]  # weight (H, H) and bias (H,)


class Solo(Algorithm):
    """The paper's method; its tables' variants are arguments.

    posterior       "hierarchical" (eq. 5), "concatenation" (without eq. 5), "invariant" (eq. 2)
    meta_learning   False: S' and T' are both all source domains (table 3)
    turns           "one": the meta-target is the episode's; "all": each domain takes its turn
                    within the step, all images being queries, for more supervision per image
    base            "linear": the written mean is a residual, starting at zero, on a learned linear
                    classifier, without which random weights do not start; "none": as in the paper
    kl_reduction    "mean" over queries, so that the weight does not depend on the batch size, or
                    the paper's "sum"; `kl_warmup` updates pass before its weight is full
    """

    variants: ClassVar[dict[str, dict[str, Any]]] = {
        "default": {},
        "invariant": {"posterior": "invariant"},
        "no-hierarchy": {"posterior": "concatenation"},
        "no-prior-supervision": {"prior_weight": 0.0},
        "no-meta-learning": {"meta_learning": False},
        "literal": {
            "turns": "one",
            "base": "none",
            "source_samples": 10,
            "pre_scale_start": None,
            "kl_weight": 1e-5,
            "kl_reduction": "sum",
            "kl_warmup": 0,
        },
    }

    def __init__(
        self,
        backbone: nn.Module,
        *,
        num_classes: int,
        posterior: Posterior = "hierarchical",
        meta_learning: bool = True,
        turns: Literal["one", "all"] = "all",
        base: Literal["linear", "none"] = "linear",
        hidden: int | None = None,
        pre_scale_start: float | None = -4.0,
        source_samples: int = 4,
        posterior_samples: int = 10,
        prior_samples: int = 10,
        test_samples: int = 32,
        prior_weight: float = 1.0,
        kl_weight: float = 1e-4,
        kl_reduction: Literal["mean", "sum"] = "mean",
        kl_warmup: int = 500,
        style_dim: int | None = None,
    ) -> None:
        super().__init__(backbone, num_classes=num_classes)
        dim = int(backbone.embedding_dim)  # type: ignore[arg-type]
        style_dim = style_dim or int(backbone.style_dim)  # type: ignore[arg-type]
        hidden = min(dim, 256) if hidden is None else hidden
        if min(hidden, source_samples, posterior_samples, prior_samples) < 1:
            raise ValueError("hidden and the numbers of samples must be at least 1")
        if test_samples < 2 or test_samples % 2:
            raise ValueError(f"test_samples must be even and at least 2, not {test_samples}")
        self.posterior, self.meta_learning, self.turns = posterior, meta_learning, turns
        self.source_samples, self.posterior_samples = source_samples, posterior_samples
        self.prior_samples = prior_samples
        self.prior_weight, self.kl_weight = prior_weight, kl_weight
        self.kl_reduction, self.kl_warmup = kl_reduction, kl_warmup

        residual = base == "linear"
        self.base = nn.Linear(dim, num_classes, bias=False) if residual else None
        self.amortiser = GaussianWriter(
            dim, hidden, zero_start=residual, pre_scale_start=pre_scale_start
        )
        if posterior != "invariant":
            self.style_encoder = nn.Sequential(
                nn.Linear(style_dim, hidden), nn.ReLU(), nn.Linear(hidden, dim)
            )
            self.combine = nn.Linear(2 * dim, hidden)  # on [style code ; class code]
            self.combined = nn.Linear(hidden, dim)
        if posterior == "hierarchical":
            self.source_prior = GaussianWriter(dim, hidden, pre_scale_start=pre_scale_start)

        self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        self.updates: Tensor
        self._register_source_knowledge(dim, hidden, test_samples)

    # Training

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        merged = episode.merged
        features, extra = self._read_episode(merged)
        merged_layer = None if self.posterior == "invariant" else self._merged_layer()
        totals: dict[str, Tensor] = {}
        answered = 0
        for turn in self._turns(episode, merged, features.embedding):
            queries = turn.queries
            known = turn.source.present[merged.y[queries]]
            if not bool(known.all()):  # S' lacks a class: nothing could be asked about it
                queries = queries[known]
            if len(queries) == 0:
                continue
            asked = Features(features.embedding[queries], features.style[queries])
            terms = self._turn_losses(asked, merged.y[queries], turn, merged_layer)
            for name, value in terms.items():
                totals[name] = totals.get(name, 0.0) + value * len(queries)
            answered += len(queries)
        if answered == 0:
            raise ValueError("no query of this episode has a class that the meta-source knows")
        terms = {name: value / answered for name, value in totals.items()}
        if self.training:
            self.updates += 1
        loss = terms["posterior_ce"]
        if self.prior_weight:
            loss = loss + self.prior_weight * terms["prior_ce"]
        if self.kl_weight:
            weight = self._kl_factor() * (answered if self.kl_reduction == "sum" else 1)
            loss = loss + weight * terms["kl"]
        for value in extra.values():
            loss = loss + value
        return {"loss": loss} | {name: value.detach() for name, value in (terms | extra).items()}

    def _read_episode(self, merged: Batch) -> tuple[Features, dict[str, Tensor]]:
        """What the episode's images say, and losses on that alone."""
        return self._read(merged.x), {}

    def _read(self, x: Tensor) -> Features:
        return self.conditioned(self.observe(x))

    def observe(self, x: Tensor) -> Features:
        """An image's embedding, and what it says about its domain."""
        features: Features = self.backbone(x)
        return features

    def conditioned(self, observed: Features) -> Features:
        """What is classified, given the style."""
        return observed

    def _turns(self, episode: Episode, merged: Batch, z: Tensor) -> list[Turn]:
        if not self.meta_learning:
            return [without_shift(merged, z, self.num_classes)]
        if self.turns == "all":
            return every_domain_in_turn(merged, z, self.num_classes)
        return [the_episodes_own(episode, merged, z, self.num_classes)]

    def _turn_losses(
        self, asked: Features, y: Tensor, turn: Turn, merged_layer: MergedLayer | None
    ) -> dict[str, Tensor]:
        z = asked.embedding
        base = 0.0 if self.base is None else self.base(z)  # (B, C)
        prior_hidden = self.amortiser.hidden(turn.target.mean)  # (C, H)
        prior = Gaussian(self.amortiser.mean(prior_hidden), self.amortiser.scale(prior_hidden))
        if merged_layer is None:
            posterior: Gaussian = self.amortiser(turn.source.mean)  # (C, D), the same for all
            moments = shared_logits(posterior, z)
            divergence = kl(posterior, prior)  # (C,)
        else:
            codes = self._class_codes(turn.source.mean)
            hidden = self._hidden(asked.style, codes, merged_layer)  # (B, C, H)
            if self.kl_weight:
                variance, divergence = posterior_terms(hidden, z, self.amortiser, prior)  # (B, C)
                scale = safe_sqrt(variance)
            else:
                scale = _logit_scale(self.amortiser.scale(hidden), z)
            moments = LogitMoments(self._mean_logits(hidden, z), scale)
        terms = {
            "posterior_ce": self._sampled_cross_entropy(
                moments, base, self.posterior_samples, y, turn.source.present
            )
        }
        if self.prior_weight:
            terms["prior_ce"] = self._sampled_cross_entropy(
                shared_logits(prior, z), base, self.prior_samples, y, turn.target.present
            )
        if self.kl_weight:
            both = (turn.source.present & turn.target.present).to(z.dtype)  # (C,)
            terms["kl"] = (divergence * both).sum(-1).mean()
        return terms

    def _sampled_cross_entropy(
        self, moments: LogitMoments, base: Tensor | float, samples: int, y: Tensor, present: Tensor
    ) -> Tensor:
        """Mean over sampled logits; classes that the context lacks are left out."""
        logits = LogitMoments(moments.mean + base, moments.scale).sample(samples)  # (B, M, C)
        logits = logits.masked_fill(~present, -math.inf)
        return self.cross_entropy(logits.flatten(0, 1), y.repeat_interleave(samples))

    def _kl_factor(self) -> float | Tensor:
        if not self.kl_warmup:
            return self.kl_weight
        return self.kl_weight * (self.updates / self.kl_warmup).clamp(max=1.0)

    # The posterior, in its exact fast form

    def _class_codes(self, source_centres: Tensor) -> Tensor:
        """(C, D) centres -> (L, C, D): samples of w_s, or the centres without the hierarchy."""
        if self.posterior == "concatenation":
            return source_centres[None]
        written: Gaussian = self.source_prior(source_centres)
        return written.sample(self.source_samples)

    def _hidden(self, style: Tensor, class_codes: Tensor, merged_layer: MergedLayer) -> Tensor:
        """The amortiser's hidden layer, mean over class codes: (B, S), (L, C, D) -> (B, C, H).

        The layer on a concatenation splits into a part per image and a part per class and sample;
        two linear layers in a row are one matrix; the mean over L goes before the linear heads.
        """
        images, classes = self._image_part(style), self._class_part(class_codes)
        return mean_hidden(images, classes, *merged_layer)

    def _image_part(self, style: Tensor) -> Tensor:
        code = self.style_encoder(style)  # (B, D)
        return F.linear(code, self.combine.weight[:, : code.shape[1]])

    def _class_part(self, class_codes: Tensor) -> Tensor:
        dim = class_codes.shape[-1]
        return F.linear(class_codes, self.combine.weight[:, dim:], self.combine.bias)

    def _merged_layer(self) -> MergedLayer:
        """`combined`, then the amortiser's first layer, as one layer: (H, H) and (H,)."""
        first = self.amortiser.first
        return first.weight @ self.combined.weight, first(self.combined.bias)

    def _mean_logits(self, hidden: Tensor, z: Tensor) -> Tensor:
        """m.z for m = A h + a without making m: (B, C, H), (B, D) -> (B, C)."""
        head = self.amortiser.mean
        projected = z @ head.weight  # (B, H)
        return torch.einsum("bch,bh->bc", hidden, projected) + (z @ head.bias)[:, None]

    # Prediction: everything that depends on the sources alone is a buffer

    def _register_source_knowledge(self, dim: int, hidden: int, samples: int) -> None:
        """Buffers for `finalize` to fill; until then predictions are NaN, which nobody believes."""
        classes = self.num_classes
        self.register_buffer("source_centres", torch.full((classes, dim), math.nan))
        self.register_buffer("absent", torch.zeros(classes, dtype=torch.bool))
        if self.posterior == "invariant":
            self.register_buffer("written_mean", torch.full((classes, dim), math.nan))
            self.register_buffer("written_scale", torch.zeros(classes, dim))
        else:
            self.register_buffer("image_weight", torch.zeros(hidden, hidden))
            self.register_buffer("class_part", torch.full((classes, hidden), math.nan))
            self.register_buffer("merged_weight", torch.zeros(hidden, hidden))
            self.register_buffer("merged_bias", torch.zeros(hidden))
            self.register_buffer("readout", torch.zeros(hidden + classes, dim))
        # The same noise for every image keeps a prediction independent of its batch; in pairs
        # of opposite sign, it does not shift the mean.
        half = torch.randn(samples // 2, classes, generator=torch.Generator().manual_seed(0))
        self.register_buffer("test_noise", torch.cat([half, -half]))
        self.source_centres: Tensor
        self.absent: Tensor
        self.written_mean: Tensor
        self.written_scale: Tensor
        self.image_weight: Tensor
        self.class_part: Tensor
        self.merged_weight: Tensor
        self.merged_bias: Tensor
        self.readout: Tensor
        self.test_noise: Tensor

    @torch.no_grad()
    def finalize(self, source: Iterable[Batch]) -> None:
        """Centres of all source domains, and what the generators make of them."""
        sums = CentreSums(self.num_classes)
        for batch in source:
            sums.add(self.embed(batch.x), batch.y, batch.domain)
        centres = sums.over(sums.domains)
        self.source_centres.copy_(centres.mean)
        self.absent.copy_(~centres.present)
        if self.posterior == "invariant":
            written: Gaussian = self.amortiser(centres.mean)
            self.written_mean.copy_(self._on_base(written.mean))
            self.written_scale.copy_(written.scale)
            return
        hierarchical = self.posterior == "hierarchical"
        codes = self.source_prior(centres.mean).mean if hierarchical else centres.mean
        last = cast(nn.Linear, self.style_encoder[2])  # with `combine` right after it, one layer
        dim = centres.mean.shape[1]
        self.image_weight.copy_(self.combine.weight[:, :dim] @ last.weight)
        self.class_part.copy_(self._class_part(codes) + self.combine.weight[:, :dim] @ last.bias)
        weight, bias = self._merged_layer()
        self.merged_weight.copy_(weight)
        self.merged_bias.copy_(bias)
        head = self.amortiser.mean
        fixed = self._on_base(head.bias.expand_as(centres.mean))  # what no image changes
        self.readout.copy_(torch.cat([head.weight.T, fixed]))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the posterior's mean classifier."""
        return self.logits(self.observe(x))

    def logits(self, observed: Features) -> Tensor:
        """The same for what was observed, be the style the image's own or another's."""
        features = self.conditioned(observed)
        z = features.embedding
        if self.posterior == "invariant":
            logits = z @ self.written_mean.T
        else:
            logits = self._test_logits(self._test_hidden(features.style), z)
        return logits.masked_fill(self.absent, -math.inf)

    def embed_and_classify(self, x: Tensor) -> tuple[Tensor, Tensor]:
        observed = self.observe(x)
        return self.conditioned(observed).embedding, self.logits(observed)

    def probabilities(self, x: Tensor) -> Tensor:
        """Softmax averaged over classifiers sampled from the posterior."""
        return self._softmax_samples(self._test_moments(self._read(x))).mean(1)

    def outputs(self, x: Tensor) -> Outputs:
        """`before`: the same average for what the meta-prior writes from the source centres."""
        features = self._read(x)
        moments = self._test_moments(features)
        logits = moments.mean.masked_fill(self.absent, -math.inf)
        probabilities = self._softmax_samples(moments).mean(1)
        if self.posterior == "invariant":  # one classifier for all images
            return Outputs(logits, probabilities, None)
        prior = shared_logits(self.source_classifier(), features.embedding)
        return Outputs(logits, probabilities, self._softmax_samples(prior).mean(1))

    def sampled_probabilities(self, observed: Features) -> Tensor:
        """Softmax under each of the sampled classifiers, (B, M, C)."""
        return self._softmax_samples(self._test_moments(self.conditioned(observed)))

    def prior_sampled_probabilities(self, observed: Features) -> Tensor:
        """The same, by the same noise, for the classifier written from the sources alone."""
        z = self.conditioned(observed).embedding
        return self._softmax_samples(shared_logits(self.source_classifier(), z))

    def _test_moments(self, features: Features) -> LogitMoments:
        z = features.embedding
        if self.posterior == "invariant":
            return shared_logits(Gaussian(self.written_mean, self.written_scale), z)
        hidden = self._test_hidden(features.style)
        scale = _logit_scale(self.amortiser.scale(hidden), z)
        return LogitMoments(self._test_logits(hidden, z), scale)

    def _softmax_samples(self, moments: LogitMoments) -> Tensor:
        logits = moments.sample_with(self.test_noise).masked_fill(self.absent, -math.inf)
        return logits.softmax(-1)

    def classifiers(self, x: Tensor) -> Gaussian:
        """The classifier written for each image: mean and scale, (B, C, D)."""
        return self.written_for(self.observe(x))

    def written_for(self, observed: Features) -> Gaussian:
        """The same for what was observed."""
        if self.posterior == "invariant":
            shape = (len(observed.style), *self.written_mean.shape)
            return Gaussian(self.written_mean.expand(shape), self.written_scale.expand(shape))
        hidden = self._test_hidden(observed.style)
        return Gaussian(self._on_base(self.amortiser.mean(hidden)), self.amortiser.scale(hidden))

    def prior_logits(self, observed: Features) -> Tensor:
        """Of the classifier that the meta-prior writes from the source centres alone."""
        rows, _ = self.linear_classifier()
        z = self.conditioned(observed).embedding
        return (z @ rows.T).masked_fill(self.absent, -math.inf)

    def source_classifier(self) -> Gaussian:
        """What the amortiser writes from the source centres alone, (C, D)."""
        written: Gaussian = self.amortiser(self.source_centres)
        return Gaussian(self._on_base(written.mean), written.scale)

    def linear_classifier(self) -> tuple[Tensor, float]:
        """Its mean: one classifier for all images."""
        return self.source_classifier().mean, 0.0

    def _test_hidden(self, style: Tensor) -> Tensor:
        code = self.style_encoder[0](style).relu_()  # its last layer is in `image_weight`
        image_part = F.linear(code, self.image_weight)  # (B, H)
        combined = (image_part[:, None] + self.class_part).relu_()  # (B, C, H)
        return F.linear(combined, self.merged_weight, self.merged_bias).relu_()

    def _test_logits(self, hidden: Tensor, z: Tensor) -> Tensor:
        """The written part and the fixed one, (B, C), after one product with z."""
        projected, fixed = F.linear(z, self.readout).split([hidden.shape[2], hidden.shape[1]], 1)
        return torch.baddbmm(fixed[..., None], hidden, projected[..., None]).squeeze(-1)

    def _on_base(self, written: Tensor) -> Tensor:
        return written if self.base is None else written + self.base.weight


def _logit_scale(scale: Tensor, z: Tensor) -> Tensor:
    """Standard deviation of w.z for a classifier per image: (B, C, D), (B, D) -> (B, C)."""
    return safe_sqrt(torch.einsum("bcd,bd->bc", scale.square(), z.square()))


def adapts(algorithm: Algorithm) -> TypeGuard[Solo]:
    """Whether it has a classifier for each image, and one for all to compare it with."""
    return isinstance(algorithm, Solo) and algorithm.posterior != "invariant"
