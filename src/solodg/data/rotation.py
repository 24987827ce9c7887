"""Rotating digits: enlarged, rotated and shrunk, as one matrix product where that is cheaper."""

from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from solodg.data.images import Indices, digest
from solodg.data.splits import Ints

ANGLES = (0, 15, 30, 45, 60, 75, 90)
LARGEST_MATRIX = 64  # pixels a side; for larger images the matrix costs more than it saves


class RotatedImages:
    """Upright images with an angle each, rotated when they are read.

    For image sizes at which all rotated images would fill the memory.
    """

    def __init__(self, base: Tensor, which: Ints, angle: Ints, size: int, channels: int) -> None:
        self.base = base  # (N, 28, 28) uint8
        self._which, self._angle = which, angle  # of each image: row of base, index of ANGLES
        self.size, self.channels = size, channels

    def __len__(self) -> int:
        return len(self._which)

    def take(self, indices: Indices) -> Tensor:
        """Returns the chosen images, rotated, (B, C, size, size) uint8."""
        chosen = np.asarray(indices, dtype=np.int64)
        angles = self._angle[chosen]
        out = torch.empty(len(chosen), self.size, self.size, dtype=torch.uint8)
        for angle in np.unique(angles):
            rows = np.flatnonzero(angles == angle)
            upright = self.base[torch.from_numpy(self._which[chosen[rows]])]
            out[torch.from_numpy(rows)] = rotate(upright, ANGLES[angle], self.size)
        return out[:, None].expand(-1, self.channels, -1, -1).contiguous()

    def subset(self, indices: Indices) -> "RotatedImages":
        """Returns the chosen images, with only the upright images that they need."""
        chosen = np.asarray(indices, dtype=np.int64)
        used, which = np.unique(self._which[chosen], return_inverse=True)
        base = self.base[torch.from_numpy(used)]
        return RotatedImages(base, which, self._angle[chosen], self.size, self.channels)

    def keys(self) -> list[str]:
        """Returns for each image a hash of its upright form and its angle."""
        names = [digest(row.tobytes()) for row in self.base.numpy()]
        return [f"{names[w]}@{ANGLES[a]}" for w, a in zip(self._which, self._angle, strict=True)]


def rotate(images: Tensor, angle: float, size: int) -> Tensor:
    """Rotates images counter-clockwise by `angle` degrees: (N, 28, 28) -> (N, size, size) uint8."""
    if size > LARGEST_MATRIX:
        return _to_bytes(torch.cat([resample(x.float(), angle, size) for x in images.split(256)]))
    pixels = images.flatten(1).float() @ _rotation(images.shape[1], images.shape[2], angle, size)
    return _to_bytes(pixels.view(-1, size, size))


@cache
def _rotation(height: int, width: int, angle: float, size: int) -> Tensor:
    """Returns enlarging, rotating and shrinking as one matrix, (height * width, size * size).

    All three are linear in the pixels, so each row is the result for an image with one bright
    pixel.
    """
    single_pixels = torch.eye(height * width).view(-1, height, width)
    return resample(single_pixels, angle, size).flatten(1)


def resample(images: Tensor, angle: float, size: int) -> Tensor:
    """Enlarges, rotates and shrinks images: (N, H, W) float -> (N, size, size) float."""
    large = max(size, min(224, 4 * size))
    radians = torch.tensor(angle * torch.pi / 180)
    cosine, sine = radians.cos(), radians.sin()
    matrix = torch.tensor([[cosine, -sine, 0.0], [sine, cosine, 0.0]])
    x = F.interpolate(images[:, None], size=(large, large), mode="bilinear", align_corners=False)
    grid = F.affine_grid(matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    x = F.grid_sample(x, grid, align_corners=False)
    return F.interpolate(x, size=(size, size), mode="bilinear", antialias=True)[:, 0]


def _to_bytes(x: Tensor) -> Tensor:
    return x.round_().clamp_(0, 255).to(torch.uint8)
