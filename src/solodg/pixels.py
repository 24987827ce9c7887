"""Turns images (files, bytes, PIL images, arrays, tensors) into 8-bit pixels of one size.

It needs only NumPy and Pillow, so that an exported model works without torch.
"""

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from solodg.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

ImageLike = Union[str, Path, bytes, Image.Image, NDArray[Any], "Tensor"]
Pixels = NDArray[np.uint8]

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm"})


class BadImageError(UserError):
    """An image that cannot be read; `name` says which."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"cannot read image {name}: {reason}")
        self.name = name


class TooManyPixelsError(BadImageError):
    """An image that is larger than allowed, and was not decoded."""


@dataclass(frozen=True)
class DecodeLimits:
    """Limits for images from untrusted senders: a number of pixels, and well-known formats.

    Pillow reads more formats than these; some of them start other programs.
    """

    max_pixels: int
    formats: tuple[str, ...] = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")


def decode_pixels(
    source: str | Path | bytes | Image.Image,
    *,
    channels: int,
    size: int,
    limits: DecodeLimits | None = None,
    name: str | None = None,
) -> Pixels:
    """Decodes a file, its bytes or a PIL image to (channels, size, size) without cropping.

    It applies the EXIF orientation, puts transparent images on white, and reduces 16-bit images to
    8 bits. `limits` are for images from untrusted senders. `name` is what errors call the image.
    """
    if name is None:
        name = str(source) if isinstance(source, str | Path) else "given in memory"
    try:
        if isinstance(source, Image.Image):
            return _to_pixels(source, channels, size)
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        with Image.open(file, formats=limits.formats if limits else None) as image:
            if limits and image.width * image.height > limits.max_pixels:
                raise TooManyPixelsError(
                    name,
                    f"{image.width} x {image.height} pixels; at most {limits.max_pixels:,} pixels "
                    "are allowed",
                )
            image.draft("RGB", (2 * size, 2 * size))  # large JPEGs are decoded at reduced size
            return _to_pixels(image, channels, size)
    except BadImageError:
        raise
    except FileNotFoundError:
        raise BadImageError(name, "no such file") from None
    except UnidentifiedImageError:
        raise BadImageError(name, "not an image, or of an unknown format") from None
    except Image.DecompressionBombError as error:
        raise TooManyPixelsError(name, str(error)) from error
    except Exception as error:  # a damaged file: Pillow's readers raise errors of any type
        raise BadImageError(name, str(error) or type(error).__name__) from error


def pixels_of(image: ImageLike, *, channels: int, size: int) -> Pixels:
    """Turns a path, bytes, PIL image, array or tensor into (channels, size, size) pixels."""
    source = _as_pil(image) if isinstance(image, np.ndarray) or _is_tensor(image) else image
    return decode_pixels(source, channels=channels, size=size)  # type: ignore[arg-type]


def _to_pixels(image: Image.Image, channels: int, size: int) -> Pixels:
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
    pixels = np.array(image)  # a copy: PIL's own memory is read-only
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Scales pixels of more than 8 bits: the smallest usual range that holds them becomes 0-255.

    So a 12-bit scan in a 16-bit file keeps its contrast. Floats may also be in [0, 1].
    """
    values = np.array(image, dtype=np.float32)  # one copy; all steps below work in place
    np.nan_to_num(values, copy=False)
    np.maximum(values, 0.0, out=values)
    largest = float(values.max(initial=0.0))
    usual = [2.0**bits - 1 for bits in (8, 10, 12, 14, 16)]
    usual = [1.0, *usual] if image.mode == "F" else usual
    top = next((limit for limit in usual if largest <= limit), largest)
    values *= 255.0 / top
    return Image.fromarray(np.rint(values, out=values).astype(np.uint8))


def _is_tensor(image: Any) -> bool:
    """Returns whether this is a tensor, without importing torch, as its maker has done."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(image, torch.Tensor)


def _as_pil(image: Any) -> Image.Image:
    """Converts an array (H, W) or (H, W, C), or a tensor (C, H, W): 8-bit, or float in [0, 1]."""
    if isinstance(image, np.ndarray):
        pixels = image
    else:
        pixels = image.detach().cpu().numpy()
        pixels = pixels.transpose(1, 2, 0) if pixels.ndim == 3 else pixels
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (3, 4)):
        raise UserError(
            f"an image of shape {tuple(image.shape)}: expected (H, W) or (H, W, 3) for an array, "
            "(1, H, W) or (3, H, W) for a tensor."
        )
    if np.issubdtype(pixels.dtype, np.floating):
        if pixels.size and (pixels.min() < 0 or pixels.max() > 1):
            raise UserError("float images must lie in [0, 1]: do not normalise them yourself.")
        pixels = (pixels * 255).round().astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise UserError(f"an image of type {pixels.dtype}: expected 8-bit, or float in [0, 1].")
    return Image.fromarray(np.ascontiguousarray(pixels))
