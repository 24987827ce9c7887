"""Turns pixels into inputs of a model: scaled to [0, 1], and augmented in training.

Augmentation works on whole batches, on the device of the model, with parameters drawn for each
image from an explicit generator. Crop, resize and flip are one sampling grid; the changes of
colour are one matrix for each image.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from solodg.types import Transform

_GREY = (0.299, 0.587, 0.114)


def to_unit(x: Tensor) -> Tensor:
    """Scales uint8 pixels to [0, 1]; ready features are returned as they are."""
    return x.to(torch.float32) / 255.0 if x.dtype == torch.uint8 else x


def unaugmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Scales pixels as `to_unit` does; stands in place of an `Augmentation`, and draws nothing."""
    return to_unit(x)


@dataclass(frozen=True)
class Augmentation:
    """Random resized crop, horizontal flip and colour jitter."""

    min_area: float  # of the crop; the largest is the whole image
    flip: bool
    jitter: float  # strength of brightness, contrast, saturation, and hue in rotations

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Augments images, (B, C, H, W) uint8 -> float in [0, 1]; leaves features as they are."""
        x = to_unit(x)
        if x.ndim != 4:
            return x
        x = F.grid_sample(
            x, self._grid(x, generator), padding_mode="reflection", align_corners=False
        )
        return self._colours(x, generator) if self.jitter and x.shape[1] == 3 else x

    def _grid(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Draws a crop for every image, as torchvision's RandomResizedCrop does: (B, H, W, 2)."""
        count = len(x)
        area = _uniform(count, self.min_area, 1.0, generator)
        ratio = _uniform(count, math.log(3 / 4), math.log(4 / 3), generator).exp()
        width = (area * ratio).sqrt().clamp(max=1.0)
        height = (area / ratio).sqrt().clamp(max=1.0)
        centre_x = (1 - width) * _uniform(count, -1.0, 1.0, generator)
        centre_y = (1 - height) * _uniform(count, -1.0, 1.0, generator)
        if self.flip:
            width = width * (torch.rand(count, generator=generator) < 0.5).float().mul(2).sub(1)
        zero = torch.zeros(count)
        rows = [torch.stack([width, zero, centre_x], 1), torch.stack([zero, height, centre_y], 1)]
        affine = torch.stack(rows, 1).to(x.device)  # (B, 2, 3)
        return F.affine_grid(affine, list(x.shape), align_corners=False)

    def _colours(self, x: Tensor, generator: torch.Generator) -> Tensor:
        count, strength = len(x), self.jitter
        low, high = max(0.0, 1 - strength), 1 + strength
        brightness, contrast, saturation = (_uniform(count, low, high, generator) for _ in range(3))
        hue = _uniform(count, -min(strength, 0.5), min(strength, 0.5), generator)
        return jitter_colours(x, brightness, contrast, saturation, hue)


PHOTO = Augmentation(min_area=0.8, flip=True, jitter=0.4)
DIGIT = Augmentation(min_area=0.7, flip=False, jitter=0.0)
AUGMENTATIONS = {"photo": PHOTO, "digit": DIGIT}


def without_flip(transform: Transform) -> Transform:
    """Returns a transform that mirrors no image; one that never does is returned as it is."""
    return replace(transform, flip=False) if isinstance(transform, Augmentation) else transform


def jitter_colours(
    x: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor, hue: Tensor
) -> Tensor:
    """Changes brightness, contrast, saturation and hue of every image; each argument is (B,).

    Hue is in rotations of the colour circle, the others are factors. All four are affine in the
    colours, so they are one 3x3 matrix and one offset for each image. Hue rotates the chroma plane
    of YIQ instead of converting to HSV.
    """
    grey = torch.tensor(_GREY)
    to_grey = grey.expand(3, 3)  # every output channel is the grey value
    blend = saturation[:, None, None]
    saturate = blend * torch.eye(3) + (1 - blend) * to_grey  # (B, 3, 3)
    matrix = brightness[:, None, None] * (saturate @ _hue_matrix(hue))
    matrix = matrix.to(x)
    level = (x.mean((2, 3)) * grey.to(x)).sum(1) * brightness.to(x)  # (B,) mean grey, brightened
    factor = contrast.to(x)[:, None]
    offset = (1 - factor) * level[:, None]  # (B, 1)
    matrix = matrix * factor[:, :, None]
    mixed = torch.baddbmm(offset[:, :, None], matrix, x.flatten(2))  # (B, 3, H * W)
    return mixed.clamp_(0.0, 1.0).view_as(x)


def _hue_matrix(rotations: Tensor) -> Tensor:
    """Returns the RGB matrices, (B, 3, 3), of (B,) rotations of the colour circle."""
    to_yiq = torch.tensor([_GREY, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312)])
    angle = 2 * math.pi * rotations
    rotate = torch.zeros(len(rotations), 3, 3)
    rotate[:, 0, 0] = 1.0
    rotate[:, 1, 1] = rotate[:, 2, 2] = angle.cos()
    rotate[:, 1, 2], rotate[:, 2, 1] = -angle.sin(), angle.sin()
    on_rgb: Tensor = torch.linalg.inv(to_yiq) @ rotate @ to_yiq
    return on_rgb


def _uniform(count: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    return torch.empty(count).uniform_(low, high, generator=generator)
