"""Turns images (files, bytes, PIL images, arrays, tensors) into 8-bit pixels of one size.

It needs only NumPy and Pillow, so that an exported model works without torch; for DICOM, pydicom.
"""

import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from solodg.errors import UserError
from solodg.pixels.dicom import ENDINGS, is_dicom, read_dicom

if TYPE_CHECKING:
    from torch import Tensor

Window = tuple[float, float]  # pixel values that become black and white
ImageLike = Union[str, Path, bytes, Image.Image, NDArray[Any], "Tensor"]
_KINDS = "a path, bytes, a PIL image, an array or a tensor"
Pixels = NDArray[np.uint8]

_STRIP_PIXELS = 2**20  # converted at once, so that a large image is in memory once and not often
_PILLOW = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm"})
EXTENSIONS = _PILLOW | ENDINGS


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
    window: Window | None = None,
    limits: DecodeLimits | None = None,
    name: str | None = None,
    reserve: Callable[[int], None] = lambda pixels: None,
    on_guess: Callable[[], None] = lambda: None,
) -> Pixels:
    """Decodes a file, its bytes or a PIL image to (channels, size, size) without cropping.

    It applies the EXIF orientation, puts transparent images on white, and reduces grey images of
    more than 8 bits to 8 bits. `window` maps the values from its low to its high end to 0-255, and
    clips those beyond; an 8-bit image is then an error, as its values are no longer the original
    ones. Without a window, the range of each image is guessed, and `on_guess` is called. A DICOM
    file is rescaled, and has a window of its own for where none is given.

    `limits` are for images from untrusted senders. `name` is what errors call the image.
    `reserve` is called with the number of pixels that a file takes in memory, before it takes it.
    """
    if name is None:
        name = str(source) if isinstance(source, str | Path) else "given in memory"
    try:
        if isinstance(source, Image.Image):
            return _to_pixels(ImageOps.exif_transpose(source), channels, size, window, on_guess)
        file = io.BytesIO(source) if isinstance(source, bytes) else _regular_file(source, name)
        if not isinstance(source, bytes) and is_dicom(source) and limits is None:
            image, own_window, inverted = read_dicom(source, reserve)
            pixels = _to_pixels(image, channels, size, window or own_window, on_guess)
            return 255 - pixels if inverted else pixels
        with Image.open(file, formats=limits.formats if limits else None) as image:
            count = image.width * image.height
            if limits and count > limits.max_pixels:
                seen = f"{image.width} x {image.height} pixels; at most {limits.max_pixels:,}"
                raise TooManyPixelsError(name, f"{seen} pixels are allowed")
            image.draft("RGB", (2 * size, 2 * size))  # large JPEGs are decoded at reduced size
            if "progressive" not in image.info:  # of these, all coefficients are held in memory
                count = image.width * image.height
            reserve(count)
            ImageOps.exif_transpose(image, in_place=True)
            return _to_pixels(image, channels, size, window, on_guess)
    except UserError:
        raise
    except FileNotFoundError:
        raise BadImageError(name, "no such file") from None
    except UnidentifiedImageError:
        raise BadImageError(name, "not an image, or of an unknown format") from None
    except Image.DecompressionBombError as error:
        raise TooManyPixelsError(name, str(error)) from error
    except Exception as error:  # a damaged file: Pillow's readers raise errors of any type
        reason = " ".join(str(error).split())
        raise BadImageError(name, reason or type(error).__name__) from error


def _regular_file(path: str | Path, name: str) -> str | Path:
    """Returns the path; raises `BadImageError` for a pipe or a device, which may have no end."""
    found = Path(path)
    if found.exists() and not (found.is_file() or found.is_dir()):
        raise BadImageError(name, "not a regular file")
    return path


def pixels_of(
    image: ImageLike, *, channels: int, size: int, window: Window | None = None
) -> Pixels:
    """Turns a path, bytes, PIL image, array or tensor into (channels, size, size) pixels."""
    if isinstance(image, np.ndarray) or _is_tensor(image):
        return decode_pixels(_as_pil(image, window), channels=channels, size=size)
    if not isinstance(image, str | Path | bytes | Image.Image):
        raise BadImageError("given in memory", f"{type(image).__name__}; expected {_KINDS}")
    return decode_pixels(image, channels=channels, size=size, window=window)


def _to_pixels(
    image: Image.Image,
    channels: int,
    size: int,
    window: Window | None,
    on_guess: Callable[[], None],
) -> Pixels:
    wide = image.mode.startswith("I") or image.mode == "F"
    if window and not wide:
        raise ValueError(_not_for_window(f"a colour or 8-bit image (mode {image.mode})", window))
    if wide:
        image = _to_eight_bits(image, window)
        if window is None:
            on_guess()
    mode = "L" if channels == 1 else "RGB"
    transparent = image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info
    if transparent or image.mode not in ("L", mode):
        image = _converted(image, mode, transparent)
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    if image.mode != mode:  # grey becomes RGB when it is small, which changes no value
        image = image.convert(mode)
    pixels = np.array(image)  # a copy: PIL's own memory is read-only
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _converted(image: Image.Image, mode: str, transparent: bool) -> Image.Image:
    """Returns the image in another mode; a transparent one is put on white."""
    result = Image.new(mode, image.size)
    for top, strip in _strips(image):
        if transparent:
            strip = strip.convert("RGBA")
            strip = Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip)
        result.paste(strip.convert(mode), (0, top))
    return result


