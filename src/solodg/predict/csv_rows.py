"""Predictions as rows of a CSV file: one for each image, with and without the adaptation."""

from collections.abc import Sequence

from solodg.errors import UserError
from solodg.runs.predictions import Prediction

Row = list[str | float]


def csv_header(classes: Sequence[str]) -> Row:
    """Returns the names of the columns."""
    return [
        "path",
        "class",
        "probability",
        "uncertainty",
        "novelty",
        *(f"probability:{name}" for name in classes),
        "class_before",
        *(f"before:{name}" for name in classes),
        "error",
    ]


def csv_row(path: str, result: Prediction | UserError, classes: Sequence[str]) -> Row:
    """Returns the row of an image; one that cannot be predicted has an error and no numbers.

    The columns before adaptation are empty where nothing adapts, that of novelty where the model
    has no such score.
    """
    nothing: Row = [""] * (1 + len(classes))
    if isinstance(result, UserError):
        return [path, "", "", "", *nothing, *nothing, str(result)]
    before = nothing
    if result.before is not None:
        best = max(result.before, key=result.before.__getitem__)
        before = [best, *(result.before[name] for name in classes)]
    after = [result.probabilities[name] for name in classes]
    novelty = "" if result.novelty is None else result.novelty
    numbers = [result.probability, result.uncertainty, novelty]
    return [path, result.label, *numbers, *after, *before, ""]
