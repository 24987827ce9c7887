"""The panels of an explanation's figure, each drawn on its own axes.

Colour shows the kind of a marker, never its class: nobody can tell 65 colours apart. Classes are
named instead.
"""

import textwrap
from typing import Any

import numpy as np

from solodg.explain.explanation import Explanation
from solodg.explain.label_placement import Name, place_names
from solodg.figures.style import BLUE, GREY, INK, ORANGE, plain_axis
from solodg.runs.predictions import Floats

MAX_NAMED_CLASSES = 10  # with more classes, only the important ones are named
MAX_EMPHASISED = 7  # prototypes drawn large, with more than MAX_NAMED_CLASSES classes
_MAX_DOTS = 400


def shown_classes(e: Explanation) -> list[int]:
    """Returns the classes to name: all in their order, or the most important of many."""
    if len(e.classes) <= MAX_NAMED_CLASSES:
        return list(range(len(e.classes)))
    return e.important[:MAX_NAMED_CLASSES]


def draw_projection(axis: Any, e: Explanation) -> None:
    """Draws source images, class centres, prototypes and the image in the run's projection."""
    projection = e.projection
    dots = projection.embeddings_2d(projection.embeddings)  # (N, 2)
    step = max(1, len(dots) // _MAX_DOTS)
    centres = projection.embeddings_2d(projection.centres)  # (C, 2)
    image = projection.embeddings_2d(e.embedding)  # (2,)
    shown = _prototypes(e)
    markers = np.concatenate([centres, image[None], *shown.values()])
    axis.scatter(*dots[::step].T, s=5, color=GREY, alpha=0.35, lw=0, rasterized=True,
                 label="source image")  # fmt: skip
    axis.scatter(*centres.T, s=26, facecolors="none", edgecolors=GREY, lw=1.2,
                 label="source class centre")  # fmt: skip
    emphasised = e.important[:MAX_EMPHASISED] if len(e.classes) > MAX_NAMED_CLASSES else e.important
    for label, rows in shown.items():
        _draw_prototypes(axis, rows, emphasised, label)
    if len(shown) == 2:
        before, after = shown.values()
        _draw_moves_2d(axis, before, after, emphasised)
    axis.scatter(*image, s=150, marker="*", color=INK, zorder=5, label="this image")
    _set_limits(axis, dots, markers)
    _frame_projection(axis, e)
    place_names(axis, _names(e, shown, centres, image, emphasised), markers)


def _frame_projection(axis: Any, e: Explanation) -> None:
    """Adds border, title and legend."""
    plain_axis(axis)
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(True)
    axis.spines[:].set_color(GREY)
    axis.set_title(
        f"projection: {100 * e.projection.shown_centres:.0f}% of the variance between source class "
        f"centres,\n{100 * e.projection.shown_images:.0f}% of that between source images; the same "
        "for every image;\nprototypes are centred, and scaled to the size of the class centres",
        fontsize=7.5, color=INK,
    )  # fmt: skip
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.01), ncols=3, frameon=False,
                fontsize=7.5, labelcolor=INK, handletextpad=0.2, columnspacing=1.0)  # fmt: skip


def _prototypes(e: Explanation) -> dict[str, Floats]:
    """Returns the projected prototypes, (C, 2), by their text in the legend."""
    classifiers = {"prototype": e.after}
    if e.before is not None:
        classifiers = {"prototype before": e.before, "prototype after": e.after}
    return {
        label: e.projection.classifier_2d(classifier.prototypes)
        for label, classifier in classifiers.items()
        if classifier.prototypes is not None
    }


def _draw_prototypes(axis: Any, rows: Floats, emphasised: list[int], label: str) -> None:
    before = label == "prototype before"
    colour, marker = (BLUE, "s") if before else (ORANGE, "^")
    face = "none" if before else colour
    rest = [i for i in range(len(rows)) if i not in emphasised]
    axis.scatter(*rows[emphasised].T, s=30, marker=marker, facecolors=face, edgecolors=colour,
                 lw=1.3, zorder=4, label=label)  # fmt: skip
    if rest:
        axis.scatter(*rows[rest].T, s=9, marker=marker, facecolors=face, edgecolors=colour, lw=0.7,
                     alpha=0.5)  # fmt: skip


