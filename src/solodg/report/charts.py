"""Charts of a report: training curves, confusion, reliability, accuracy over uncertainty."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from solodg.explain.panels import short
from solodg.figures.style import BLUE, COLOURS, GREY, INK, ORANGE, log_axis, new_figure, plain_axis
from solodg.report.predictions import DomainPredictions
from solodg.runs.coverage import coverage_curve, doubts
from solodg.runs.predictions import Predictions

LabelledPredictions = tuple[Predictions, NDArray[np.int64]]  # and the (N,) true classes

MAX_WRITTEN = 12  # with more classes, a confusion matrix shows no numbers
MAX_NAMED_ROWS = 24  # with more classes, it shows no names
_STYLES = ("-", "--", "-.", ":", (0, (1, 3)), (0, (6, 1, 1, 1)))


def training_curves(lines: Sequence[dict[str, Any]], selected: int | None) -> dict[str, Figure]:
    """Draws losses, KL and validation accuracy from the lines of `metrics.jsonl`, by title."""
    losses = [line for line in lines if "loss" in line]
    names = [name for name in (losses[0] if losses else {}) if name not in ("step", "kl")]
    steps = [line["step"] for line in losses]
    charts = {}
    if losses:
        curves = {n: (steps, [line.get(n, np.nan) for line in losses]) for n in names}
        charts["Losses on source training images"] = _curves(curves, "loss", log=False)
    if losses and "kl" in losses[0]:
        kl = {"KL": (steps, [line["kl"] for line in losses])}
        charts["KL of the written classifier from the meta-prior"] = _curves(kl, "KL", log=True)
    scored = [line for line in lines if "val_accuracy" in line]
    if scored:
        accuracy = [100 * line["val_accuracy"] for line in scored]
        curves = {"validation": ([line["step"] for line in scored], accuracy)}
        title = "Accuracy on source validation images"
        charts[title] = _curves(curves, "accuracy, %", log=False, selected=selected)
    return charts


def _curves(
    curves: dict[str, tuple[list[int], list[float]]],
    ylabel: str,
    *,
    log: bool,
    selected: int | None = None,
) -> Figure:
    figure = new_figure(4.6, 3.0)
    left = 0.21 if log else 0.15  # room for ticks like 6 x 10^1
    axis = figure.add_axes((left, 0.17, 0.97 - left, 0.7 if len(curves) > 1 else 0.78))
    for number, (name, (steps, values)) in enumerate(curves.items()):
        few = "o" if len(steps) < 30 else None
        axis.plot(steps, values, color=(ORANGE, BLUE, *COLOURS[2:])[number % 6], label=name, lw=1.4,
                  ls=_STYLES[number % 6], marker=few, ms=3.5)  # fmt: skip
    if selected is not None:
        axis.axvline(selected, color=GREY, lw=1, ls=":")
        axis.annotate(" selected", (selected, 0.03), xycoords=("data", "axes fraction"), color=INK,
                      fontsize=8, ha="right", rotation=90, va="bottom")  # fmt: skip
    if log:
        log_axis(axis)
    axis.set(xlabel="step", ylabel=ylabel)
    plain_axis(axis, grid="y")
    if len(curves) > 1:
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False, fontsize=8,
                    labelcolor=INK, columnspacing=1.0)  # fmt: skip
    return figure


def confusion(part: DomainPredictions, classes: Sequence[str]) -> Figure:
    """Draws the confusion matrix of a domain: rows are true classes, as shares of 1."""
    counts = confusion_counts(part, len(classes))
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    few = len(classes) <= MAX_NAMED_ROWS
    figure = new_figure(4.6, 4.6)
    names = [short(c, 12) for c in classes]
    margin = 0.1 + 0.013 * max(map(len, names)) if few else 0.1  # room for names
    axis = figure.add_axes((margin, margin, 0.98 - margin, 0.98 - margin))
    # From transparent to blue, for light and dark pages.
    ramp = LinearSegmentedColormap.from_list("ramp", [(0, 0.447, 0.698, 0), (0, 0.447, 0.698, 1)])
    axis.imshow(shares, cmap=ramp, vmin=0, vmax=1)
    plain_axis(axis)
    size = 8 if len(classes) <= MAX_WRITTEN else 6
    ticks = range(len(classes)) if few else []
    axis.set_xticks(ticks, names if few else [], rotation=90, fontsize=size)
    axis.set_yticks(ticks, names if few else [], fontsize=size)
    axis.set(xlabel="predicted", ylabel="true" if few else "true, in the order of the classes")
    if len(classes) <= MAX_WRITTEN:
        for (row, column), share in np.ndenumerate(shares):
            if share >= 0.005:
                axis.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7,
                          color="white" if share > 0.85 else INK)  # fmt: skip
    return figure


def confusion_counts(part: DomainPredictions, classes: int) -> NDArray[np.int64]:
    """Counts the images by true and predicted class, (C, C)."""
    pairs = part.labels * classes + part.predictions.chosen
    counts: NDArray[np.int64] = np.bincount(pairs, minlength=classes**2).reshape(classes, classes)
    return counts


def reliability(groups: dict[str, LabelledPredictions]) -> Figure:
    """Draws accuracy over confidence, in ten bins of equal width, for each group of images."""
    figure = new_figure(4.6, 3.6)
    axis = figure.add_axes((0.14, 0.15, 0.83, 0.68))
    axis.plot([0, 1], [0, 1], color=GREY, lw=1, ls=":")
    for number, (name, (predictions, labels)) in enumerate(groups.items()):
        confidence, right = predictions.probabilities.max(1), predictions.chosen == labels
        index = np.minimum((confidence * 10).astype(int), 9)
        bins = [index == i for i in range(10) if (index == i).any()]
        x, y = [confidence[b].mean() for b in bins], [right[b].mean() for b in bins]
        _group(axis, x, y, number, name)
    axis.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="confidence", ylabel="accuracy")
    return _with_legend(figure, axis)


def accuracy_over_uncertainty(groups: dict[str, LabelledPredictions]) -> Figure:
    """Draws accuracy over uncertainty, in ten bins of equally many images, for each group."""
    figure = new_figure(4.6, 3.6)
    axis = figure.add_axes((0.14, 0.15, 0.83, 0.68))
    for number, (name, (predictions, labels)) in enumerate(groups.items()):
        uncertain, right = predictions.uncertainty, predictions.chosen == labels
        bins = np.array_split(np.argsort(uncertain, kind="stable"), min(10, len(labels)))
        x, y = [uncertain[b].mean() for b in bins], [right[b].mean() for b in bins]
        _group(axis, x, y, number, name)
    axis.set(ylim=(0, 1.02), xlabel="uncertainty (a tenth of the images each)", ylabel="accuracy")
    axis.set_xlim(left=0)
    return _with_legend(figure, axis)


def coverage_curves(predictions: Predictions, labels: NDArray[np.int64]) -> Figure:
    """Draws accuracy over the share of images answered, for each way to leave images out."""
    figure = new_figure(4.6, 3.6)
    axis = figure.add_axes((0.14, 0.15, 0.83, 0.68))
    _coverage(axis, predictions, labels)
    return _with_legend(figure, axis)


def coverage_panels(groups: dict[str, LabelledPredictions]) -> Figure:
    """Draws the curves of `coverage_curves` for several groups of images, side by side."""
    figure = new_figure(4.2 * len(groups), 3.4, layout="constrained")
    axes = figure.subplots(1, len(groups), squeeze=False)[0]
    for axis, (title, (predictions, labels)) in zip(axes, groups.items(), strict=True):
        _coverage(axis, predictions, labels)
        plain_axis(axis, grid="both")
        axis.set_title(title, fontsize=10, color=INK)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
                  frameon=False, fontsize=9, labelcolor=INK)  # fmt: skip
    return figure


def _coverage(axis: Any, predictions: Predictions, labels: NDArray[np.int64]) -> None:
    right = predictions.chosen == labels
    share = np.arange(1, len(labels) + 1) / len(labels)
    shown = share >= 0.05  # fewer images say little
    for number, (name, doubt) in enumerate(doubts(predictions).items()):
        curve = coverage_curve(right, doubt)
        axis.plot(share[shown], curve[shown], color=(ORANGE, BLUE, GREY)[number], lw=1.4,
                  ls=_STYLES[number], label=name)  # fmt: skip
    axis.set(xlim=(0, 1.02), ylim=(None, 1.02), xlabel="share of images answered",
             ylabel="accuracy")  # fmt: skip


def _group(axis: Any, x: list[Any], y: list[Any], number: int, name: str) -> None:
    colour, marker = ((ORANGE, "^"), (BLUE, "s"), (GREY, "o"))[number % 3]
    hollow = number == 2
    axis.plot(x, y, color=colour, marker=marker, ms=5, lw=1.3, ls=_STYLES[number % 3], label=name,
              markerfacecolor="none" if hollow else colour)  # fmt: skip


def _with_legend(figure: Figure, axis: Any) -> Figure:
    plain_axis(axis, grid="both")
    axis.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, frameon=False, fontsize=8,
                labelcolor=INK, columnspacing=1.0)  # fmt: skip
    return figure
