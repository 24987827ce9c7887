"""HTML pages in one file: no script, no network, all pictures embedded."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from solodg.figures.style import data_uri, themed_svg
from solodg.storage import write_atomically

_SMALL = 64  # pixels; images up to this size are stored without loss


@dataclass(frozen=True)
class Picture:
    """An embedded picture, for an `img` element."""

    uri: str
    alt: str
    width: int
    height: int
    title: str = ""
    pixelated: bool = False


def chart(figure: Figure, alt: str, title: str = "") -> Picture:
    """Embeds a figure that follows the reader's colour scheme."""
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    return Picture(data_uri(themed_svg(figure), "svg+xml"), alt, width, height, title)


def photo(pixels: NDArray[np.uint8], alt: str) -> Picture:
    """Embeds an image of (channels, H, W) pixels."""
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
    """Fills a template of this package and writes the page to `path`."""
    environment = Environment(
        loader=PackageLoader("solodg.figures"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template(template).render(**context)
    write_atomically(path, text.encode())
