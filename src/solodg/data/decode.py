"""From whatever an image file holds to 8-bit pixels of one size: one way, for every use."""

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from solodg.errors import UserError

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm"})


class BadImageError(UserError):
    """An image that cannot be read; `name` says which."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"cannot read image {name}: {reason}")
        self.name = name


def decode(source: str | Path | bytes | Image.Image, *, channels: int, size: int) -> Tensor:
    """A file, its bytes or a PIL image -> (channels, size, size) uint8, resized without cropping.

    Honours the EXIF orientation, puts transparent images on white, brings 16-bit images to 8.
    """
    name = str(source) if isinstance(source, str | Path) else "given in memory"
    try:
        if isinstance(source, Image.Image):
            return _to_pixels(source, channels, size)
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            image.draft("RGB", (2 * size, 2 * size))  # large JPEGs are decoded at reduced size
            return _to_pixels(image, channels, size)
    except FileNotFoundError:
        raise BadImageError(name, "no such file") from None
    except UnidentifiedImageError:
        raise BadImageError(name, "not an image, or of an unknown format") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise BadImageError(name, str(error) or type(error).__name__) from error


def _to_pixels(image: Image.Image, channels: int, size: int) -> Tensor:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":
        image = _to_eight_bits(image)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    image = image.convert("L" if channels == 1 else "RGB")
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image))  # a copy: PIL's own memory is read-only
    return pixels[None] if channels == 1 else pixels.permute(2, 0, 1).contiguous()


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Wider pixels: the narrowest usual range that holds them becomes 0 to 255.

    So a scan of 12 bits in a file of 16 keeps its contrast; floats may also lie in [0, 1].
    """
    values = np.nan_to_num(np.asarray(image, dtype=np.float64)).clip(min=0.0)
    largest = float(values.max(initial=0.0))
    usual = [2.0**bits - 1 for bits in (8, 10, 12, 14, 16)]
    usual = [1.0, *usual] if image.mode == "F" else usual
    top = next((limit for limit in usual if largest <= limit), largest)
    return Image.fromarray((values / top * 255.0).round().astype(np.uint8))
