"""Image norm: BatchNorm that mixes in the statistics of each single image.

A BatchNorm normalises by statistics of the source images, which do not fit an image of another
domain. Image norm mixes in the channel statistics of the image itself, the more the larger its map:

    share  a = H W / (H W + source_pixels)
    mean       (1 - a) source mean     + a image's mean
    variance   (1 - a) source variance + a image's variance

This treats the source statistics as if they had been measured on `source_pixels` pixels (the prior
of Schneider et al., 2020, for a single image). Training mixes in the same way; there the batch
provides the source statistics. By convention `source_pixels` = 0 means plain BatchNorm (a = 0).

A reading is one way to read an image: a number of source pixels, and a view of the image
(models/views.py). A backbone may have several readings. In training each image goes through one
reading, drawn at random. At test each image goes through all of them, one forward pass each, or
through fewer (algorithms/early_exit.py), and the features are averaged. A prediction depends on its
own image only.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from solodg.errors import UserError
from solodg.models.map_gradients import MapStatistics, ScaledMap

# The number of the one reading of all images.
_only: ContextVar[int | None] = ContextVar("only", default=None)


class ImageBatchNorm(nn.BatchNorm2d):
    """Replaces a BatchNorm (with its activation, if any) and normalises each image by the mix.

    Weights and statistics have the names of the BatchNorm, so that checkpoints fit both. With
    several readings a batch holds all images once per reading, one reading after the other. If
    `drawn` is set, it holds each image once, and `drawn` is the reading of each row.
    """

    def __init__(self, norm: nn.BatchNorm2d, source_pixels: Sequence[float]) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine)
        if norm.running_mean is not None:
            self.to(norm.running_mean)  # device and type
        self.load_state_dict(norm.state_dict(), strict=False)
        for copied, original in zip(self.parameters(), norm.parameters(), strict=False):
            copied.requires_grad_(original.requires_grad)
        self.source_pixels = tuple(source_pixels)  # of each reading
        self.drawn: Tensor | None = None  # (B,) reading of each row
        self.donor: Tensor | None = None  # (B,) row whose statistics replace those of each image
        self.overwrites = False  # its input, where no gradients are kept
        self.drop = getattr(norm, "drop", nn.Identity())  # timm's BatchNormAct2d has both
        self.act = getattr(norm, "act", nn.Identity())
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalised and activated maps (B, C, H, W)."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, var = self._statistics(wide)  # (B, C), or (C,) for all images
        weight, bias = (self.weight, self.bias) if self.affine else (None, None)
        out = wide if self.overwrites and not torch.is_grad_enabled() else None
        normalised = normalise(wide, mean, var, self.eps, weight, bias, out)
        result: Tensor = self.act(self.drop(normalised.to(x.dtype)))
        return result

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean and variance that normalise each image: (B, C), or (C,) for all."""
        pixels = x.shape[2] * x.shape[3]
        shares = self._shares(pixels)
        if not self.training and not any(shares):
            assert self.running_mean is not None
            assert self.running_var is not None
            return self.running_mean, self.running_var  # plain BatchNorm
        own_mean, own_var = channel_statistics(x)  # (B, C)
        mean, var = self._source_statistics(own_mean, own_var, pixels)  # (C,)
        if self.donor is not None:
            own_mean, own_var = self._of_donor(own_mean), self._of_donor(own_var)
        return self._mixed(mean, own_mean, shares), self._mixed(var, own_var, shares)

    def _shares(self, pixels: int) -> list[float]:
        """Returns the image's share in each reading of the batch."""
        only = _only.get()
        chosen = self.source_pixels if only is None else self.source_pixels[only : only + 1]
        return [pixels / (pixels + k) if k else 0.0 for k in chosen]

    def _mixed(self, source: Tensor, own: Tensor, shares: list[float]) -> Tensor:
        """Mixes source (C,) and own statistics (B, C) to (B, C), by the share of each reading."""
        if len(shares) == 1:
            return source.lerp(own, shares[0])
        each = torch.tensor(shares, dtype=own.dtype, device=own.device)
        if self.drawn is not None:
            return source + each[self.drawn, None] * (own - source)
        by_reading = own.reshape(len(shares), -1, own.shape[1])  # (readings, images, C)
        return (source + each[:, None, None] * (by_reading - source)).reshape(-1, own.shape[1])

    def _of_donor(self, own: Tensor) -> Tensor:
        """Returns the statistics (B, C) of the donor of each image, within its reading."""
        assert self.donor is not None
        by_reading = own.reshape(-1, len(self.donor), own.shape[1])
        return by_reading[:, self.donor].flatten(0, 1)

    def _source_statistics(
        self, own_mean: Tensor, own_var: Tensor, pixels: int
    ) -> tuple[Tensor, Tensor]:
        """Returns running mean and variance (C,); in training those of the batch, after an update.

        The statistics of the batch follow from those of its images, so no second pass is needed.
        """
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


