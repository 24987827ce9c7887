"""The parts of an explanation's picture, each on an axis of its own.

Colour says what a thing is, never which class it is: names do that, as colours for 65 classes
cannot be told apart.
"""

import textwrap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from solodg.explain.explanation import Explanation, Judgement
from solodg.explain.label_placement import Name, place_names
from solodg.figures.style import BLUE, GREY, INK, ORANGE, plain_axis

ALL_NAMED = 10  # up to so many classes, all are named; of more, the important ones
FEW = 7
_DOTS = 400


def shown_classes(e: Explanation) -> list[int]:
    """All classes in their order, or the important ones of many."""
    if len(e.classes) <= ALL_NAMED:
        return list(range(len(e.classes)))
    return e.important[:ALL_NAMED]


def draw_plane(axis: Any, e: Explanation) -> None:
    plane = e.plane
    dots = plane.of_embeddings(plane.embeddings)
    step = max(1, len(dots) // _DOTS)
    centres, here = plane.of_embeddings(plane.centres), plane.of_embeddings(e.embedding)
    layers = [centres, here[None]]
    shown = _prototypes(e)
    layers += shown.values()
    axis.scatter(*dots[::step].T, s=5, color=GREY, alpha=0.35, lw=0, rasterized=True,
                 label="source image")  # fmt: skip
    axis.scatter(*centres.T, s=26, facecolors="none", edgecolors=GREY, lw=1.2,
                 label="source class centre")  # fmt: skip
    strong = e.important[:FEW] if len(e.classes) > ALL_NAMED else e.important
    for label, rows in shown.items():
        _draw_prototypes(axis, rows, strong, label)
    if len(shown) == 2:
        before, after = shown.values()
        _draw_ways(axis, before, after, strong)
    axis.scatter(*here, s=150, marker="*", color=INK, zorder=5, label="this image")
    _set_limits(axis, dots, np.concatenate(layers))
    plain_axis(axis)
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(True)
    axis.spines[:].set_color(GREY)
    axis.set_title(
        f"the plane shows {100 * plane.shown_centres:.0f}% of the variance between source class "
        f"centres,\n{100 * plane.shown_images:.0f}% of that between source images; same plane for "
        "every image;\nprototypes are centred, and drawn at the size of the class centres",
        fontsize=7.5, color=INK,
    )  # fmt: skip
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.01), ncols=3, frameon=False,
                fontsize=7.5, labelcolor=INK, handletextpad=0.2, columnspacing=1.0)  # fmt: skip
    place_names(axis, _names(e, shown, centres, here, strong), np.concatenate(layers))


def _prototypes(e: Explanation) -> dict[str, NDArray[np.float64]]:
    """By legend."""
    judged: dict[str, Judgement] = {"prototype": e.after}
    if e.before is not None:
        judged = {"prototype before": e.before, "prototype after": e.after}
    return {
        label: e.plane.of_classifier(judgement.prototypes)
        for label, judgement in judged.items()
        if judgement.prototypes is not None
    }


def _draw_prototypes(axis: Any, rows: NDArray[np.float64], strong: list[int], label: str) -> None:
    before = label == "prototype before"
    colour, marker = (BLUE, "s") if before else (ORANGE, "^")
    face = "none" if before else colour
    rest = [i for i in range(len(rows)) if i not in strong]
    axis.scatter(*rows[strong].T, s=30, marker=marker, facecolors=face, edgecolors=colour, lw=1.3,
                 zorder=4, label=label)  # fmt: skip
    if rest:
        axis.scatter(*rows[rest].T, s=9, marker=marker, facecolors=face, edgecolors=colour, lw=0.7,
                     alpha=0.5)  # fmt: skip


def _draw_ways(
    axis: Any, before: NDArray[np.float64], after: NDArray[np.float64], strong: list[int]
) -> None:
    for i in strong:
        axis.plot(*np.stack([before[i], after[i]]).T, color=ORANGE, lw=1.1, zorder=3)


def _set_limits(axis: Any, dots: NDArray[np.float64], others: NDArray[np.float64]) -> None:
    """All that matters, and nearly all dots."""
    low = np.minimum(np.quantile(dots, 0.01, axis=0), others.min(0))
    high = np.maximum(np.quantile(dots, 0.99, axis=0), others.max(0))
    margin = 0.09 * (high - low)
    axis.set_xlim(low[0] - margin[0], high[0] + margin[0])
    axis.set_ylim(low[1] - margin[1], high[1] + margin[1])


def _names(
    e: Explanation,
    shown: dict[str, NDArray[np.float64]],
    centres: NDArray[np.float64],
    here: NDArray[np.float64],
    strong: list[int],
) -> list[Name]:
    names = [Name("this image", here, INK, "bold", 9.0)]
    last = list(shown.values())[-1:]
    best = e.after.best
    for rows in last:
        names += [
            Name(short(e.classes[i]), rows[i], ORANGE, "bold" if i == best else "normal")
            for i in strong
        ]
    return names + [Name(short(e.classes[i]), centres[i], GREY) for i in strong]


def draw_probabilities(axis: Any, e: Explanation, rows: list[int]) -> None:
    """Bars, and over them the middle 90% of what sampled classifiers say."""
    judged = [(e.after, ORANGE, "after" if e.before else "")]
    if e.before is not None:
        judged.insert(0, (e.before, BLUE, "before"))
    height = 0.8 / len(judged)
    others = len(e.classes) - len(rows)
    for number, (judgement, colour, label) in enumerate(judged):
        y = np.arange(len(rows)) + (number - (len(judged) - 1) / 2) * height
        values = judgement.probabilities[rows]
        hollow = label == "before"
        axis.barh(y, values, 0.86 * height, label=label, edgecolor=colour, lw=1,
                  facecolor="none" if hollow else colour)  # fmt: skip
        if len(judgement.samples) > 1:
            low, high = judgement.range()
            axis.hlines(y, low[rows], high[rows], color=INK, lw=1.0)
        if others:
            axis.barh(len(rows) + (y[0]), max(0.0, 1 - values.sum()), 0.86 * height,
                      edgecolor=colour, lw=1, facecolor="none" if hollow else colour)  # fmt: skip
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
    labels = [short(e.classes[i]) + (" (true)" if i == e.truth else "") for i in rows]
    others = len(e.classes) - len(rows)
    return labels + ([f"{others} others"] if others else [])


def draw_moves(axis: Any, e: Explanation, rows: list[int]) -> None:
    """How far each prototype moved, in all dimensions, over its length before."""
    assert e.moved is not None
    values = 100 * e.moved[rows]
    axis.barh(range(len(rows)), values, 0.5, color=GREY)
    axis.set(xlim=(0, max(1e-3, 1.08 * values.max())), xlabel="prototype moved,\n% of its length")
    axis.locator_params(axis="x", nbins=3)
    axis.tick_params(labelleft=False)
    plain_axis(axis, grid="x")
    axis.xaxis.label.set_fontsize(7.5)


def short(text: str, width: int = 14) -> str:
    return textwrap.shorten(text, width, placeholder="…") if " " in text else (
        text if len(text) <= width else text[: width - 1] + "…"
    )  # fmt: skip
