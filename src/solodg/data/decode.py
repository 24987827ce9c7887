"""Image files as tensors; how they are read is `solodg.pixels`."""

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from solodg.pixels import EXTENSIONS, BadImageError, decode_pixels

__all__ = ["EXTENSIONS", "BadImageError", "decode"]


def decode(source: str | Path | bytes | Image.Image, *, channels: int, size: int) -> Tensor:
    """A file, its bytes or a PIL image -> (channels, size, size) uint8."""
    return torch.from_numpy(decode_pixels(source, channels=channels, size=size))
