"""The metrics of a model on labelled images, overall and by class, with 95% intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from solodg.runs.bootstrap import REPLICATES, resampled_metrics
from solodg.runs.class_metrics import OVERALL, PER_CLASS, all_metrics, class_metrics
from solodg.runs.predictions import Floats, Predictions
from solodg.runs.statistics import LEVEL


class Estimate(NamedTuple):
    """A metric with its 95% interval; None where there is no interval."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Scores:
    """The metrics of a model on some images, and what their intervals are based on."""

    images: int
    units: int  # images, or groups of them, that were drawn for the intervals
    grouped: bool  # whether these were groups
    overall: dict[str, Estimate]
    classes: dict[str, dict[str, Estimate]]  # of those with images, by name
    class_images: dict[str, int]  # by name, of all classes

    @property
    def missing(self) -> list[str]:
        """The classes without an image: they have no metrics and are in no macro average."""
        return [name for name, count in self.class_images.items() if not count]

    def remark(self) -> str:
        """Returns in words what the intervals are, and which classes are missing."""
        unit = "groups" if self.grouped else "images"
        text = f"Intervals: {100 * LEVEL:.0f}%, by {REPLICATES:,} bootstrap samples of {unit}."
        if self.missing:
            names = ", ".join(self.missing[:5]) + (", ..." if len(self.missing) > 5 else "")
            text += (
                f" No image is of {len(self.missing)} of {len(self.class_images)} classes "
                f"({names}): macro averages are over the others."
            )
        return text

    def to_json(self) -> dict[str, Any]:
        """Returns the scores as JSON values."""
        return {
            "level": LEVEL,
            "resampled": "groups" if self.grouped else "images",
            "units": self.units,
            "overall": {name: found._asdict() for name, found in self.overall.items()},
            "classes": {
                name: {"images": self.class_images[name]}
                | {metric: value._asdict() for metric, value in found.items()}
                for name, found in self.classes.items()
            },
            "missing_classes": self.missing,
        }


def score(
    predictions: Predictions,
    labels: NDArray[np.int64],
    classes: Sequence[str],
    groups: NDArray[np.int64] | None = None,
    *,
    seed: int = 0,
) -> Scores:
    """Computes all metrics, with intervals by a bootstrap over images, or over groups if given.

    There are no intervals where there is a single image, or a single group.
    """
    _, units = np.unique(
        np.arange(len(labels)) if groups is None else groups, return_inverse=True
    )  # (N,)
    number = int(units.max()) + 1
    replicates = (
        resampled_metrics(predictions, labels, units.astype(np.int64), seed=seed)
        if number > 1
        else {}
    )
    whole, by_class = all_metrics(predictions, labels), class_metrics(predictions, labels)
    counts = np.bincount(labels, minlength=len(classes))
    return Scores(
        images=len(labels),
        units=number,
        grouped=groups is not None,
        overall={
            name: estimate(whole[name], replicates.get(name)) for name in OVERALL if name in whole
        },
        classes={
            classes[c]: _of_class(found, replicates, c) for c, found in sorted(by_class.items())
        },
        class_images=dict(zip(classes, counts.tolist(), strict=True)),
    )


def _of_class(
    found: Mapping[str, float], replicates: Mapping[str, Floats], number: int
) -> dict[str, Estimate]:
    return {
        name: estimate(found[name], replicates[name][:, number] if replicates else None)
        for name in PER_CLASS
        if name in found
    }


def estimate(value: float, replicates: Floats | None) -> Estimate:
    """Returns a metric with the quantiles of its replicates that define it as interval."""
    defined = replicates[~np.isnan(replicates)] if replicates is not None else np.empty(0)
    if len(defined) == 0:
        return Estimate(value)
    low, high = np.quantile(defined, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high))