def channel_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and variance of each image's channels: (B, C, H, W) -> (B, C) twice."""
    if _needs_gradients():
        found: tuple[Tensor, Tensor] = MapStatistics.apply(x)  # type: ignore[no-untyped-call]
        return found
    return MapStatistics.forward(x)


def normalise(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """Normalises maps (B, C, H, W) by the mean and variance (B, C) of each image.

    Each may be (C,) for all images, as `weight` and `bias`, the affine map after it; None: no map.
    The result is written to `out`, if given, which may be x.
    """
    scale = torch.rsqrt(var + eps)  # (B, C)
    if weight is not None:
        scale = weight * scale
    shift = -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
    if _needs_gradients():
        each = scale.expand(len(x), -1), shift.expand(len(x), -1)
        scaled: Tensor = ScaledMap.apply(x, *each)  # type: ignore[no-untyped-call]
        return scaled
    if out is not None and torch._C._get_tracing_state() is None:
        return torch.addcmul(shift[..., None, None], x, scale[..., None, None], out=out)
    return ScaledMap.forward(x, scale, shift)


def _needs_gradients() -> bool:
    """Returns whether gradients are kept; the exporter to ONNX knows no functions of our own."""
    return torch.is_grad_enabled() and torch._C._get_tracing_state() is None


def normalise_by_image(net: nn.Module, source_pixels: Sequence[float]) -> None:
    """Replaces every BatchNorm by an ImageBatchNorm with the source pixels of each reading."""
    if not replace_batch_norms(net, lambda norm: ImageBatchNorm(norm, source_pixels)):
        raise UserError(
            "image norm works on BatchNorm, and this backbone has none (other norms use the "
            "image's own statistics already). Turn it off with --image-norm 0, or try resnet18."
        )


@torch.no_grad()
def let_norms_overwrite(net: nn.Module, x: Tensor) -> None:
    """Lets every ImageBatchNorm write over its input, if nothing else of the network reads it.

    That saves a new map for each. Norms that overwrite a map which is read again change what comes
    out, so the features of some images x tell: any, but not blank. Which maps are read again does
    not depend on the image.
    """
    norms, given, training = image_norms(net), x.clone(), net.training
    if not norms:
        return
    net.eval()
    with one_reading(0):
        expected = net(x)
        kept = [expected.embedding, *(each.clone() for each in expected.maps)]
        for norm in norms:
            norm.overwrites = True
        found = net(x)
    same = zip([found.embedding, *found.maps, x], [*kept, given], strict=True)
    if not all(torch.equal(a, b) for a, b in same):
        for norm in norms:
            norm.overwrites = False
    net.train(training)


def replace_batch_norms(net: nn.Module, make: Callable[[nn.BatchNorm2d], nn.Module]) -> int:
    """Replaces every BatchNorm2d by what `make` returns for it; returns how many there were."""
    found = {n: m for n, m in net.named_modules() if isinstance(m, nn.BatchNorm2d)}
    for name, norm in found.items():
        parent, _, last = name.rpartition(".")
        setattr(net.get_submodule(parent), last, make(norm))
    return len(found)


def freeze_statistics(net: nn.Module) -> None:
    """Puts every BatchNorm into evaluation mode, in which it keeps its statistics."""
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


def image_norms(net: nn.Module) -> list[ImageBatchNorm]:
    """Returns all ImageBatchNorms of a network."""
    return [module for module in net.modules() if isinstance(module, ImageBatchNorm)]


@contextmanager
def one_reading(which: int) -> Iterator[None]:
    """Inside, batches hold all images once, in the reading with this number.

    It holds for the current thread.
    """
    token = _only.set(which)
    try:
        yield
    finally:
        _only.reset(token)


@contextmanager
def drawn_readings(net: nn.Module, drawn: Tensor) -> Iterator[None]:
    """Inside, row i of a batch is normalised by reading `drawn[i]`.

    Not safe for several threads: for training only.
    """
    norms = image_norms(net)
    for norm in norms:
        norm.drawn = drawn
    try:
        yield
    finally:
        for norm in norms:
            norm.drawn = None


@contextmanager
def donor_statistics(net: nn.Module, donor: Tensor | None) -> Iterator[None]:
    """Inside, image i of a batch is normalised with the statistics of image `donor[i]`.

    None: with the source statistics alone.
    """
    norms = image_norms(net)
    before = [norm.source_pixels for norm in norms]
    for norm in norms:
        norm.donor = donor
        if donor is None:
            norm.source_pixels = (0.0,) * len(norm.source_pixels)
    try:
        yield
    finally:
        for norm, source_pixels in zip(norms, before, strict=True):
            norm.donor, norm.source_pixels = None, source_pixels
