"""Figures for paper, files and pages: PNG, SVG, and SVG that follows the reader's colour scheme.

Figures are made outside pyplot, and nothing here changes the caller's matplotlib: neither its
backend nor, but for the moment in which a file is written, its settings.
"""

import base64
import io
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito
MARKERS = ("o", "s", "^", "D", "v", "P")
INK = "#010203"  # text and lines: becomes the page's text colour in `themed_svg`
GREY = "#7c7c7c"  # legible on white and on black
BLUE, ORANGE = COLOURS[0], COLOURS[1]
_DARK = {BLUE: COLOURS[5], ORANGE: COLOURS[4], "#d9d9d9": "#3a3f46"}  # the same palette, and grids
# matplotlib reads these while it writes an SVG: real text, and the same bytes every time.
_SVG_SETTINGS: dict[Any, str] = {"svg.fonttype": "none", "svg.hashsalt": "solodg"}
_settings_lock = threading.Lock()  # settings belong to the process, not to a thread
_STYLE = """<style>
svg{{color:#1b1d21;{light}}}
@media (prefers-color-scheme:dark){{svg{{color:#e7e9ec;{dark}}}}}
text{{fill:currentColor}}
</style>"""


def new_figure(width: float, height: float, layout: Literal["constrained"] | None = None) -> Figure:
    """Makes an empty figure, its size in inches.

    It is not registered with pyplot, so threads can draw at the same time and no figure stays open.
    """
    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path, dpi: int = 120) -> None:
    """Writes a figure to a file, in the format of the file's suffix."""
    _write(figure, path, dpi=dpi)


def png(figure: Figure, dpi: int = 110) -> bytes:
    """Returns a figure as PNG on white."""
    out = io.BytesIO()
    _write(figure, out, format="png", dpi=dpi, facecolor="white")
    return out.getvalue()


def svg(figure: Figure) -> bytes:
    """Returns a figure as SVG on white, with real text."""
    return _svg(figure, facecolor="white")


def themed_svg(figure: Figure) -> bytes:
    """Returns a figure as SVG without background, light or dark as the reader's machine is."""
    text = _svg(figure, transparent=True).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"#010203|#000000", "currentColor", text)
    names = {colour: f"--c{number}" for number, colour in enumerate(_DARK)}
    for colour, name in names.items():
        text = text.replace(colour.lower(), f"var({name})")
    light = ";".join(f"{name}:{colour}" for colour, name in names.items())
    dark = ";".join(f"{names[colour]}:{bright}" for colour, bright in _DARK.items())
    head, rest = text.split(">", 1)
    text = f"{head}>{_STYLE.format(light=light, dark=dark)}{rest}"
    return re.sub(r"\n\s*", "\n", text).encode()


def data_uri(content: bytes, kind: str) -> str:
    """Returns the content of an image file as a data URI; `kind` is the subtype, as in `png`."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def log_axis(axis: Any) -> None:
    """Makes the y axis logarithmic, with plain numbers as labels."""
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(LogFormatter())


def plain_axis(axis: Any, *, grid: str | None = None) -> None:
    """Draws left and bottom lines only, text in INK, and a grid along `grid` (x, y or both)."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(INK)
    axis.tick_params(colors=INK, labelsize=8)
    for label in (axis.xaxis.label, axis.yaxis.label, axis.title):
        label.set_color(INK)
        label.set_fontsize(9)
    axis.patch.set_alpha(0.0)
    if grid:
        axis.grid(axis=grid, color=GREY, alpha=0.3, lw=0.6)
        axis.set_axisbelow(True)


def _svg(figure: Figure, **options: Any) -> bytes:
    out = io.BytesIO()
    _write(figure, out, format="svg", metadata={"Date": None}, **options)
    return out.getvalue()


def _write(figure: Figure, target: Path | io.BytesIO, **options: Any) -> None:
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # names of files, classes and domains may hold a $
    with _svg_settings():
        figure.savefig(target, **options)


@contextmanager
def _svg_settings() -> Iterator[None]:
    """Applies `_SVG_SETTINGS` for one thread at a time, and restores these settings alone."""
    with _settings_lock:
        before: dict[Any, Any] = {name: mpl.rcParams[name] for name in _SVG_SETTINGS}
        mpl.rcParams.update(_SVG_SETTINGS)
        try:
            yield
        finally:
            mpl.rcParams.update(before)
