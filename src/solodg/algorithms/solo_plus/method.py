"""Single-sample generalisation in which the image also says how it is to be read.

The paper's generator reads the channel means of all stages of the very image that it classifies,
and may read its class there, which need not hold on an unseen domain. That was the reason for the
first four parts here; what they give is not more than three seeds can tell from nothing. What wins
are the last two (docs/research_notebook.md). What differs from `solo`:

    code     the style is standardised, and squeezed into a few numbers that no gradient of the
             classification reaches the backbone through
    domain   images of one domain are asked to have codes near their domain's mean and far from
             those of the others (a prototype loss, so that any number of domains will do)
    swap     in training an image is classified with the code of another image of its domain; at
             test with its own
    FiLM     the code also scales and shifts the embedding, starting at the identity
    norm     the backbone's BatchNorm takes a share of the image's own statistics; with pretrained
             weights, three shares, whose readings are averaged (image_norm.py)
    frame    the image also writes the frame in which it is read, in two looks, and images of one
             class are asked to lie alike in all domains (frame.py); for backbones that are trained
             from random weights

All else (meta-learning, centres, hierarchy, meta-prior, KL) is the paper's, in `solo`.
"""

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from solodg.algorithms.base import image_channels
from solodg.algorithms.centres import prototype_loss
from solodg.algorithms.solo.method import Solo
from solodg.algorithms.solo_plus.pose import Frame, disagreement, resampled
from solodg.types import Batch, Features

_NEED = "a frame is written for pixels (leave frame out)"


class SoloPlus(Solo):
    """`solo` on a style code of few dimensions, read from an image in its own frame.

    code_dim        numbers of the style code; `domain_weight` that of its domain supervision
    swap, film      in training another image's code of the domain; the code's FiLM
    frame           looks that an image takes to write its frame; 0: none, as on stored features,
                    which have no pixels
    """

    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        "random": Solo.recipes["random"] | {"image_norm": 100.0, "arguments": {"frame": 2}},
        "pretrained": {"image_norm": (0.0, 3000.0, 300.0)},
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
        backbone: nn.Module,
        *,
        num_classes: int,
        code_dim: int = 4,
        domain_weight: float = 0.3,
        swap: bool = True,
        film: bool = True,
        frame: Annotated[int, Field(ge=0, strict=True)] = 0,
        source_samples: int = 4,
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
        self.frame = Frame(image_channels(backbone, _NEED), frame) if frame else None
        width = int(backbone.style_dim)  # type: ignore[arg-type]
        self.standardise = nn.BatchNorm1d(width, affine=False)
        self.encode = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, code_dim))
        self.film = nn.Linear(code_dim, 2 * int(backbone.embedding_dim)) if film else None  # type: ignore[arg-type]
        if self.film is not None:
            nn.init.zeros_(self.film.weight)
            nn.init.zeros_(self.film.bias)

    def embed(self, x: Tensor) -> Tensor:
        return self._read(x).embedding

    def observe(self, x: Tensor, maps: Tensor | None = None) -> Features:
        """`maps`: in frames that others wrote, (B, 2, 3)."""
        if self.frame is not None:
            x = resampled(x, self.frame.maps(x) if maps is None else maps)
        return self._observe_framed(x)

    def _observe_framed(self, x: Tensor) -> Features:
        features: Features = self.backbone(x)
        code: Tensor = self.encode(self.standardise(features.style.detach()))
        return Features(features.embedding, code)

    def _read_episode(self, merged: Batch) -> tuple[Features, dict[str, Tensor]]:
        x = merged.x
        extra = {}
        if self.frame is not None:
            with torch.autocast(x.device.type, enabled=False):  # half a pixel is too coarse
                framed = self.frame(x)
                extra["frame"] = disagreement(framed, merged.y, merged.domain)
            x = framed.detach()
        z, code = self._observe_framed(x)
        if self.domain_weight:
            extra["domain"] = self.domain_weight * prototype_loss(code, merged.domain)
        if self.swap:
            code = code[within_domain_shuffle(merged.domain)]
        return self.conditioned(Features(z, code)), extra

    def conditioned(self, observed: Features) -> Features:
        if self.film is None:
            return observed
        scale, shift = self.film(observed.style).chunk(2, 1)
        return Features(observed.embedding * (1 + scale) + shift, observed.style)


def within_domain_shuffle(domain: Tensor) -> Tensor:
    """A permutation that sends every image to one of its own domain, at random."""
    mixed = torch.randperm(len(domain), device=domain.device)
    source = mixed[domain[mixed].argsort(stable=True)]  # domain by domain, at random within
    place = domain.argsort(stable=True)
    result = torch.empty_like(mixed)
    result[place] = source
    return result
