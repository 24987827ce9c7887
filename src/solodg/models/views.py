"""Views: what a reading does to the pixels of an image before the backbone sees them.

A view keeps the class of an image and changes what domains differ in, such as colour and texture,
or where and how large the object is. All take and return images (B, C, H, W) in [0, 1].
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from solodg.readings import PLAIN

_LUMA = (0.299, 0.587, 0.114)
_MARGIN = 0.1  # of each side that `zoom` cuts off
_CONTRAST = 1.6  # of a line drawing


def plain(x: Tensor) -> Tensor:
    """Returns the images as they are."""
    return x


def flip(x: Tensor) -> Tensor:
    """Returns mirror images."""
    return x.flip(3)


def grey(x: Tensor) -> Tensor:
    """Returns images without colour, with as many channels as before."""
    if x.shape[1] != len(_LUMA):
        return x.mean(1, keepdim=True).expand_as(x)
    weights = torch.tensor(_LUMA, dtype=x.dtype, device=x.device)[:, None, None]
    return (x * weights).sum(1, keepdim=True).expand_as(x)


def zoom(x: Tensor) -> Tensor:
    """Returns the middle of the images, enlarged to their size."""
    height, width = x.shape[2:]
    top, left = int(height * _MARGIN), int(width * _MARGIN)
    middle = x[:, :, top : height - top, left : width - left]
    return F.interpolate(middle, (height, width), mode="bilinear")


def line(x: Tensor) -> Tensor:
    """Returns the images as line drawings: dark lines on white where brightness changes.

    Grey is divided by its blurred surroundings (colour dodge), which removes colour, shading and
    flat texture, and the contrast is raised.
    """
    shade = grey(x)[:, :1]
    drawn = shade / (1.004 - blur(1 - shade, x.shape[-1] / 32))
    drawn = (drawn.clamp(0, 1) - 0.5) * _CONTRAST + 0.5
    return drawn.clamp(0, 1).expand_as(x)


def blur(x: Tensor, sigma: float) -> Tensor:
    """Blurs maps (B, 1, H, W) by a Gaussian of this standard deviation; edges are repeated."""
    height, width = x.shape[2:]
    reach = min(int(3 * sigma + 0.5), min(height, width) - 1)
    down, across = (_blurring(n, sigma, reach, x.dtype, x.device) for n in (height, width))
    return down @ (x @ across.T)


@lru_cache(maxsize=4)  # two sizes of images at a time
def _blurring(
    size: int, sigma: float, reach: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns the matrix (size, size) that blurs a line of pixels, whose ends are repeated.

    Two products with matrices are many times faster than two convolutions of one channel.
    """
    places = np.arange(-reach, reach + 1)
    kernel = np.exp(-(places**2) / (2 * sigma**2))
    matrix = np.zeros((size, size))
    rows = np.arange(size)[:, None]
    np.add.at(matrix, (rows, (rows + places).clip(0, size - 1)), kernel / kernel.sum())
    with torch.inference_mode(False):  # it is kept, also for work with gradients
        return torch.from_numpy(matrix).to(dtype).to(device)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    PLAIN: plain,
    "line": line,
    "zoom": zoom,
    "flip": flip,
    "grey": grey,
}
