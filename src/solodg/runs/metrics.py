"""Predictions of a model over batches, and their accuracy, likelihood and calibration error."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from solodg.algorithms.base import Outputs
from solodg.runs.novelty import Novelty, with_novelty
from solodg.runs.predictions import Floats, NotFiniteError, Predictions
from solodg.types import Batch

_BINS = 15


@torch.inference_mode()
def predict(
    model: Callable[[Tensor], Tensor | Outputs],
    batches: Iterable[Batch],
    *,
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] = lambda count: None,
    novelty: Novelty | None = None,
) -> Predictions:
    """Runs a model over batches of its inputs and returns the predictions in their order.

    `model` returns probabilities (B, C), as `Algorithm.probabilities` does, or `Outputs`, as
    `Algorithm.outputs` does; only the latter hold the probabilities before adaptation. With
    `novelty`, predictions have that too; the model must then read every image for itself.
    """
    parts = []
    for batch in batches:
        result, novel = with_novelty(model, novelty, batch.x.to(device))
        if isinstance(result, Outputs):
            found = (result.probabilities, result.before, novel, result.readings)
            parts.append(Predictions.from_tensors(*found))
        else:
            parts.append(Predictions.from_tensors(result, None, novel))
        advance(len(batch.y))
    return Predictions.concatenate(parts)


def chosen_classes(logits: Tensor) -> Tensor:
    """Returns the class with the largest of (B, C) logits, (B,).

    Raises `NotFiniteError` for NaN. A class without source images has the logit -inf.
    """
    if logits.isnan().any():
        raise NotFiniteError("the model's logits are NaN: it cannot be trusted. Train it again.")
    return logits.argmax(1)


def metrics(predictions: Predictions, labels: NDArray[np.int64]) -> dict[str, float]:
    """Returns accuracy, NLL and ECE on images of the given (N,) classes, and their number.

    `readings` is how often an image was read, on average, where images differ in that.
    """
    of_label = predictions.probabilities[np.arange(len(labels)), labels]  # (N,)
    readings = predictions.readings
    return {
        "accuracy": float((predictions.chosen == labels).mean()),
        "nll": float(-np.log(np.clip(of_label, 1e-12, None)).mean()),
        "ece": expected_calibration_error(predictions, labels),
        "images": len(labels),
        **({} if readings is None else {"readings": float(readings.mean())}),
    }


def expected_calibration_error(
    predictions: Predictions, labels: NDArray[np.int64], bins: int = _BINS
) -> float:
    """Returns the gap between confidence and accuracy, over bins of equal width (Guo et al., 2017).

    The gap of a bin weighs by its share of the images.
    """
    index, difference = calibration_bins(predictions, labels, bins)
    gap = np.bincount(index, difference, minlength=bins)
    return float(np.abs(gap).sum() / len(labels))


def calibration_bins(
    predictions: Predictions, labels: NDArray[np.int64], bins: int = _BINS
) -> tuple[NDArray[np.int64], Floats]:
    """Returns the bin of each image by its confidence, (N,), and correctness minus confidence."""
    confidence = predictions.probabilities.max(1)  # (N,)
    correct = predictions.chosen == labels
    index: NDArray[np.int64] = np.minimum((confidence * bins).astype(int), bins - 1)
    return index, correct - confidence
