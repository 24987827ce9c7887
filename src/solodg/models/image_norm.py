"""BatchNorm in which every image has a say: single-image adaptation inside the backbone.

A BatchNorm normalises by statistics of the source images, which do not fit an image of another
domain. Here channel statistics of the image itself are mixed in, the more the larger the map:

    share  a = H W / (H W + source_pixels)
    mean       (1 - a) source mean     + a image's mean
    variance   (1 - a) source variance + a image's variance

as if the source statistics had been seen on `source_pixels` pixels (the prior of Schneider et al.,
2020, for a single image). The mix is there in training too, where the batch stands for the source.
`source_pixels` of 0 is not that limit but none of it, a = 0: plain BatchNorm.

Several numbers of source pixels are several readings of an image, 0 being the one by the source's
statistics alone. In training every image is read in one way, at random; a prediction rests on the
mean of what all readings give. It depends on its own image only, and takes a forward pass for each
reading.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from solodg.errors import UserError

ImageNorm = float | tuple[float, ...] | None  # source pixels of the readings; none and 0: off


def readings_of(image_norm: ImageNorm) -> tuple[float, ...]:
    """() where it is off."""
    if isinstance(image_norm, tuple):
        return image_norm
    return (float(image_norm),) if image_norm else ()


class ImageBatchNorm(nn.BatchNorm2d):
    """In place of a BatchNorm and whatever activation that has; weights have the same names.

    Of several readings a batch holds all images once for each, one reading after another; unless
    `drawn` says which reading each row is.
    """

    def __init__(self, norm: nn.BatchNorm2d, readings: Sequence[float]) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine)
        if norm.running_mean is not None:
            self.to(norm.running_mean)  # device and type
        self.load_state_dict(norm.state_dict(), strict=False)
        for own, given in zip(self.parameters(), norm.parameters(), strict=False):
            own.requires_grad_(given.requires_grad)
        self.readings = tuple(readings)  # source pixels of each
        self.drawn: Tensor | None = None  # (B,)
        self.lender: Tensor | None = None  # (B,) whose statistics stand for each image's own
        self.drop = getattr(norm, "drop", nn.Identity())  # timm's BatchNormAct2d has both
        self.act = getattr(norm, "act", nn.Identity())
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        own_mean, own_var = channel_statistics(wide)  # (B, C)
        pixels = x.shape[2] * x.shape[3]
        mean, var = self._source_statistics(own_mean, own_var, pixels)  # (C,)
        if self.lender is not None:
            own_mean, own_var = self._lent(own_mean), self._lent(own_var)
        mean = self._mixed(mean, own_mean, pixels)  # (B, C)
        var = self._mixed(var, own_var, pixels)
        scale = torch.rsqrt(var + self.eps)
        if self.affine:
            scale = self.weight * scale
        shift = -mean * scale
        if self.affine:
            shift = self.bias + shift
        normalised = scaled(wide, scale, shift)
        result: Tensor = self.act(self.drop(normalised.to(x.dtype)))
        return result

    def _mixed(self, source: Tensor, own: Tensor, pixels: int) -> Tensor:
        """(C,) and (B, C) -> (B, C), each row by the share of its reading."""
        shares = [pixels / (pixels + k) if k else 0.0 for k in self.readings]
        if len(shares) == 1:
            return source + shares[0] * (own - source)
        each = torch.tensor(shares, dtype=own.dtype, device=own.device)
        if self.drawn is not None:
            return source + each[self.drawn, None] * (own - source)
        by_reading = own.reshape(len(shares), -1, own.shape[1])  # (readings, images, C)
        return (source + each[:, None, None] * (by_reading - source)).reshape(-1, own.shape[1])

    def _lent(self, own: Tensor) -> Tensor:
        assert self.lender is not None
        by_reading = own.reshape(len(self.readings), -1, own.shape[1])
        return by_reading[:, self.lender].flatten(0, 1)

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


# Two means and one addcmul: two and a half times as fast on a CPU as var_mean, * and +.


def channel_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each image's channels: (B, C, H, W) -> (B, C) twice."""
    mean = x.mean((2, 3))
    return mean, (x.square().mean((2, 3)) - mean.square()).clamp(min=0)


def scaled(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Maps (B, C, H, W) times one (B, C) plus another."""
    return torch.addcmul(shift[:, :, None, None], x, scale[:, :, None, None])


def normalise_by_image(net: nn.Module, readings: Sequence[float]) -> None:
    """Put an ImageBatchNorm in the place of each BatchNorm."""
    if not replace_batch_norms(net, lambda norm: ImageBatchNorm(norm, readings)):
        raise UserError(
            "image norm works on BatchNorm, and this backbone has none (other norms are the "
            "image's own already). Turn it off with --image-norm 0, or take e.g. resnet18."
        )


def replace_batch_norms(net: nn.Module, make: Callable[[nn.BatchNorm2d], nn.Module]) -> int:
    """Put what `make` makes of it in the place of each BatchNorm; how many there were."""
    found = {n: m for n, m in net.named_modules() if isinstance(m, nn.BatchNorm2d)}
    for name, norm in found.items():
        parent, _, last = name.rpartition(".")
        setattr(net.get_submodule(parent), last, make(norm))
    return len(found)


def image_norms(net: nn.Module) -> list[ImageBatchNorm]:
    return [module for module in net.modules() if isinstance(module, ImageBatchNorm)]


@contextmanager
def drawn_readings(net: nn.Module, drawn: Tensor) -> Iterator[None]:
    """Inside, row i of a batch is read in way drawn[i]. For training, which is one at a time."""
    norms = image_norms(net)
    for norm in norms:
        norm.drawn = drawn
    try:
        yield
    finally:
        for norm in norms:
            norm.drawn = None


@contextmanager
def others_statistics(net: nn.Module, lender: Tensor | None) -> Iterator[None]:
    """Inside, statistics of image lender[i] of a batch stand for those of image i.

    None: no image's, those of the source alone.
    """
    norms = image_norms(net)
    before = [norm.readings for norm in norms]
    for norm in norms:
        norm.lender = lender
        if lender is None:
            norm.readings = (0.0,) * len(norm.readings)
    try:
        yield
    finally:
        for norm, readings in zip(norms, before, strict=True):
            norm.lender, norm.readings = None, readings
