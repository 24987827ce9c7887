"""Figures for paper, files and pages: PNG, SVG, and SVG that follows the reader's colour scheme."""

import base64
import io
import re
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito
MARKERS = ("o", "s", "^", "D", "v", "P")
INK = "#010203"  # text and lines: takes the colour of the page's text
GREY = "#7c7c7c"  # is read on white and on black
BLUE, ORANGE = COLOURS[0], COLOURS[1]
_DARK = {BLUE: COLOURS[5], ORANGE: COLOURS[4], "#d9d9d9": "#3a3f46"}  # the same palette, and grids
# For the whole process, since a context of settings is not one thread's own: SVG with real text,
# small and the same every time; and names of files, classes and domains may hold a $.
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "solodg", "text.parse_math": False})
_STYLE = """<style>
svg{{color:#1b1d21;{light}}}
@media (prefers-color-scheme:dark){{svg{{color:#e7e9ec;{dark}}}}}
text{{fill:currentColor}}
</style>"""


def new_figure(width: float, height: float) -> Figure:
    """In inches; outside pyplot, so that threads may draw at once and nothing is left open."""
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure, dpi: int = 110) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=dpi, facecolor="white")
    return out.getvalue()


def svg(figure: Figure) -> bytes:
    """On white, with real text."""
    return _svg(figure, facecolor="white")


def themed_svg(figure: Figure) -> bytes:
    """Without background; light or dark as the reader's machine is."""
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
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def log_axis(axis: Any) -> None:
    """A logarithmic y axis with plain numbers."""
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(LogFormatter())


def plain_axis(axis: Any, *, grid: str | None = None) -> None:
    """Few lines, all of them in INK."""
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
    figure.savefig(out, format="svg", metadata={"Date": None}, **options)
    return out.getvalue()
