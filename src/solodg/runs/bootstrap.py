"""Metrics of resampled images: the bootstrap, for all replicates at once.

A replicate draws as many images as there are, with replacement; or as many groups, such as
patients, with all their images. It is described by how often it holds each image. Every metric but
the AUC is then a function of weighted sums over images, so that replicates are columns of a matrix
product. The AUC needs sorted images, and the sum of the weights below each.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from solodg.runs.class_metrics import brier_scores
from solodg.runs.metrics import calibration_bins
from solodg.runs.predictions import Floats, Predictions
from solodg.seeding import numpy_generator

REPLICATES = 1000
_NUMBERS = 2**18  # of a block of counts: small enough for the processor's cache
Units = NDArray[np.int64]  # (N,) the number of the image or group that each image is drawn with


def resampled_metrics(
    predictions: Predictions,
    labels: NDArray[np.int64],
    units: Units,
    *,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> dict[str, Floats]:
    """Returns the metrics of each replicate: (R,) each, (R, C) those of the classes.

    NaN marks what a replicate does not define, e.g. the sensitivity to a class that it lacks.
    """
    sums, bins = _summed_rows(predictions, labels)
    found: list[dict[str, Floats]] = []
    for counts in _counts(units, replicates, seed):
        values = _from_sums(sums @ counts, counts.sum(0), bins, predictions.probabilities.shape[1])
        values["auc"] = _areas(predictions.probabilities, labels, counts)
        values["macro_auc"] = _mean(values["auc"])
        found.append(values)
    return {name: np.concatenate([part[name] for part in found]) for name in found[0]}


def _counts(units: Units, replicates: int, seed: int) -> Iterator[Floats]:
    """Yields how often replicates hold each image, (N, replicates of a block)."""
    generator = numpy_generator(seed, "bootstrap")
    number = int(units.max()) + 1
    block = max(1, _NUMBERS // len(units))
    for start in range(0, replicates, block):
        size = min(block, replicates - start)
        drawn = generator.integers(0, number, (size, number))
        drawn += number * np.arange(size)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=size * number).reshape(size, number)
        yield counts.T.astype(np.float64)[units]  # (N, size)


def _summed_rows(predictions: Predictions, labels: NDArray[np.int64]) -> tuple[Floats, int]:
    """Returns the values of each image that a replicate adds up, (rows, N); how many are bins."""
    probabilities, chosen = predictions.probabilities, predictions.chosen
    of_label = probabilities[np.arange(len(labels)), labels]
    numbers = np.arange(probabilities.shape[1])[:, None]  # (C, 1)
    index, gap = calibration_bins(predictions, labels)
    bins = (index == np.arange(index.max() + 1)[:, None]) * gap  # (bins, N)
    rows = [
        -np.log(np.clip(of_label, 1e-12, None))[None],
        brier_scores(predictions, labels)[None],
        bins,
        labels == numbers,  # (C, N)
        chosen == numbers,
        (labels == numbers) & (chosen == numbers),
    ]
    return np.concatenate([row.astype(np.float64) for row in rows]), len(bins)


def _from_sums(sums: Floats, total: Floats, bins: int, num_classes: int) -> dict[str, Floats]:
    """Returns the metrics of replicates, from the sums of the rows over them, (rows, R)."""
    nll, brier, gaps, counts = np.split(sums, [1, 2, 2 + bins])
    of_class, chosen, both = counts.reshape(3, num_classes, -1).transpose(0, 2, 1)  # (R, C) each
    others = total[:, None] - of_class
    with np.errstate(invalid="ignore", divide="ignore"):
        sensitivity = both / of_class
        specificity = (others - (chosen - both)) / others
        f1 = np.where(of_class > 0, 2 * both / (of_class + chosen), np.nan)
    return {
        "accuracy": both.sum(1) / total,
        "balanced_accuracy": _mean(sensitivity),
        "macro_f1": _mean(f1),
        "nll": nll[0] / total,
        "ece": np.abs(gaps).sum(0) / total,
        "brier": brier[0] / total,
        "sensitivity": sensitivity,
        "specificity": specificity,
        "f1": f1,
    }


def _areas(probabilities: Floats, labels: NDArray[np.int64], counts: Floats) -> Floats:
    """Returns the AUC of each class against all others, (R, C), by the Mann-Whitney statistic."""
    areas = np.full((counts.shape[1], probabilities.shape[1]), np.nan)
    for number in np.unique(labels).tolist():
        order = np.argsort(probabilities[:, number], kind="stable")
        scores, of_class = probabilities[order, number], labels[order] == number
        ordered = counts[order]  # (N, R)
        positive, negative = ordered * of_class[:, None], ordered * ~of_class[:, None]
        starts = np.flatnonzero(np.diff(scores, prepend=-np.inf))  # of runs of equal scores
        if len(starts) < len(scores):
            positive, negative = (np.add.reduceat(x, starts) for x in (positive, negative))
        below = np.cumsum(negative, 0)
        below -= negative / 2  # an equal score counts half
        pairs = positive.sum(0) * negative.sum(0)
        with np.errstate(invalid="ignore"):
            areas[:, number] = np.einsum("nr,nr->r", positive, below) / pairs
    return areas


def _mean(values: Floats) -> Floats:
    """Returns the mean over the classes that are defined, (R,); NaN where none is."""
    defined = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        mean: Floats = np.where(defined, values, 0.0).sum(1) / defined.sum(1)
    return mean
