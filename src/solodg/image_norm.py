"""BatchNorm in which every image has a say: single-image adaptation inside the backbone.

A BatchNorm normalises by statistics of the source images, which do not fit an image of another
domain. Here channel statistics of the image itself are mixed in, the more the larger the map:

    share  a = H W / (H W + source_pixels)
    mean       (1 - a) source mean     + a image's mean
    variance   (1 - a) source variance + a image's variance

as if the source statistics had been seen on `source_pixels` pixels (the prior of Schneider et al.,
2020, for a single image). The mix is there in training too, where the batch stands for the source.
A prediction depends on its own image only, and takes one forward pass.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from solodg.errors import UserError


class ImageBatchNorm(nn.BatchNorm2d):
    """In place of a BatchNorm and whatever activation that has; weights have the same names."""

    def __init__(self, norm: nn.BatchNorm2d, source_pixels: float) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine)
        if norm.running_mean is not None:
            self.to(norm.running_mean)  # device and type
        self.load_state_dict(norm.state_dict(), strict=False)
        for own, given in zip(self.parameters(), norm.parameters(), strict=False):
            own.requires_grad_(given.requires_grad)
        self.source_pixels = source_pixels
        self.lender: Tensor | None = None  # (B,) whose statistics stand for each image's own
        self.drop = getattr(norm, "drop", nn.Identity())  # timm's BatchNormAct2d has both
        self.act = getattr(norm, "act", nn.Identity())
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # Two means and one addcmul: two and a half times as fast on a CPU as var_mean, * and +.
        own_mean = wide.mean((2, 3))  # (B, C)
        own_var = (wide.square().mean((2, 3)) - own_mean.square()).clamp(min=0)
        if self.lender is not None:
            own_mean, own_var = own_mean[self.lender], own_var[self.lender]
        pixels = x.shape[2] * x.shape[3]
        mean, var = self._source_statistics(own_mean, own_var, pixels)  # (C,)
        share = pixels / (pixels + self.source_pixels)
        mean = mean + share * (own_mean - mean)  # (B, C)
        var = var + share * (own_var - var)
        scale = torch.rsqrt(var + self.eps)
        if self.affine:
            scale = self.weight * scale
        shift = -mean * scale
        if self.affine:
            shift = self.bias + shift
        normalised = torch.addcmul(shift[:, :, None, None], wide, scale[:, :, None, None])
        result: Tensor = self.act(self.drop(normalised.to(x.dtype)))
        return result

    def _source_statistics(
        self, own_mean: Tensor, own_var: Tensor, pixels: int
    ) -> tuple[Tensor, Tensor]:
        """Of the batch in training, where they are also remembered; else what is remembered."""
        assert self.running_mean is not None
        assert self.running_var is not None
        if not self.training:
            return self.running_mean, self.running_var
        mean = own_mean.mean(0)
        var = own_var.mean(0) + own_mean.var(0, correction=0)
        with torch.no_grad():
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            rate = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            values = len(own_mean) * pixels
            self.running_mean.lerp_(mean, rate)
            self.running_var.lerp_(var * values / max(1, values - 1), rate)
        return mean, var


def normalise_by_image(net: nn.Module, source_pixels: float) -> None:
    """Put an ImageBatchNorm in the place of each BatchNorm."""
    found = {n: m for n, m in net.named_modules() if isinstance(m, nn.BatchNorm2d)}
    if not found:
        raise UserError(
            "image norm works on BatchNorm, and this backbone has none (other norms are the "
            "image's own already). Turn it off with --image-norm 0, or take e.g. resnet18."
        )
    for name, norm in found.items():
        parent, _, last = name.rpartition(".")
        setattr(net.get_submodule(parent), last, ImageBatchNorm(norm, source_pixels))


def image_norms(net: nn.Module) -> list[ImageBatchNorm]:
    return [module for module in net.modules() if isinstance(module, ImageBatchNorm)]


@contextmanager
def others_statistics(net: nn.Module, lender: Tensor | None) -> Iterator[None]:
    """Inside, statistics of image lender[i] of a batch stand for those of image i.

    None: no image's, those of the source alone.
    """
    norms = image_norms(net)
    before = [norm.source_pixels for norm in norms]
    for norm in norms:
        norm.lender = lender
        if lender is None:
            norm.source_pixels = math.inf
    try:
        yield
    finally:
        for norm, pixels in zip(norms, before, strict=True):
            norm.lender, norm.source_pixels = None, pixels
