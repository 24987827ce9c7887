"""Metrics with intervals, against scikit-learn called directly and a bootstrap by a plain loop."""

import time

import numpy as np
import pytest
from sklearn import metrics as sk

from solodg.runs import bootstrap
from solodg.runs.bootstrap import resampled_metrics
from solodg.runs.class_metrics import OVERALL, PER_CLASS, all_metrics, class_metrics
from solodg.runs.metrics import metrics
from solodg.runs.predictions import Predictions
from solodg.runs.scores import score
from solodg.seeding import numpy_generator

CLASSES = ["ant", "bee", "cat", "dog"]


def made(count: int, classes: int, seed: int = 0) -> tuple[Predictions, np.ndarray]:
    """Predictions that are right more often than by chance, with equal scores among them."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, count)
    raw = generator.dirichlet([0.5] * classes, count) + 0.5 * np.eye(classes)[labels]
    raw = np.round(raw, 1) + 0.05
    return Predictions(raw / raw.sum(1, keepdims=True)), labels


def oracle(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The overall metrics by scikit-learn's own functions, for data with every class."""
    chosen = probabilities.argmax(1)
    return {
        "accuracy": sk.accuracy_score(labels, chosen),
        "balanced_accuracy": sk.balanced_accuracy_score(labels, chosen),
        "macro_f1": sk.f1_score(labels, chosen, average="macro", labels=np.unique(labels)),
        "nll": sk.log_loss(labels, probabilities, labels=range(probabilities.shape[1])),
        "macro_auc": np.mean(
            [sk.roc_auc_score(labels == c, probabilities[:, c]) for c in np.unique(labels)]
        ),
    }


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_overall_metrics_equal_those_of_scikit_learn(classes: int) -> None:
    predictions, labels = made(300, classes)
    found, p = all_metrics(predictions, labels), predictions.probabilities
    for name, value in oracle(p, labels).items():
        assert found[name] == pytest.approx(value), name
    wanted = sk.roc_auc_score(
        labels, p[:, 1] if classes == 2 else p, multi_class="ovr", average="macro"
    )
    assert found["macro_auc"] == pytest.approx(wanted)
    brier = sk.brier_score_loss(labels, p[:, 1] if classes == 2 else p)
    assert found["brier"] == pytest.approx(brier)


def test_the_metrics_of_earlier_records_keep_their_bits() -> None:
    predictions, labels = made(300, 4)
    found = all_metrics(predictions, labels)
    before = metrics(predictions, labels)
    assert list(before) == ["accuracy", "nll", "ece", "images"]
    assert {name: found[name] for name in before} == before


