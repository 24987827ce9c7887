"""Pictures: pure functions of records and images. Colours are safe for the colour-blind."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from solodg.figures.style import COLOURS, MARKERS, log_axis
from solodg.types import Record

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def accuracy_by_domain(
    rows: dict[str, Sequence[Record]],
    examples: dict[str, NDArray[np.uint8]],
    path: Path,
    *,
    title: str,
    xlabel: str,
) -> None:
    """Accuracy of several models over all domains, the unseen shaded, an example image of each."""
    order = list(examples)
    unseen = {r.domain for records in rows.values() for r in records if r.role == "target"}
    figure, (images, curves) = plt.subplots(
        2, 1, figsize=(7, 4.6), height_ratios=(1, 3), sharex=True, layout="constrained"
    )
    for position, name in enumerate(order):
        _thumbnail(images, examples[name], position)
        for axis in (images, curves):
            if name in unseen:
                axis.axvspan(position - 0.5, position + 0.5, color="0.9", lw=0)
    for index, (name, records) in enumerate(rows.items()):
        accuracy = {r.domain: 100 * r.metrics["accuracy"] for r in records}
        known = [d for d in order if d in accuracy]
        curves.plot(
            [order.index(d) for d in known],
            [accuracy[d] for d in known],
            color=COLOURS[index],
            marker=MARKERS[index],
            label=name,
        )
    images.set(ylim=(-0.5, 0.5), yticks=[], title=title)
    images.spines[:].set_visible(False)
    images.tick_params(bottom=False)
    labels = [f"{name}\nunseen" if name in unseen else name for name in order]
    curves.set(xlim=(-0.5, len(order) - 0.5), xlabel=xlabel, ylabel="accuracy, %")
    curves.set_xticks(range(len(order)), labels)
    curves.grid(axis="y", color="0.85", lw=0.6)
    curves.spines[["top", "right"]].set_visible(False)
    curves.legend(frameon=False, loc="lower center")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _thumbnail(axis: Any, image: NDArray[np.uint8], position: int) -> None:
    pixels = image.transpose(1, 2, 0)
    pixels = pixels[:, :, 0] if pixels.shape[2] == 1 else pixels
    inset = axis.inset_axes((position - 0.4, -0.45, 0.8, 0.9), transform=axis.transData)
    inset.imshow(pixels, cmap="gray")
    inset.set_axis_off()


def plan_figure(
    title: str, xlabel: str, rows: Sequence[tuple[str, float, float]], path: Path
) -> None:
    """Methods with their means and intervals, the first on top."""
    figure = plan_drawing(title, xlabel, rows)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plan_drawing(title: str, xlabel: str, rows: Sequence[tuple[str, float, float]]) -> Figure:
    """The same before it is saved."""
    figure, axis = plt.subplots(figsize=(7, 1.2 + 0.4 * len(rows)), layout="constrained")
    for index, (_, mean, half) in enumerate(rows):
        axis.errorbar(mean, index, xerr=half, fmt="o", color=COLOURS[0], capsize=3)
    axis.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axis.invert_yaxis()
    axis.set(title=title, xlabel=xlabel)
    axis.grid(axis="x", color="0.85", lw=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def study_figure(panels: Mapping[str, Sequence[tuple[str, float, float]]], path: Path) -> None:
    """Side by side on one scale: accuracy by whose image speaks, the image's own on top."""
    figure, axes = plt.subplots(
        1, len(panels), figsize=(1 + 3.2 * len(panels), 2.6), sharex=True, layout="constrained",
        squeeze=False,
    )  # fmt: skip
    for axis, (title, points) in zip(axes[0], panels.items(), strict=True):
        axis.axvline(points[0][1], color="0.8", lw=1)
        for index, (_, mean, half) in enumerate(points):
            colour = COLOURS[0] if index == 0 else COLOURS[1]
            marker = MARKERS[0] if index == 0 else MARKERS[1]
            axis.errorbar(mean, index, xerr=half, fmt=marker, color=colour, capsize=3)
        axis.set_yticks(range(len(points)), [name for name, _, _ in points])
        axis.margins(y=0.15)
        axis.invert_yaxis()
        axis.set(title=title, xlabel="accuracy on unseen domains, %")
        axis.grid(axis="x", color="0.85", lw=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


class Curve(NamedTuple):
    """Accuracy, or time, over batch sizes."""

    name: str
    points: dict[int, tuple[float, float]]  # batch size -> mean and half of the interval


def batch_size_curves(
    panels: Sequence[Sequence[tuple[str, list[Curve]]]], path: Path, *, ylabel: str, log: bool
) -> None:
    """Lines of panels, each a title and its curves; a curve looks the same in all of them."""
    figure, axes = plt.subplots(
        len(panels), len(panels[0]), figsize=(1 + 3.6 * len(panels[0]), 0.8 + 2.4 * len(panels)),
        sharex=True, sharey="row", layout="constrained", squeeze=False,
    )  # fmt: skip
    everything = [curve for line in panels for _, curves in line for curve in curves]
    names = list(dict.fromkeys(curve.name for curve in everything))
    sizes = sorted({size for curve in everything for size in curve.points})
    shown: dict[str, Any] = {}
    for row, line in zip(axes, panels, strict=True):
        for axis, (title, curves) in zip(row, line, strict=True):
            for curve in curves:
                index, known = names.index(curve.name), sorted(curve.points)
                shown[curve.name] = axis.errorbar(
                    [sizes.index(size) for size in known],
                    [curve.points[size][0] for size in known],
                    yerr=[curve.points[size][1] for size in known],
                    color=COLOURS[index % len(COLOURS)],
                    marker=MARKERS[index % len(MARKERS)],
                    ls=("-", "--", ":")[index // len(COLOURS) % 3],
                    capsize=2,
                )
            axis.set_xticks(range(len(sizes)), [str(size) for size in sizes])
            axis.set_title(title)
            axis.grid(axis="y", color="0.85", lw=0.6)
            axis.spines[["top", "right"]].set_visible(False)
            if log:
                log_axis(axis)
        row[0].set_ylabel(ylabel)
    for axis in axes[-1]:
        axis.set_xlabel("test batch size")
    figure.legend([shown[name] for name in names], names, loc="outside lower center", ncols=3,
                  frameon=False)  # fmt: skip
    figure.savefig(path, dpi=120)
    plt.close(figure)
