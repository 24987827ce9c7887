"""The paper's method on a style code, with FiLM and a pose learned from agreement.

It was the default, called `solo_plus`, until each part was held against a linear classifier that
reads the image in the same way (docs/adaptation.md). Its parts:

    pose      a network estimates the pose of the image and undoes it before the backbone; for
              backbones that are trained from random weights (pose.py, argument `frame`)
    norm      the backbone's BatchNorm mixes in the image's own statistics; with pretrained weights
              in three readings that are averaged (models/image_norm.py)
    code      a few numbers take the place of the style, with domain supervision and swap in
              training (style_code.py)
    FiLM      the style code also scales and shifts the embedding (film.py)

All else (meta-learning, centres, hierarchy, meta-prior, KL) is the paper's, in `solo`. The gain
comes from pose and norm; that of the other parts is within the noise of three seeds
(docs/research_notebook.md).
"""

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from solodg.algorithms.base import image_channels
from solodg.algorithms.centres import prototype_loss
from solodg.algorithms.ranges import LogUniform, SearchRange
from solodg.algorithms.solo.method import Solo
from solodg.algorithms.solo_code.film import FiLM
from solodg.algorithms.solo_code.pose import PoseNetwork, domain_disagreement, resample
from solodg.algorithms.solo_code.style_code import code_network, within_domain_shuffle
from solodg.models.extractor import Extractor
from solodg.types import Batch, Features, Size

_NEED = "the pose is estimated from pixels (leave out the argument frame)"


class SoloCode(Solo):
    """`solo` on a style code, for images whose pose is undone first.

    Predictions are those of `Solo`; its docstring has a table of them.

    Arguments:
        backbone: extractor of embedding and style; of images, if `frame` is not 0.
        num_classes: number of classes C.
        code_dim: numbers in the style code.
        domain_weight: weight of the domain supervision of the style code; 0 leaves it out.
        swap: whether training classifies an image with the code of another one of its domain.
            At test an image always has its own.
        film: whether the style code modulates the embedding.
        frame: number of pose estimates: 0 none, 1 one, 2 one and a refinement of it, and so on.
            It is called frame for historical reasons. It must be 0 on stored features, which have
            no pixels to resample.
        source_samples, prior_weight, kl_weight: as in `Solo`.
    """

    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        "random": Solo.recipes["random"] | {"image_norm": 100.0, "arguments": {"frame": 2}},
        "pretrained": {"image_norm": (0.0, 3000.0, 300.0)},
    }
    search: ClassVar[dict[str, SearchRange]] = {
        "kl_weight": LogUniform(1e-5, 1e-2),
        "domain_weight": LogUniform(0.03, 3.0),
    }
    variants: ClassVar[dict[str, dict[str, Any]]] = {
        "default": {},
        "no-swap": {"swap": False},
        "no-film": {"film": False},
        "no-domain-supervision": {"domain_weight": 0.0},
        "no-frame": {"frame": 0},
    }

    def __init__(
        self,
        backbone: Extractor,
        *,
        num_classes: int,
        code_dim: Size = 4,
        domain_weight: float = 0.3,
        swap: bool = True,
        film: bool = True,
        frame: Annotated[int, Field(ge=0, le=64, strict=True)] = 0,
        source_samples: Size = 4,
        prior_weight: float = 1.0,
        kl_weight: float = 1e-4,
    ) -> None:
        super().__init__(
            backbone,
            num_classes=num_classes,
            style_dim=code_dim,
            source_samples=source_samples,
            prior_weight=prior_weight,
            kl_weight=kl_weight,
        )
        self.domain_weight, self.swap = domain_weight, swap
        # Checkpoints hold the names of these modules.
        self.frame = PoseNetwork(image_channels(backbone, _NEED), frame - 1) if frame else None
        self.standardise = nn.BatchNorm1d(backbone.style_dim, affine=False)
        self.encode = code_network(backbone.style_dim, code_dim)
        self.film = FiLM(code_dim, backbone.embedding_dim) if film else None

    def embed(self, x: Tensor) -> Tensor:
        """Returns the embedding (B, D) that is classified: pose undone, after FiLM."""
        return self._modulated(x).embedding

    def features(self, x: Tensor, poses: Tensor | None = None) -> Features:
        """Returns embedding (B, D) and style code (B, code_dim), before FiLM.

        `poses` (B, 2, 3) replace the estimated ones.
        """
        if self.frame is not None:
            x = resample(x, self.frame.poses(x) if poses is None else poses)
        return self._code_features(x)

    def modulate(self, features: Features) -> Features:
        """Returns the features that are classified, after FiLM."""
        return features if self.film is None else self.film.modulate(features)

    def _code_features(self, x: Tensor) -> Features:
        """Returns embedding and style code of images whose pose is undone already."""
        features: Features = self.backbone(x)
        code: Tensor = self.encode(self.standardise(features.style.detach()))
        return Features(features.embedding, code)

    def _episode_features(self, merged: Batch) -> tuple[Features, dict[str, Tensor]]:
        """Returns the episode's features with swapped codes, and the losses of pose and code."""
        x, y, domain = merged
        extra = {}
        if self.frame is not None:
            with torch.autocast(x.device.type, enabled=False):  # too coarse for coordinates
                x = self.frame(x)
                extra["frame"] = domain_disagreement(x, y, domain)
            x = x.detach()  # only the disagreement trains the pose network
        z, code = self._code_features(x)
        if self.domain_weight:
            extra["domain"] = self.domain_weight * prototype_loss(code, domain)
        if self.swap:
            code = code[within_domain_shuffle(domain)]
        return self.modulate(Features(z, code)), extra
