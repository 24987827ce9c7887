"""Plots of records, written to files. Colours are safe for the colour-blind."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from solodg.figures.style import COLOURS, MARKERS, log_axis, new_figure, save_figure
from solodg.types import Record


def accuracy_by_domain(
    rows: dict[str, Sequence[Record]],
    examples: dict[str, NDArray[np.uint8]],
    path: Path,
    *,
    title: str,
    xlabel: str,
) -> None:
    """Plots the accuracy of several models over domains, with an example image (C, H, W) of each.

    Unseen domains are shaded.
    """
    order = list(examples)
    unseen = {r.domain for records in rows.values() for r in records if r.role == "target"}
    figure = new_figure(7, 4.6, layout="constrained")
    images, curves = figure.subplots(2, 1, height_ratios=(1, 3), sharex=True)
    for position, name in enumerate(order):
        _thumbnail(images, examples[name], position)
        for axis in (images, curves):
            if name in unseen:
                axis.axvspan(position - 0.5, position + 0.5, color="0.9", lw=0)
    for index, (name, records) in enumerate(rows.items()):
        accuracy = {r.domain: 100 * r.metrics["accuracy"] for r in records}
        scored = [d for d in order if d in accuracy]
        curves.plot(
            [order.index(d) for d in scored],
            [accuracy[d] for d in scored],
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
    save_figure(figure, path)


def _thumbnail(axis: Any, image: NDArray[np.uint8], position: int) -> None:
    pixels = image.transpose(1, 2, 0)
    pixels = pixels[:, :, 0] if pixels.shape[2] == 1 else pixels
    inset = axis.inset_axes((position - 0.4, -0.45, 0.8, 0.9), transform=axis.transData)
    inset.imshow(pixels, cmap="gray")
    inset.set_axis_off()


def plan_figure(
    title: str, xlabel: str, rows: Sequence[tuple[str, float, float]], path: Path
) -> None:
    """Writes the figure of `plan_drawing` to a file."""
    save_figure(plan_drawing(title, xlabel, rows), path)


def plan_drawing(title: str, xlabel: str, rows: Sequence[tuple[str, float, float]]) -> Figure:
    """Draws methods by name, mean and half of the interval, the first on top."""
    figure = new_figure(7, 1.2 + 0.4 * len(rows), layout="constrained")
    axis = figure.subplots()
    for index, (_, mean, half) in enumerate(rows):
        axis.errorbar(mean, index, xerr=half, fmt="o", color=COLOURS[0], capsize=3)
    axis.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axis.invert_yaxis()
    axis.set(title=title, xlabel=xlabel)
    axis.grid(axis="x", color="0.85", lw=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def study_figure(panels: Mapping[str, Sequence[tuple[str, float, float]]], path: Path) -> None:
    """Plots the swap study: a panel for each thing that was swapped, all on one scale.

    A panel holds donors by name, mean accuracy and half of the interval, the image itself on top.
    """
    figure = new_figure(1 + 3.2 * len(panels), 2.6, layout="constrained")
    axes = figure.subplots(1, len(panels), sharex=True, squeeze=False)
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
    save_figure(figure, path)


class Curve(NamedTuple):
    """The accuracy, or time, of one method over batch sizes."""

    name: str
    points: dict[int, tuple[float, float]]  # batch size -> mean and half of the interval


def batch_size_curves(
    panels: Sequence[Sequence[tuple[str, list[Curve]]]], path: Path, *, ylabel: str, log: bool
) -> None:
    """Plots a grid of panels, each with a title and its curves over batch sizes.

    A method has the same colour and marker in all panels.
    """
    width, height = 1 + 3.6 * len(panels[0]), 0.8 + 2.4 * len(panels)
    figure = new_figure(width, height, layout="constrained")
    axes = figure.subplots(len(panels), len(panels[0]), sharex=True, sharey="row", squeeze=False)
    everything = [curve for line in panels for _, curves in line for curve in curves]
    names = list(dict.fromkeys(curve.name for curve in everything))
    sizes = sorted({size for curve in everything for size in curve.points})
    shown: dict[str, Any] = {}
    for row, line in zip(axes, panels, strict=True):
        for axis, (title, curves) in zip(row, line, strict=True):
            for curve in curves:
                shown[curve.name] = _draw_curve(axis, curve, sizes, names.index(curve.name))
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
    save_figure(figure, path)


def _draw_curve(axis: Any, curve: Curve, sizes: list[int], index: int) -> Any:
    """Draws a curve in the style of the method with this index; returns its entry of a legend."""
    known = sorted(curve.points)
    return axis.errorbar(
        [sizes.index(size) for size in known],
        [curve.points[size][0] for size in known],
        yerr=[curve.points[size][1] for size in known],
        color=COLOURS[index % len(COLOURS)],
        marker=MARKERS[index % len(MARKERS)],
        ls=("-", "--", ":")[index // len(COLOURS) % 3],
        capsize=2,
    )
