"""Predictions and what they are worth: accuracy, negative log-likelihood, calibration error."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from solodg.types import Batch

_BINS = 15


class Predictions(NamedTuple):
    """Class probabilities of labelled images."""

    probabilities: NDArray[np.float64]  # (N, C)
    labels: NDArray[np.int64]  # (N,)


@torch.inference_mode()
def predict(
    probabilities: Callable[[Tensor], Tensor],
    batches: Iterable[Batch],
    *,
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] = lambda count: None,
) -> Predictions:
    """Run a model's `probabilities` over batches of model inputs."""
    outputs, labels = [], []
    for batch in batches:
        outputs.append(probabilities(batch.x.to(device)).double().cpu().numpy())
        labels.append(batch.y.numpy())
        advance(len(batch.y))
    return Predictions(np.concatenate(outputs), np.concatenate(labels))


def metrics(predictions: Predictions) -> dict[str, float]:
    """Accuracy, NLL and ECE, with the number of images."""
    probabilities, labels = predictions
    chosen = probabilities.argmax(1)
    own = probabilities[np.arange(len(labels)), labels]
    return {
        "accuracy": float((chosen == labels).mean()),
        "nll": float(-np.log(np.clip(own, 1e-12, None)).mean()),
        "ece": expected_calibration_error(predictions),
        "images": len(labels),
    }


def expected_calibration_error(predictions: Predictions, bins: int = _BINS) -> float:
    """Gap between confidence and accuracy over bins of equal width (Guo et al., 2017)."""
    confidence = predictions.probabilities.max(1)
    correct = predictions.probabilities.argmax(1) == predictions.labels
    index = np.minimum((confidence * bins).astype(int), bins - 1)
    gap = np.bincount(index, correct - confidence, minlength=bins)
    return float(np.abs(gap).sum() / len(confidence))
