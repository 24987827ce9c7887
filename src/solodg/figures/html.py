"""HTML pages that need nothing but themselves: no script, no network, every picture inside."""

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from solodg.figures.style import data_uri, themed_svg
from solodg.storage import write_atomically

_SMALL = 64  # pixels; what is smaller is kept exactly


@dataclass(frozen=True)
class Picture:
    """For an `img`."""

    uri: str
    alt: str
    width: int
    height: int
    title: str = ""
    pixelated: bool = False


@dataclass(frozen=True)
class Card:
    """An image of a gallery, with its explanation."""

    domain: str
    index: int  # in the scored images of its domain
    image: Picture
    truth: str
    before: str  # "" where nothing is adapted
    after: str
    right: bool
    uncertainty: str
    figures: list[Picture]
    nearest: list[tuple[Picture, str]]
    framed: Picture | None  # the image in its own frame, where it writes one


@dataclass(frozen=True)
class Gallery:
    kind: str
    title: str
    note: str
    total: int  # images that it chose from
    cards: list[Card] = field(default_factory=list)


def chart(figure: Figure, alt: str, title: str = "") -> Picture:
    """A figure that follows the reader's colour scheme."""
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    return Picture(data_uri(themed_svg(figure), "svg+xml"), alt, width, height, title)


def photo(pixels: NDArray[np.uint8], alt: str) -> Picture:
    """(channels, H, W) pixels."""
    array = pixels.transpose(1, 2, 0)
    image = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else np.ascontiguousarray(array))
    out = io.BytesIO()
    small = max(image.size) <= _SMALL
    if small:
        image.save(out, "PNG", optimize=True)
    else:
        image.save(out, "WEBP", quality=80)
    uri = data_uri(out.getvalue(), "png" if small else "webp")
    return Picture(uri, alt, *image.size, pixelated=small)


def write_page(path: Path, template: str, **context: Any) -> None:
    """`template` of the package, filled and written whole."""
    environment = Environment(
        loader=PackageLoader("solodg.figures"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template(template).render(**context)
    write_atomically(path, text.encode())
