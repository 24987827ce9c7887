"""Draws an `Explanation` as a matplotlib figure."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from solodg.explain.explanation import Explanation
from solodg.explain.panels import (
    class_labels,
    draw_moves,
    draw_probabilities,
    draw_projection,
    short,
    shown_classes,
)
from solodg.figures.style import INK, new_figure
from solodg.runs.predictions import top_class, uncertainty

_SIZE = (12.3, 5.5)  # inches
ONE_CLASSIFIER = "one classifier for all images: nothing is adapted"


def explain_figure(e: Explanation, name: str = "") -> Figure:
    """Draws the image, the projection, probabilities, moves and the nearest source images."""
    figure = new_figure(*_SIZE)
    figure.text(0.02, 0.975, headline(e), color=INK, fontsize=12, weight="bold", va="top")
    figure.text(0.02, 0.925, subline(e), color=INK, fontsize=9.5, va="top")
    if e.aligned is None:
        _draw_image(_add(figure, 0.25, 2.3, 2.4, 2.4), e.pixels, short(name, 26))
    else:
        _draw_image(_add(figure, 0.2, 2.9, 1.25, 1.25), e.pixels, short(name, 14))
        _draw_image(_add(figure, 1.6, 2.9, 1.25, 1.25), e.aligned, "pose corrected")
    _draw_nearest(figure, e)
    draw_projection(_add(figure, 3.0, 0.72, 4.6, 3.8), e)
    rows = shown_classes(e)
    bars = _add(figure, 9.1, 0.72, 1.9 if e.moved is not None else 2.9, 3.8)
    draw_probabilities(bars, e, rows)
    if e.moved is not None:
        draw_moves(_add(figure, 11.2, 0.72, 0.9, 3.8, sharey=bars), e, rows)
    return figure


def _add(
    figure: Figure, left: float, bottom: float, width: float, height: float, **more: Any
) -> Any:
    """Adds axes whose place and size are given in inches."""
    box = (left / _SIZE[0], bottom / _SIZE[1], width / _SIZE[0], height / _SIZE[1])
    return figure.add_axes(box, **more)


def projection_figure(e: Explanation) -> Figure:
    """Draws the projection alone, for a page."""
    figure = new_figure(4.6, 4.6)
    draw_projection(figure.add_axes((0.02, 0.14, 0.96, 0.74)), e)
    return figure


def probabilities_figure(e: Explanation) -> Figure:
    """Draws the probabilities and how far each prototype moved, for a page."""
    rows = shown_classes(e)
    height = 1.15 + 0.3 * (len(rows) + (len(rows) < len(e.classes)))
    figure = new_figure(4.6, height)
    longest = max(len(label) for label in class_labels(e, rows))
    left, bottom, top = (0.16 + 0.068 * longest) / 4.6, 0.62 / height, 1 - 0.42 / height
    width = 0.97 - left if e.moved is None else 0.6 * (0.97 - left)
    bars = figure.add_axes((left, bottom, width, top - bottom))
    draw_probabilities(bars, e, rows)
    if e.moved is not None:
        place = (left + width + 0.05, bottom, 0.92 - left - width, top - bottom)
        draw_moves(figure.add_axes(place, sharey=bars), e, rows)
    return figure


def headline(e: Explanation) -> str:
    """Returns the predicted class with its probability, before and after the adaptation."""
    after = top_class(e.prediction.probabilities)
    if e.prediction.before is None:
        return f"predicted {after}"
    before = top_class(e.prediction.before)
    return f"before the adaptation to this image: {before}; after: {after}"


def subline(e: Explanation) -> str:
    """Returns the true class, if known, and the uncertainty before and after the adaptation."""
    words = [] if e.truth is None else [f"true class: {e.classes[e.truth]}"]
    after = e.prediction.uncertainty
    if e.predictions.before is None:
        words += [f"uncertainty {after:.2f}", ONE_CLASSIFIER]
    else:
        before = uncertainty(e.predictions.before[0])
        words.append(f"uncertainty {before:.2f} before, {after:.2f} after")
        if e.aligned is not None:
            words.append("pose corrected both times")
    return "; ".join(words)


def _draw_image(axis: Any, pixels: NDArray[np.uint8], title: str) -> None:
    _show(axis, pixels)
    axis.set_anchor("N")
    if title:
        axis.set_title(title, fontsize=9, color=INK)


def _draw_nearest(figure: Figure, e: Explanation) -> None:
    """Draws the nearest source images below the image, three in a row."""
    title = f"nearest of {len(e.projection.labels)} source training images"
    figure.text(0.25 / _SIZE[0], 2.2 / _SIZE[1], title, fontsize=8, color=INK, va="top")
    for number, neighbour in enumerate(e.nearest):
        row, column = divmod(number, 3)
        axis = _add(figure, 0.34 + 0.83 * column, 1.38 - 0.98 * row, 0.62, 0.62)
        _show(axis, e.projection.thumbnails[neighbour.index])
        caption = f"{short(neighbour.label, 12)}\n{short(neighbour.domain, 12)}"
        axis.text(0.5, -0.04, caption, transform=axis.transAxes, ha="center", va="top",
                  fontsize=6.5, color=INK, linespacing=1.1)  # fmt: skip


def _show(axis: Any, pixels: NDArray[np.uint8]) -> None:
    picture = pixels.transpose(1, 2, 0)
    picture = picture[:, :, 0] if picture.shape[2] == 1 else picture
    axis.imshow(picture, cmap="gray", vmin=0, vmax=255)
    axis.set_axis_off()
