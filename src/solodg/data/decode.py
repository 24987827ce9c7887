"""Image files as tensors; `solodg.pixels` decodes them."""

from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from solodg.pixels import EXTENSIONS, BadImageError, Window, decode_pixels

__all__ = ["EXTENSIONS", "BadImageError", "Window", "decode", "guessed_note"]


def decode(
    source: str | Path | bytes | Image.Image,
    *,
    channels: int,
    size: int,
    window: Window | None = None,
    on_guess: Callable[[], None] = lambda: None,
) -> Tensor:
    """Decodes a file, its bytes or a PIL image to (channels, size, size) uint8.

    `on_guess` is called if there is no `window` and the range of the values had to be guessed.
    """
    return torch.from_numpy(
        decode_pixels(source, channels=channels, size=size, window=window, on_guess=on_guess)
    )


def guessed_note(count: int) -> str:
    """Returns a remark for the user on images whose range of values was guessed."""
    return (
        f"{count} image(s) have more than 8 bits, and the range of each is guessed from its "
        "largest value. Give the same range to all with --window LOW HIGH."
    )
