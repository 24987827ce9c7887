"""Metrics against plain loops."""

import numpy as np
import pytest
import torch

from solodg.algorithms.base import Outputs
from solodg.runs.metrics import expected_calibration_error, metrics, predict
from solodg.runs.predictions import Prediction, Predictions, top_class, uncertainty
from solodg.types import Batch


@pytest.fixture
def predictions() -> Predictions:
    return Predictions(np.random.default_rng(0).dirichlet([0.5] * 4, 200))


@pytest.fixture
def labels() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 4, 200)


def test_accuracy_and_nll_equal_a_loop(predictions, labels) -> None:
    correct, nll = 0, 0.0
    for row, label in zip(predictions.probabilities, labels, strict=True):
        correct += int(max(range(4), key=lambda c: row[c]) == label)
        nll -= np.log(max(row[label], 1e-12))
    got = metrics(predictions, labels)
    assert got["accuracy"] == correct / 200
    assert got["nll"] == pytest.approx(nll / 200)
    assert got["images"] == 200


def test_calibration_error_equals_a_loop_over_bins(predictions, labels) -> None:
    confidence = predictions.probabilities.max(1)
    correct = predictions.probabilities.argmax(1) == labels
    expected = 0.0
    for b in range(15):
        inside = (confidence >= b / 15) & ((confidence < (b + 1) / 15) | (b == 14))
        if inside.any():
            gap = abs(correct[inside].mean() - confidence[inside].mean())
            expected += inside.mean() * gap
    assert expected_calibration_error(predictions, labels) == pytest.approx(expected)


def test_a_perfect_and_certain_model_is_calibrated() -> None:
    assert metrics(Predictions(np.eye(3)), np.arange(3))["ece"] == 0.0


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
    assert result.before is None
    assert done == [2, 1]


def test_outputs_bring_their_probabilities_before_adaptation() -> None:
    batches = [Batch(torch.eye(3)[[i]], torch.tensor([i]), torch.zeros(1)) for i in range(3)]
    result = predict(lambda x: Outputs(-x, x, x.flip(1)), batches)
    assert result.probabilities.tolist() == np.eye(3).tolist()
    assert result.before.tolist() == np.eye(3)[:, ::-1].tolist()


def test_a_row_of_predictions_becomes_a_prediction_with_names() -> None:
    many = Predictions(np.array([[0.2, 0.8], [1.0, 0.0]]), np.array([[0.6, 0.4], [0.5, 0.5]]))
    first, second = many.named(["cat", "dog"])
    assert first.label == "dog"
    assert first.probability == 0.8
    assert first.probabilities == {"cat": 0.2, "dog": 0.8}
    assert first.before == {"cat": 0.6, "dog": 0.4}
    assert [first.uncertainty, second.uncertainty] == many.uncertainty.tolist()
    assert many.of_image(1).named(["cat", "dog"]) == [second]
    assert many.chosen.tolist() == [1, 0]
    assert many.chosen_before.tolist() == [0, 0]
    assert top_class(first.before) == "cat (0.60)"
    assert Predictions(many.probabilities).named(["cat", "dog"])[0].before is None


def test_rounding_keeps_numbers_in_their_range() -> None:
    found = Prediction("a", 1.0000001, -1e-9, {"a": 1.0000001, "b": -1e-9}, {"a": 0.12345, "b": 0})
    short = Prediction("a", 1.0, 0.0, {"a": 1.0, "b": 0.0}, {"a": 0.123, "b": 0})
    assert found.rounded(3) == short
    assert short.to_json("x.png") == {
        "image": "x.png", "class": "a", "probability": 1.0, "uncertainty": 0.0, "novelty": None,
        "probabilities": {"a": 1.0, "b": 0.0}, "before": {"a": 0.123, "b": 0},
    }  # fmt: skip
