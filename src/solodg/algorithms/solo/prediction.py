"""Prediction of the paper's method: the classifier written for each test image.

Everything that depends on the sources alone is computed once by `finalize` and kept in buffers.
"""

import math
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solodg.algorithms.base import Outputs
from solodg.algorithms.centres import CentreSums
from solodg.algorithms.solo.gaussian import Gaussian, LogitMoments, logit_scale, shared_logits
from solodg.algorithms.solo.networks import SoloNetworks
from solodg.types import Batch, Features


class SoloPrediction(SoloNetworks):
    """The prediction half of `Solo`: posterior and prior predictions after `finalize`."""

    source_centres: Tensor  # (C, D) of all source domains
    absent: Tensor  # (C,) bool: classes that no source domain has
    test_noise: Tensor  # (M, C) standard normal
    written_mean: Tensor  # (C, D) of the invariant posterior; so is the next
    written_scale: Tensor  # (C, D)
    image_weight: Tensor  # (H, H) style_encoder's last layer, then the image part of `combine`
    class_part: Tensor  # (C, H) of `combine`, at the mean of p(w_s)
    merged_weight: Tensor  # (H, H)
    merged_bias: Tensor  # (H,)
    readout: Tensor  # (H + C, D): what z is multiplied with

    def _register_buffers(self, dim: int, hidden: int, samples: int) -> None:
        """Makes the buffers that `finalize` fills. Until then predictions are NaN."""
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
        # The same noise for every image makes a prediction independent of its batch; pairs of
        # opposite sign leave the mean where it is.
        half = torch.randn(samples // 2, classes, generator=torch.Generator().manual_seed(0))
        self.register_buffer("test_noise", torch.cat([half, -half]))

    @torch.no_grad()
    def finalize(self, source: Iterable[Batch]) -> None:
        """Stores the centres of all source domains, and what the networks write from them."""
        sums = CentreSums(self.num_classes)
        for batch in source:
            sums.add(self.embed(batch.x), batch.y, batch.domain)
        centres = sums.over(sums.domains)
        self.source_centres.copy_(centres.mean)
        self.absent.copy_(~centres.present)
        if self.posterior == "invariant":
            written: Gaussian = self.amortiser(centres.mean)
            self.written_mean.copy_(self._add_base(written.mean))
            self.written_scale.copy_(written.scale)
        else:
            self._store_layers(centres.mean)

    def _store_layers(self, centres: Tensor) -> None:
        """Merges the layers between the style's first one and the logits, at the mean of w_s."""
        hierarchical = self.posterior == "hierarchical"
        codes = self.source_prior(centres).mean if hierarchical else centres  # (C, D)
        last = cast(nn.Linear, self.style_encoder[2])  # directly before `combine`: one layer
        dim = centres.shape[1]
        self.image_weight.copy_(self.combine.weight[:, :dim] @ last.weight)
        self.class_part.copy_(self._class_part(codes) + self.combine.weight[:, :dim] @ last.bias)
        weight, bias = self._merged_layer()
        self.merged_weight.copy_(weight)
        self.merged_bias.copy_(bias)
        head = self.amortiser.mean
        fixed = self._add_base(head.bias.expand_as(centres))  # (C, D) the same for all images
        self.readout.copy_(torch.cat([head.weight.T, fixed]))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits (B, C) of the posterior's mean classifier for images."""
        return self.logits(self.features(x))

    def logits(self, features: Features) -> Tensor:
        """Returns the logits (B, C) of the posterior's mean classifier for given features.

        The style need not be the image's own: `solodg study` swaps styles between images.
        """
        features = self.modulate(features)
        z = features.embedding
        if self.posterior == "invariant":
            logits = z @ self.written_mean.T
        else:
            logits = self._test_logits(self._test_hidden(features.style), z)
        return logits.masked_fill(self.absent, -math.inf)

    def embed_and_classify(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the embedding that is classified (B, D) and the logits (B, C), in one pass."""
        features = self.features(x)
        return self.modulate(features).embedding, self.logits(features)

    def probabilities(self, x: Tensor) -> Tensor:
        """Returns probabilities (B, C): the softmax averaged over sampled posterior classifiers."""
        return self._softmax_samples(self._posterior_logits(self._modulated(x))).mean(1)

    def outputs(self, x: Tensor) -> Outputs:
        """Returns posterior logits and probabilities, and prior probabilities as `before`.

        `before` is None for the invariant posterior, which has one classifier for all images.
        """
        features = self._modulated(x)
        moments = self._posterior_logits(features)
        logits = moments.mean.masked_fill(self.absent, -math.inf)
        probabilities = self._softmax_samples(moments).mean(1)
        if self.posterior == "invariant":
            return Outputs(logits, probabilities, None)
        prior = shared_logits(self.prior_classifier(), features.embedding)
        return Outputs(logits, probabilities, self._softmax_samples(prior).mean(1))

    def sampled_probabilities(self, features: Features) -> Tensor:
        """Returns the softmax (B, M, C) under each sampled posterior classifier."""
        return self._softmax_samples(self._posterior_logits(self.modulate(features)))

    def prior_sampled_probabilities(self, features: Features) -> Tensor:
        """Returns the softmax (B, M, C) under each sampled prior classifier, with equal noise."""
        z = self.modulate(features).embedding
        return self._softmax_samples(shared_logits(self.prior_classifier(), z))

    def prior_logits(self, features: Features) -> Tensor:
        """Returns the logits (B, C) of the prior's mean classifier for given features."""
        rows, _ = self.linear_classifier()
        z = self.modulate(features).embedding
        return (z @ rows.T).masked_fill(self.absent, -math.inf)

    def classifiers(self, x: Tensor) -> Gaussian:
        """Returns the posterior classifier for each image: mean and scale, (B, C, D)."""
        return self.classifiers_from(self.features(x))

    def classifiers_from(self, features: Features) -> Gaussian:
        """Returns the posterior classifier for given features: mean and scale, (B, C, D)."""
        if self.posterior == "invariant":
            shape = (len(features.style), *self.written_mean.shape)
            return Gaussian(self.written_mean.expand(shape), self.written_scale.expand(shape))
        hidden = self._test_hidden(features.style)
        return Gaussian(self._add_base(self.amortiser.mean(hidden)), self.amortiser.scale(hidden))

    def prior_classifier(self) -> Gaussian:
        """Returns the classifier that the meta-prior writes from the source centres, (C, D)."""
        written: Gaussian = self.amortiser(self.source_centres)
        return Gaussian(self._add_base(written.mean), written.scale)

    def linear_classifier(self) -> tuple[Tensor, float]:
        """Returns the mean of the prior classifier (C, D), and its bias of zero."""
        return self.prior_classifier().mean, 0.0

    def _posterior_logits(self, features: Features) -> LogitMoments:
        """Returns mean and standard deviation (B, C) of the logits under the posterior."""
        z = features.embedding
        if self.posterior == "invariant":
            return shared_logits(Gaussian(self.written_mean, self.written_scale), z)
        hidden = self._test_hidden(features.style)
        scale = logit_scale(self.amortiser.scale(hidden), z)
        return LogitMoments(self._test_logits(hidden, z), scale)

    def _softmax_samples(self, moments: LogitMoments) -> Tensor:
        """Returns the softmax (B, M, C) of logits sampled with the fixed noise."""
        logits = moments.sample_with(self.test_noise).masked_fill(self.absent, -math.inf)
        return logits.softmax(-1)

    def _test_hidden(self, style: Tensor) -> Tensor:
        """Returns the amortiser's hidden layer at the mean of w_s: (B, S) -> (B, C, H)."""
        code = self.style_encoder[0](style).relu_()  # its last layer is in `image_weight`
        image_part = F.linear(code, self.image_weight)  # (B, H)
        combined = (image_part[:, None] + self.class_part).relu_()  # (B, C, H)
        return F.linear(combined, self.merged_weight, self.merged_bias).relu_()

    def _test_logits(self, hidden: Tensor, z: Tensor) -> Tensor:
        """Returns the logits (B, C): a written and a fixed part, from one product with z."""
        projected, fixed = F.linear(z, self.readout).split([hidden.shape[2], hidden.shape[1]], 1)
        return torch.baddbmm(fixed[..., None], hidden, projected[..., None]).squeeze(-1)
