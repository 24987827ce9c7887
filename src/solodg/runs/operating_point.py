"""A threshold for two classes, chosen on source validation images for a wanted sensitivity."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from solodg.algorithms import Algorithm
from solodg.data import LabelledImages
from solodg.errors import UserError, unknown_name
from solodg.progress import NoProgress, Progress, Say
from solodg.runs import checkpoint
from solodg.runs.config import Machine
from solodg.runs.devices import single_device
from solodg.runs.folder import read_config, read_machine, read_origin
from solodg.runs.metrics import predict
from solodg.runs.opened_data import (
    input_batches,
    open_source,
    read_source,
    with_shared_groups,
    without_bad_images,
)
from solodg.runs.predictions import Predictions
from solodg.runs.scored_data import check_classes
from solodg.runs.scores import Estimate, score
from solodg.runs.target_images import give_target_images, split_for_target_images


@dataclass(frozen=True)
class OperatingPoint:
    """The probability of one class from which on an image is assigned to it.

    `sensitivity` and `specificity` are those on the images that the threshold was chosen on.
    """

    classes: tuple[str, str]
    positive: str  # the class that the wanted sensitivity is about
    wanted: float  # the least sensitivity
    threshold: float
    sensitivity: float
    specificity: float
    images: int

    def scores(
        self,
        predictions: Predictions,
        labels: NDArray[np.int64],
        groups: NDArray[np.int64] | None = None,
    ) -> dict[str, Estimate]:
        """Returns sensitivity, specificity and accuracy at the threshold, with intervals.

        One that the images do not define, as they lack a class, is left out.
        """
        number = self.classes.index(self.positive)
        assigned = predictions.probabilities[:, number] >= self.threshold  # (N,)
        hard = np.eye(2)[np.where(assigned, number, 1 - number)]  # (N, 2)
        found = score(Predictions(hard), labels, self.classes, groups)
        result = {}
        for name, label in (
            ("sensitivity", self.positive),
            ("specificity", self.classes[1 - number]),
        ):
            if label in found.classes:
                result[name] = found.classes[label]["sensitivity"]
        return result | {"accuracy": found.overall["accuracy"]}

    def title(self) -> str:
        """Returns the threshold in words, with what it gives on the source validation images."""
        return (
            f"{self.positive!r} if its probability is at least {self.threshold:.4g}: on "
            f"{self.images} source validation images sensitivity "
            f"{100 * self.sensitivity:.1f}%, specificity {100 * self.specificity:.1f}%"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns how the threshold was chosen, as JSON values."""
        return {
            "class": self.positive,
            "wanted_sensitivity": self.wanted,
            "threshold": self.threshold,
            "validation": {
                "sensitivity": self.sensitivity,
                "specificity": self.specificity,
                "images": self.images,
            },
        }


def operating_point(
    folder: Path,
    machine: Machine | None = None,
    *,
    sensitivity: float,
    positive: str | None = None,
    dataset: str | None = None,
    accelerator: str = "auto",
    skip_bad_images: bool = False,
    progress: Progress | None = None,
    say: Say = lambda text: None,
) -> OperatingPoint:
    """Chooses the threshold of a run of two classes on its source validation images.

    `positive` is the class whose sensitivity is wanted; without it, the second one. `machine` and
    `dataset` say where the data lies, if it has moved since training.
    """
    progress = progress or NoProgress()
    algorithm, info = checkpoint.load(folder)
    check_wanted(info.classes, sensitivity, positive)
    config = read_config(folder)
    changes: dict[str, Any] = {"dataset": dataset} if dataset else {}
    config = config.model_copy(
        update=changes | ({"skip_bad_images": True} if skip_bad_images else {})
    )
    with progress.stage("Opening the data"):
        source, config = open_source(with_shared_groups(config), machine or read_machine(folder))
    check_classes(source.classes, info)
    if config.skip_bad_images:  # all of it, as training did
        source = read_source(source, config, progress, say)
    if source.fingerprint() != read_origin(folder).fingerprint:
        raise UserError(
            "--sensitivity chooses a threshold on the source validation images of the training, "
            "and the source images have changed since. Restore them."
        )
    val = without_bad_images(source.val, config, progress, say)
    device = single_device(accelerator)
    with progress.stage("Choosing the threshold"):
        predictions, labels = _predict(algorithm.to(device), val, device)
    return choose_threshold(predictions, labels, info.classes, sensitivity, positive)


def check_wanted(classes: Sequence[str], sensitivity: float, positive: str | None) -> None:
    """Raises `UserError` unless there are two classes and the wanted sensitivity is possible."""
    if len(classes) != 2:
        raise UserError(
            f"--sensitivity is for models of two classes; this one has {len(classes)}. Read the "
            "sensitivity of each class in the table, without --sensitivity."
        )
    if not 0 < sensitivity <= 1:
        raise UserError(
            f"--sensitivity {sensitivity:g}: it must be above 0 and at most 1, such as 0.95."
        )
    if positive is not None and positive not in classes:
        raise unknown_name("class", positive, classes, "--positive is a class of the model.")


def choose_threshold(
    predictions: Predictions,
    labels: NDArray[np.int64],
    classes: Sequence[str],
    sensitivity: float,
    positive: str | None = None,
) -> OperatingPoint:
    """Returns the largest threshold with at least this sensitivity on the given images."""
    from sklearn.metrics import roc_curve  # late: it takes a second to import

    check_wanted(classes, sensitivity, positive)
    number = list(classes).index(positive) if positive is not None else 1
    of_class = labels == number
    for part, name in ((of_class, classes[number]), (~of_class, classes[1 - number])):
        if not part.any():
            raise UserError(
                f"no source validation image is of class {name!r}: no threshold can be chosen. Add "
                "images of it to the source domains, and train again."
            )
    scores = predictions.probabilities[:, number]
    false_rates, true_rates, thresholds = roc_curve(of_class, scores, drop_intermediate=False)
    # A share such as 0.95 of 20 images may be rounded to either side.
    first = int(np.flatnonzero(true_rates >= sensitivity - 1e-12)[0])
    return OperatingPoint(
        (classes[0], classes[1]),
        classes[number],
        sensitivity,
        float(thresholds[first]),
        float(true_rates[first]),
        float(1 - false_rates[first]),
        len(labels),
    )


def _predict(
    algorithm: Algorithm, val: LabelledImages, device: torch.device
) -> tuple[Predictions, NDArray[np.int64]]:
    predicted, parts = [], split_for_target_images(algorithm, val)
    for part in parts:
        give_target_images(algorithm, part, device)
        predicted.append(predict(algorithm.probabilities, input_batches(part), device=device))
    return Predictions.concatenate(predicted), np.concatenate([part.labels for part in parts])
