"""Metrics against plain loops."""

import numpy as np
import pytest
import torch

from solodg.predict.base import uncertainty
from solodg.runs.metrics import Predictions, expected_calibration_error, metrics, predict
from solodg.types import Batch


@pytest.fixture
def predictions() -> Predictions:
    generator = np.random.default_rng(0)
    return Predictions(generator.dirichlet([0.5] * 4, 200), generator.integers(0, 4, 200))


def test_accuracy_and_nll_equal_a_loop(predictions: Predictions) -> None:
    correct, nll = 0, 0.0
    for row, label in zip(*predictions, strict=True):
        correct += int(max(range(4), key=lambda c: row[c]) == label)
        nll -= np.log(max(row[label], 1e-12))
    got = metrics(predictions)
    assert got["accuracy"] == correct / 200
    assert got["nll"] == pytest.approx(nll / 200)
    assert got["images"] == 200


def test_calibration_error_equals_a_loop_over_bins(predictions: Predictions) -> None:
    confidence = predictions.probabilities.max(1)
    correct = predictions.probabilities.argmax(1) == predictions.labels
    expected = 0.0
    for b in range(15):
        inside = (confidence >= b / 15) & ((confidence < (b + 1) / 15) | (b == 14))
        if inside.any():
            gap = abs(correct[inside].mean() - confidence[inside].mean())
            expected += inside.mean() * gap
    assert expected_calibration_error(predictions) == pytest.approx(expected)


def test_a_perfect_and_certain_model_is_calibrated() -> None:
    assert metrics(Predictions(np.eye(3), np.arange(3)))["ece"] == 0.0


def test_uncertainty_runs_from_certain_to_a_guess() -> None:
    rows = np.array([[1.0, 0, 0], [1 / 3] * 3, [0.8, 0.1, 0.1]])
    certain, guess, between = uncertainty(rows)
    assert certain == pytest.approx(0, abs=1e-6)
    assert guess == pytest.approx(1)
    assert 0 < between < 1


def test_predictions_keep_the_order_of_the_batches() -> None:
    batches = [
        Batch(torch.eye(3)[i : i + 2], torch.arange(i, min(i + 2, 3)), torch.zeros(2))
        for i in (0, 2)
    ]
    done: list[int] = []
    result = predict(lambda x: x, batches, advance=done.append)
    assert result.probabilities.tolist() == np.eye(3).tolist()
    assert result.labels.tolist() == [0, 1, 2]
    assert done == [2, 1]