def test_metrics_of_a_class_equal_those_of_scikit_learn() -> None:
    predictions, labels = made(300, 4)
    chosen = predictions.chosen
    for number, found in class_metrics(predictions, labels).items():
        (tn, fp), (fn, tp) = sk.confusion_matrix(labels == number, chosen == number)
        assert found["sensitivity"] == pytest.approx(tp / (tp + fn))
        assert found["specificity"] == pytest.approx(tn / (tn + fp))
        assert found["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
        area = sk.roc_auc_score(labels == number, predictions.probabilities[:, number])
        assert found["auc"] == pytest.approx(area)


@pytest.mark.parametrize("grouped", [False, True])
def test_replicates_equal_a_plain_loop_over_resampled_images(grouped: bool, monkeypatch) -> None:
    predictions, labels = made(90, 3)
    units = np.random.default_rng(3).integers(0, 25, 90) if grouped else np.arange(90)
    _, units = np.unique(units, return_inverse=True)
    monkeypatch.setattr(bootstrap, "_NUMBERS", 7 * 90)  # several blocks, the last one shorter
    found = resampled_metrics(predictions, labels, units, replicates=30, seed=5)
    generator, number = numpy_generator(5, "bootstrap"), units.max() + 1
    for r in range(30):
        drawn = generator.integers(0, number, number)
        rows = np.concatenate([np.flatnonzero(units == unit) for unit in drawn])
        p, y = predictions.probabilities[rows], labels[rows]
        for name, value in oracle(p, y).items():
            assert found[name][r] == pytest.approx(value, abs=1e-12), name
        again = Predictions(p)
        assert found["ece"][r] == pytest.approx(metrics(again, y)["ece"], abs=1e-12)
        assert found["brier"][r] == pytest.approx(all_metrics(again, y)["brier"], abs=1e-12)
        for c, values in class_metrics(again, y).items():
            for name in PER_CLASS:
                assert found[name][r, c] == pytest.approx(values[name], abs=1e-12), name


def test_intervals_are_quantiles_of_the_replicates_and_repeat() -> None:
    predictions, labels = made(200, 4)
    found = score(predictions, labels, CLASSES)
    replicates = resampled_metrics(predictions, labels, np.arange(200))
    low, high = np.quantile(replicates["accuracy"], [0.025, 0.975])
    assert found.overall["accuracy"] == (metrics(predictions, labels)["accuracy"], low, high)
    assert found == score(predictions, labels, CLASSES)
    assert found != score(predictions, labels, CLASSES, seed=1)
    assert set(found.overall) == set(OVERALL)
    for value, low, high in (*found.overall.values(), *found.classes["bee"].values()):
        assert low <= high
        assert low - 0.02 <= value <= high + 0.02  # ECE is biased upwards in a resample


def test_intervals_over_groups_are_wider_where_images_of_a_group_are_alike() -> None:
    predictions, labels = made(60, 4)
    alike = Predictions(np.repeat(predictions.probabilities, 10, 0))
    labels = np.repeat(labels, 10)
    by_image = score(alike, labels, CLASSES)
    by_group = score(alike, labels, CLASSES, np.repeat(np.arange(60), 10) + 7)
    assert by_group.units == 60
    assert by_group.grouped

    def width(scores) -> float:
        return scores.overall["accuracy"].high - scores.overall["accuracy"].low

    assert width(by_group) > 2 * width(by_image)


def test_missing_classes_have_no_metrics_and_are_named() -> None:
    predictions, labels = made(200, 4)
    labels = np.where(labels == 2, 0, labels)
    found = score(predictions, labels, CLASSES)
    assert found.missing == ["cat"]
    assert list(found.classes) == ["ant", "bee", "dog"]
    sensitivity = [found.classes[name]["sensitivity"].value for name in found.classes]
    assert found.overall["balanced_accuracy"].value == pytest.approx(np.mean(sensitivity))
    areas = [found.classes[name]["auc"].value for name in found.classes]
    assert found.overall["macro_auc"].value == pytest.approx(np.mean(areas))
    assert "1 of 4 classes (cat)" in found.remark()
    assert found.to_json()["missing_classes"] == ["cat"]


def test_images_of_one_class_have_neither_auc_nor_specificity() -> None:
    predictions, _ = made(50, 4)
    found = score(predictions, np.zeros(50, dtype=np.int64), CLASSES)
    assert "macro_auc" not in found.overall
    assert set(found.classes["ant"]) == {"sensitivity", "f1"}


def test_one_image_or_one_group_has_no_interval() -> None:
    predictions, labels = made(20, 4)
    alone = score(predictions.of_image(0), labels[:1], CLASSES)
    assert alone.overall["accuracy"].low is None
    assert score(predictions, labels, CLASSES, np.zeros(20)).overall["nll"].high is None


def test_a_class_of_one_image_has_an_interval_over_the_samples_that_hold_it() -> None:
    predictions, labels = made(40, 3)
    labels = np.where(labels == 2, 0, labels)
    labels[3] = 2
    found = score(predictions, labels, ["a", "b", "c"])
    value, low, high = found.classes["c"]["sensitivity"]
    assert value == low == high


def test_four_thousand_images_take_about_a_second() -> None:
    predictions, labels = made(4000, 4)
    score(*made(50, 4), CLASSES)  # imports
    started = time.process_time()
    score(predictions, labels, CLASSES)
    assert time.process_time() - started < 4  # with room for a busy machine
