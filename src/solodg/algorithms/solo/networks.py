"""The networks of the paper's method, and its posterior in the exact fast form.

The amortiser reads [style of x ; w_s] for every image, class and sample of w_s. docs/method.md
derives why the form below computes the same with less work:

    a layer on a concatenation splits into a part per image and a part per class and sample
    two linear layers in a row are one matrix
    the mean over samples of w_s may go before the linear heads
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solodg.algorithms.base import Algorithm
from solodg.algorithms.solo.gaussian import Gaussian
from solodg.algorithms.solo.mean_hidden import mean_hidden
from solodg.algorithms.solo.writer import GaussianWriter
from solodg.types import Features

Posterior = Literal["hierarchical", "concatenation", "invariant"]
MergedLayer = tuple[Tensor, Tensor]  # weight (H, H) and bias (H,)


class SoloNetworks(Algorithm):
    """The networks of `Solo` and the posterior that they write; training and test both use it."""

    posterior: Posterior
    source_samples: int  # L
    base: nn.Linear | None
    amortiser: GaussianWriter
    style_encoder: nn.Sequential  # this and the next two not in the invariant posterior
    combine: nn.Linear
    combined: nn.Linear
    source_prior: GaussianWriter  # in the hierarchical posterior only

    def _build_networks(
        self, style_dim: int, hidden: int, *, base: bool, pre_scale_start: float | None
    ) -> None:
        """Makes the networks that `self.posterior` needs.

        The order decides which random weights each of them gets: keep it.
        """
        dim = self.backbone.embedding_dim
        self.base = nn.Linear(dim, self.num_classes, bias=False) if base else None
        self.amortiser = GaussianWriter(
            dim, hidden, zero_start=base, pre_scale_start=pre_scale_start
        )
        if self.posterior != "invariant":
            self.style_encoder = nn.Sequential(
                nn.Linear(style_dim, hidden), nn.ReLU(), nn.Linear(hidden, dim)
            )
            self.combine = nn.Linear(2 * dim, hidden)  # on [style code ; class code]
            self.combined = nn.Linear(hidden, dim)
        if self.posterior == "hierarchical":
            self.source_prior = GaussianWriter(dim, hidden, pre_scale_start=pre_scale_start)

    def features(self, x: Tensor) -> Features:
        """Returns embedding (B, D) and style (B, S) of images, before `modulate`."""
        features: Features = self.backbone(x)
        return features

    def modulate(self, features: Features) -> Features:
        """Returns the features that are classified: here the same, in `solo_code` after FiLM."""
        return features

    def _modulated(self, x: Tensor) -> Features:
        return self.modulate(self.features(x))

    def _class_codes(self, source_centres: Tensor) -> Tensor:
        """Returns L samples of w_s, (L, C, D); without the hierarchy the centres, (1, C, D)."""
        if self.posterior == "concatenation":
            return source_centres[None]
        written: Gaussian = self.source_prior(source_centres)
        return written.sample(self.source_samples)

    def _hidden(self, style: Tensor, class_codes: Tensor, merged_layer: MergedLayer) -> Tensor:
        """Returns the amortiser's hidden layer, averaged over class codes.

        Style (B, S) and class codes (L, C, D) -> (B, C, H).
        """
        images, classes = self._image_part(style), self._class_part(class_codes)
        return mean_hidden(images, classes, *merged_layer)

    def _image_part(self, style: Tensor) -> Tensor:
        """Returns the part of `combine` that depends on the image: (B, S) -> (B, H)."""
        code = self.style_encoder(style)  # (B, D)
        return F.linear(code, self.combine.weight[:, : code.shape[1]])

    def _class_part(self, class_codes: Tensor) -> Tensor:
        """Returns the part of `combine` that depends on the class: (..., C, D) -> (..., C, H)."""
        dim = class_codes.shape[-1]
        return F.linear(class_codes, self.combine.weight[:, dim:], self.combine.bias)

    def _merged_layer(self) -> MergedLayer:
        """Returns `combined` and the amortiser's first layer as one layer: (H, H) and (H,)."""
        first = self.amortiser.first
        return first.weight @ self.combined.weight, first(self.combined.bias)

    def _mean_logits(self, hidden: Tensor, z: Tensor) -> Tensor:
        """Returns m.z for m = A h + a without making m: (B, C, H), (B, D) -> (B, C)."""
        head = self.amortiser.mean
        projected = z @ head.weight  # (B, H)
        return torch.einsum("bch,bh->bc", hidden, projected) + (z @ head.bias)[:, None]

    def _add_base(self, written: Tensor) -> Tensor:
        """Returns the mean classifier: what the amortiser wrote, (..., C, D), plus the base."""
        return written if self.base is None else written + self.base.weight
