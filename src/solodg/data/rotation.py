"""Digits that are rotated when they are read."""

import numpy as np
import torch
from torch import Tensor

from solodg.data.images import Indices, digest
from solodg.data.resampling import rotation
from solodg.data.splits import Ints

ANGLES = (0, 15, 30, 45, 60, 75, 90)


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
        """Returns for each image hashes of its upright form and of its rotation."""
        names = [digest(row.tobytes()) for row in self.base.numpy()]
        shape = self.base.shape[1:]
        turns = [f"{angle}:{rotation(*shape, angle, self.size).key()}" for angle in ANGLES]
        return [f"{names[w]}@{turns[a]}" for w, a in zip(self._which, self._angle, strict=True)]


def rotate(images: Tensor, angle: int, size: int) -> Tensor:
    """Rotates images counter-clockwise by `angle` degrees: (N, 28, 28) -> (N, size, size) uint8."""
    return torch.from_numpy(rotation(*images.shape[1:], angle, size)(images.numpy()))