def _draw_moves_2d(axis: Any, before: Floats, after: Floats, emphasised: list[int]) -> None:
    """Draws a line from each emphasised prototype before to the same one after."""
    for i in emphasised:
        axis.plot(*np.stack([before[i], after[i]]).T, color=ORANGE, lw=1.1, zorder=3)


def _set_limits(axis: Any, dots: Floats, markers: Floats) -> None:
    """Sets limits that include all markers, and all but the outermost 1% of the dots."""
    low = np.minimum(np.quantile(dots, 0.01, axis=0), markers.min(0))
    high = np.maximum(np.quantile(dots, 0.99, axis=0), markers.max(0))
    margin = 0.09 * (high - low)
    axis.set_xlim(low[0] - margin[0], high[0] + margin[0])
    axis.set_ylim(low[1] - margin[1], high[1] + margin[1])


def _names(
    e: Explanation,
    shown: dict[str, Floats],
    centres: Floats,
    image: Floats,
    emphasised: list[int],
) -> list[Name]:
    """Returns the names to place, the most important first: image, prototypes, class centres."""
    names = [Name("this image", image, INK, "bold", 9.0)]
    last = list(shown.values())[-1:]
    best = int(e.predictions.chosen[0])
    for rows in last:
        names += [
            Name(short(e.classes[i]), rows[i], ORANGE, "bold" if i == best else "normal")
            for i in emphasised
        ]
    return names + [Name(short(e.classes[i]), centres[i], GREY) for i in emphasised]


def draw_probabilities(axis: Any, e: Explanation, rows: list[int]) -> None:
    """Draws a bar for each class, with the middle 90% of what sampled classifiers give."""
    series = [(e.predictions.probabilities[0], e.after, ORANGE, "after" if e.before else "")]
    if e.before is not None and e.predictions.before is not None:
        series.insert(0, (e.predictions.before[0], e.before, BLUE, "before"))
    height = 0.8 / len(series)
    for number, (probabilities, classifier, colour, label) in enumerate(series):
        y = np.arange(len(rows)) + (number - (len(series) - 1) / 2) * height
        values = probabilities[rows]
        style = {"edgecolor": colour, "lw": 1, "facecolor": "none" if label == "before" else colour}
        axis.barh(y, values, 0.86 * height, label=label, **style)
        if len(classifier.samples) > 1:
            low, high = classifier.interval()
            axis.hlines(y, low[rows], high[rows], color=INK, lw=1.0)
        if len(e.classes) > len(rows):
            axis.barh(len(rows) + y[0], max(0.0, 1 - values.sum()), 0.86 * height, **style)
    labels = class_labels(e, rows)
    axis.set_yticks(range(len(labels)), labels)
    axis.set(xlim=(0, 1.0), ylim=(len(labels) - 0.4, -0.6), xticks=[0, 0.5, 1])
    sampled = len(e.after.samples) > 1
    axis.set_xlabel("probability; line: middle 90%\nof sampled classifiers" if sampled
                    else "probability")  # fmt: skip
    plain_axis(axis, grid="x")
    axis.xaxis.label.set_fontsize(7.5)
    if e.before is not None:
        axis.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=2, frameon=False,
                    fontsize=8, labelcolor=INK, handlelength=1.2, columnspacing=1.0)  # fmt: skip


def class_labels(e: Explanation, rows: list[int]) -> list[str]:
    """Returns the names of the given classes, and a last one for the rest."""
    labels = [short(e.classes[i]) + (" (true)" if i == e.truth else "") for i in rows]
    others = len(e.classes) - len(rows)
    return labels + ([f"{others} others"] if others else [])


def draw_moves(axis: Any, e: Explanation, rows: list[int]) -> None:
    """Draws how far each prototype moved, in all dimensions, over its length before."""
    assert e.moved is not None
    values = 100 * e.moved[rows]
    axis.barh(range(len(rows)), values, 0.5, color=GREY)
    axis.set(xlim=(0, max(1e-3, 1.08 * values.max())), xlabel="prototype moved,\n% of its length")
    axis.locator_params(axis="x", nbins=3)
    axis.tick_params(labelleft=False)
    plain_axis(axis, grid="x")
    axis.xaxis.label.set_fontsize(7.5)


def short(text: str, width: int = 14) -> str:
    """Shortens a text to `width` characters, between words where it has some."""
    return textwrap.shorten(text, width, placeholder="…") if " " in text else (
        text if len(text) <= width else text[: width - 1] + "…"
    )  # fmt: skip
