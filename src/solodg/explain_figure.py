"""An `Explanation` as a picture: pure functions to matplotlib figures.

Colour says what a thing is, never which class it is: names do that, as colours for 65 classes
cannot be told apart.
"""

import textwrap
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from solodg.explain import Explanation, Judgement
from solodg.labels import Name, place_names
from solodg.themed import BLUE, GREY, INK, ORANGE, new_figure, plain_axis

ALL_NAMED = 10  # up to so many classes, all are named; of more, the important ones
FEW = 7
_DOTS = 400
_SIZE = (12.3, 5.5)  # inches
ONE_CLASSIFIER = "one classifier for all images: nothing moves, before is after"


def explain_figure(e: Explanation, name: str = "") -> Figure:
    """All of it: the image, the plane, probabilities, movements, the nearest source images."""
    figure = new_figure(*_SIZE)
    figure.text(0.02, 0.975, headline(e), color=INK, fontsize=12, weight="bold", va="top")
    figure.text(0.02, 0.925, subline(e), color=INK, fontsize=9.5, va="top")
    _draw_image(_add(figure, 0.25, 2.3, 2.4, 2.4), e, name)
    _draw_nearest(figure, e)
    draw_plane(_add(figure, 3.0, 0.72, 4.6, 3.8), e)
    rows = shown_classes(e)
    bars = _add(figure, 9.1, 0.72, 1.9 if e.moved is not None else 2.9, 3.8)
    draw_probabilities(bars, e, rows)
    if e.moved is not None:
        draw_moves(_add(figure, 11.2, 0.72, 0.9, 3.8, sharey=bars), e, rows)
    return figure


def _add(
    figure: Figure, left: float, bottom: float, width: float, height: float, **more: Any
) -> Any:
    """Axes by inches."""
    box = (left / _SIZE[0], bottom / _SIZE[1], width / _SIZE[0], height / _SIZE[1])
    return figure.add_axes(box, **more)


def plane_figure(e: Explanation) -> Figure:
    """The plane alone, for a page."""
    figure = new_figure(4.6, 4.6)
    draw_plane(figure.add_axes((0.02, 0.14, 0.96, 0.77)), e)
    return figure


def probabilities_figure(e: Explanation) -> Figure:
    """Probabilities and movements, for a page."""
    rows = shown_classes(e)
    height = 1.15 + 0.3 * (len(rows) + (len(rows) < len(e.classes)))
    figure = new_figure(4.6, height)
    longest = max(len(label) for label in _labels(e, rows))
    left, bottom, top = (0.16 + 0.068 * longest) / 4.6, 0.62 / height, 1 - 0.42 / height
    width = 0.97 - left if e.moved is None else 0.6 * (0.97 - left)
    bars = figure.add_axes((left, bottom, width, top - bottom))
    draw_probabilities(bars, e, rows)
    if e.moved is not None:
        place = (left + width + 0.05, bottom, 0.92 - left - width, top - bottom)
        draw_moves(figure.add_axes(place, sharey=bars), e, rows)
    return figure


def headline(e: Explanation) -> str:
    after = f"{e.classes[e.after.best]} ({e.after.probabilities[e.after.best]:.2f})"
    if e.before is None:
        return f"says {after}"
    before = f"{e.classes[e.before.best]} ({e.before.probabilities[e.before.best]:.2f})"
    return f"before the adaptation to this image: {before}; after: {after}"


def subline(e: Explanation) -> str:
    words = [] if e.truth is None else [f"true class: {e.classes[e.truth]}"]
    if e.before is None:
        words += [f"uncertainty {e.after.uncertainty:.2f}", ONE_CLASSIFIER]
    else:
        words.append(
            f"uncertainty {e.before.uncertainty:.2f} before, {e.after.uncertainty:.2f} after"
        )
    return "; ".join(words)


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
        "every image",
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
            Name(_short(e.classes[i]), rows[i], ORANGE, "bold" if i == best else "normal")
            for i in strong
        ]
    return names + [Name(_short(e.classes[i]), centres[i], GREY) for i in strong]


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
    labels = _labels(e, rows)
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


def _labels(e: Explanation, rows: list[int]) -> list[str]:
    labels = [_short(e.classes[i]) + (" (true)" if i == e.truth else "") for i in rows]
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


def _draw_image(axis: Any, e: Explanation, name: str) -> None:
    _show(axis, e.pixels)
    axis.set_anchor("N")
    if name:
        axis.set_title(_short(name, 26), fontsize=9, color=INK)


def _draw_nearest(figure: Figure, e: Explanation) -> None:
    """Three a row, below the image."""
    figure.text(0.25 / _SIZE[0], 2.2 / _SIZE[1], "nearest source training images", fontsize=8.5,
                color=INK, va="top")  # fmt: skip
    for number, neighbour in enumerate(e.nearest):
        row, column = divmod(number, 3)
        axis = _add(figure, 0.34 + 0.83 * column, 1.38 - 0.98 * row, 0.62, 0.62)
        _show(axis, e.plane.thumbnails[neighbour.index])
        caption = f"{_short(neighbour.label, 12)}\n{_short(neighbour.domain, 12)}"
        axis.text(0.5, -0.04, caption, transform=axis.transAxes, ha="center", va="top",
                  fontsize=6.5, color=INK, linespacing=1.1)  # fmt: skip


def _show(axis: Any, pixels: NDArray[np.uint8]) -> None:
    picture = pixels.transpose(1, 2, 0)
    picture = picture[:, :, 0] if picture.shape[2] == 1 else picture
    axis.imshow(picture, cmap="gray", vmin=0, vmax=255)
    axis.set_axis_off()


def _short(text: str, width: int = 14) -> str:
    return textwrap.shorten(text, width, placeholder="…") if " " in text else (
        text if len(text) <= width else text[: width - 1] + "…"
    )  # fmt: skip
