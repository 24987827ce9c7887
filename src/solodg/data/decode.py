"""Image files as tensors; `solodg.pixels` decodes them."""

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from solodg.pixels import EXTENSIONS, BadImageError, decode_pixels

__all__ = ["EXTENSIONS", "BadImageError", "decode"]


def decode(source: str | Path | bytes | Image.Image, *, channels: int, size: int) -> Tensor:
    """Decodes a file, its bytes or a PIL image to (channels, size, size) uint8."""
    return torch.from_numpy(decode_pixels(source, channels=channels, size=size))
