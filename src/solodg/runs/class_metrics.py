"""Metrics of a classifier that weigh classes alike, or describe one class: by scikit-learn.

A class is present if some image is of it. Metrics of a class that is not present are left out, and
macro averages are over the present classes.
"""

import numpy as np
from numpy.typing import NDArray

from solodg.runs.metrics import metrics
from solodg.runs.predictions import Floats, Predictions

OVERALL = ("accuracy", "balanced_accuracy", "macro_auc", "macro_f1", "nll", "ece", "brier")
PER_CLASS = ("sensitivity", "specificity", "auc", "f1")


def all_metrics(predictions: Predictions, labels: NDArray[np.int64]) -> dict[str, float]:
    """Returns what `metrics` does, and balanced accuracy, macro AUC, macro F1 and Brier score.

    The macro AUC is left out where all images are of one class.
    """
    from sklearn.metrics import f1_score, recall_score  # late: it takes a second to import

    present, chosen = np.unique(labels), predictions.chosen
    macro = {"labels": present, "average": "macro", "zero_division": 0.0}
    found = metrics(predictions, labels)
    found["balanced_accuracy"] = float(recall_score(labels, chosen, **macro))
    found["macro_f1"] = float(f1_score(labels, chosen, **macro))
    found["brier"] = float(brier_scores(predictions, labels).mean())
    areas = [auc(predictions, labels, number) for number in present]
    defined = [area for area in areas if area is not None]
    if defined:
        found["macro_auc"] = float(np.mean(defined))
    return found


def class_metrics(
    predictions: Predictions, labels: NDArray[np.int64]
) -> dict[int, dict[str, float]]:
    """Returns sensitivity, specificity, AUC and F1 of each present class against all others.

    Specificity and AUC are left out where all images are of one class.
    """
    from sklearn.metrics import f1_score, recall_score

    found: dict[int, dict[str, float]] = {}
    for number in np.unique(labels).tolist():
        of_class, chosen = labels == number, predictions.chosen == number
        values = {"sensitivity": float(recall_score(of_class, chosen))}
        area = auc(predictions, labels, number)
        if area is not None:
            values["specificity"] = float(recall_score(of_class, chosen, pos_label=False))
            values["auc"] = area
        found[number] = values | {"f1": float(f1_score(of_class, chosen))}
    return found


def auc(predictions: Predictions, labels: NDArray[np.int64], number: int) -> float | None:
    """Returns the area under the ROC curve of one class against all others.

    Returns None where all images are of this class, or none is.
    """
    from sklearn.metrics import roc_auc_score

    of_class = labels == number
    if of_class.all() or not of_class.any():
        return None
    return float(roc_auc_score(of_class, predictions.probabilities[:, number]))


def brier_scores(predictions: Predictions, labels: NDArray[np.int64]) -> Floats:
    """Returns the squared error of the probabilities of each image, summed over classes, (N,).

    For two classes it is halved, as in scikit-learn: then it is the squared error of one class.
    """
    wanted = np.eye(predictions.probabilities.shape[1])[labels]  # (N, C)
    errors: Floats = np.square(predictions.probabilities - wanted).sum(1)
    return errors / 2 if wanted.shape[1] == 2 else errors