def _to_eight_bits(image: Image.Image, window: Window | None) -> Image.Image:
    """Maps pixels of more than 8 bits by the window, or by the range guessed from the image."""
    floats = image.mode == "F"
    smallest, largest = _extremes(image) if floats or window is None else (0.0, 0.0)
    low, high = window or (0.0, _guessed_top(smallest, largest, floats))
    result = Image.new("L", image.size)
    for top, strip in _strips(image):
        values = np.array(strip, dtype=np.float32)
        result.paste(Image.fromarray(_mapped(values, low, high)), (0, top))
    return result


def _mapped(values: NDArray[np.float32], low: float, high: float) -> NDArray[np.uint8]:
    """Maps values in place so that `low` becomes 0 and `high` 255; values beyond are clipped."""
    if low:
        values -= low
    values *= 255.0 / (high - low)
    np.clip(values, 0.0, 255.0, out=values)
    return np.rint(values, out=values).astype(np.uint8)


def _extremes(image: Image.Image) -> tuple[float, float]:
    """Returns the smallest and the largest value; raises `ValueError` if some are not finite."""
    nan, infinite, smallest, largest = 0, 0, np.inf, -np.inf
    for _, strip in _strips(image):
        values = np.array(strip, dtype=np.float32)
        nan += int(np.isnan(values).sum())
        infinite += int(np.isinf(values).sum())
        smallest, largest = min(smallest, values.min()), max(largest, values.max())
    _check_finite(nan, infinite, image.width * image.height)
    return float(smallest), float(largest)


def _check_finite(nan: int, infinite: int, count: int) -> None:
    kinds = {"NaN": nan, "infinite": infinite}
    found = " and ".join(f"{number} {kind}" for kind, number in kinds.items() if number)
    if found:
        raise ValueError(f"{found} of {count} pixel values, which mean nothing")


def _guessed_top(smallest: float, largest: float, floats: bool) -> float:
    """Returns the end of the smallest usual range, from 0, that holds the values of an image.

    So a 12-bit scan in a 16-bit file keeps its contrast. Floats may also be in [0, 1].
    """
    if smallest < 0:
        raise ValueError(
            f"negative pixel values, the lowest is {smallest:g}: only a model trained with "
            "--window LOW HIGH, the values that become black and white, can read them"
        )
    usual = [2.0**bits - 1 for bits in (8, 10, 12, 14, 16)]
    usual = [1.0, *usual] if floats else usual
    return next((limit for limit in usual if largest <= limit), largest)


def _not_for_window(found: str, window: Window) -> str:
    return (
        f"{found}: the window {window[0]:g} to {window[1]:g} is for the original values of grey "
        "images of more than 8 bits"
    )


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Yields the image in horizontal strips of bounded size, each with its first row."""
    rows = max(1, _STRIP_PIXELS // max(1, image.width))
    for top in range(0, image.height, rows):
        bottom = min(top + rows, image.height)
        yield top, image.crop((0, top, image.width, bottom))


def _is_tensor(image: Any) -> bool:
    """Returns whether this is a tensor, without importing torch, as its maker has done."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(image, torch.Tensor)


def _as_pil(image: Any, window: Window | None) -> Image.Image:
    """Converts an array (H, W) or (H, W, C), or a tensor (C, H, W), to an 8-bit image.

    Without a window it must be 8-bit, or float in [0, 1]; with one, of more than 8 bits.
    """
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
    if pixels.size == 0:
        raise UserError(f"an image of shape {tuple(image.shape)} has no pixels.")
    if np.issubdtype(pixels.dtype, np.floating):
        try:
            nan, infinite = (int(test(pixels).sum()) for test in (np.isnan, np.isinf))
            _check_finite(nan, infinite, pixels.size)
        except ValueError as error:
            raise BadImageError("given in memory", str(error)) from None
    if window:
        return Image.fromarray(_windowed(pixels, window))
    if np.issubdtype(pixels.dtype, np.floating):
        if pixels.size and (pixels.min() < 0 or pixels.max() > 1):
            raise UserError(
                "float images must lie in [0, 1]: do not normalise them yourself. Only a model "
                "that was trained with --window LOW HIGH takes other values."
            )
        pixels = (pixels * 255).round().astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise UserError(
            f"an image of type {pixels.dtype}: expected 8-bit, or float in [0, 1]. Only a model "
            "that was trained with --window LOW HIGH takes other values."
        )
    return Image.fromarray(np.ascontiguousarray(pixels))


def _windowed(pixels: NDArray[Any], window: Window) -> NDArray[np.uint8]:
    """Maps an array (H, W) or (H, W, 3) of more than 8 bits by the window."""
    if pixels.dtype.kind not in "iuf" or pixels.dtype.itemsize < 2 or pixels.shape[2:] == (4,):
        found = f"an image of type {pixels.dtype} and shape {pixels.shape}"
        raise BadImageError("given in memory", _not_for_window(found, window))
    return _mapped(np.array(pixels, dtype=np.float32), *window)
