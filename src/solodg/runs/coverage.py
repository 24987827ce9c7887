"""Accuracy over the share of images answered, where the least trusted images get no answer."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from solodg.runs.predictions import Floats, Predictions

SHARES = (1.0, 0.9, 0.8, 0.7, 0.5)  # of the images that are answered
Labelled = tuple[str, Predictions, NDArray[np.int64]]  # a domain, and the (N,) true classes


def doubts(predictions: Predictions) -> dict[str, Floats]:
    """Returns by name the scores (N,) by which images may be left unanswered, the largest first.

    The last one adds the two: one minus the probability of the chosen class, and novelty.
    """
    unsure: Floats = 1 - predictions.probabilities.max(1)
    if predictions.novelty is None:
        return {"confidence": unsure}
    return {
        "confidence": unsure,
        "novelty": predictions.novelty,
        "both": unsure + predictions.novelty,
    }


def coverage_curve(right: NDArray[np.bool_], doubt: Floats) -> Floats:
    """Returns the accuracy on the 1, 2, ..., N least doubtful images, (N,).

    Images of equal doubt count with their mean accuracy, whatever their order.
    """
    _, place, counts = np.unique(doubt, return_inverse=True, return_counts=True)
    mean = np.bincount(place, right) / counts
    curve: Floats = np.cumsum(np.repeat(mean, counts)) / np.arange(1, len(right) + 1)
    return curve


def coverage(predictions: Predictions, labels: NDArray[np.int64]) -> dict[str, dict[str, float]]:
    """Returns for each doubt the accuracy at every share of `SHARES`, and the mean of the curve."""
    right, found = predictions.chosen == labels, {}
    for name, doubt in doubts(predictions).items():
        curve = coverage_curve(right, doubt)
        at = {f"{share:g}": float(curve[max(1, round(share * len(right))) - 1]) for share in SHARES}
        found[name] = at | {"mean": float(curve.mean())}
    return found


def coverage_table(scored: Sequence[Labelled]) -> Table:
    """Builds the table of accuracies over the share of images answered: a row for each doubt."""
    table = Table(title="Accuracy % if the most doubtful images get no answer")
    table.add_column("domain")
    table.add_column("left out by")
    for share in SHARES:
        table.add_column(f"{100 * share:.0f}% answered", justify="right")
    table.add_column("mean of the curve", justify="right")
    for domain, predictions, labels in scored:
        for name, values in coverage(predictions, labels).items():
            table.add_row(domain, name, *(f"{100 * value:.1f}" for value in values.values()))
    return table
