"""Thresholds for a wanted sensitivity, against a search over all of them; `evaluate` with one."""

import json
from pathlib import Path

import numpy as np
import pytest

from conftest import write_images
from solodg.errors import UserError
from solodg.runs.config import Machine, RunConfig
from solodg.runs.operating_point import choose_threshold
from solodg.runs.predictions import Predictions
from solodg.runs.train import train_run
from solodg.storage import lock

CLASSES = ["benign", "malignant"]
CELLS = {(d, c): 10 for d in "abc" for c in ("apple", "pear")}


def two_classes(count: int = 200) -> tuple[Predictions, np.ndarray]:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, count)
    p = np.round(np.clip(generator.normal(0.3 + 0.3 * labels, 0.2), 0, 1), 2)
    return Predictions(np.stack([1 - p, p], 1)), labels


@pytest.fixture(scope="module")
def fruit(shared_folder: Path) -> tuple[Path, Path]:
    """A run of two classes and its images."""
    images = shared_folder / "fruit-images"
    config = RunConfig(dataset=str(images), targets=("b",), algorithm="solo", image_size=32,
                       backbone="small_cnn", steps=30, batch_size=8, context_images=2)  # fmt: skip
    with lock(shared_folder / "fruit.lock"):
        if not images.is_dir():
            write_images(images, CELLS)
        machine = Machine(accelerator="cpu")
        return train_run(config, machine, shared_folder / "fruit", resume=True), images


@pytest.mark.parametrize("wanted", [0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("positive", CLASSES)
def test_the_threshold_is_the_largest_with_the_wanted_sensitivity(wanted, positive) -> None:
    predictions, labels = two_classes()
    point = choose_threshold(predictions, labels, CLASSES, wanted, positive)
    number = CLASSES.index(positive)
    p, of_class = predictions.probabilities[:, number], labels == number
    enough = [t for t in np.unique(p) if (p[of_class] >= t).mean() >= wanted]
    assert point.threshold == max(enough)
    assert point.sensitivity == pytest.approx((p[of_class] >= max(enough)).mean())
    assert point.specificity == pytest.approx((p[~of_class] < max(enough)).mean())
    scores = point.scores(predictions, labels)
    assert scores["sensitivity"].value == pytest.approx(point.sensitivity)
    assert scores["specificity"].value == pytest.approx(point.specificity)
    assert scores["accuracy"].value == pytest.approx(((p >= point.threshold) == of_class).mean())
    assert scores["specificity"].low <= scores["specificity"].value


def test_images_without_the_positive_class_have_a_specificity_alone() -> None:
    predictions, labels = two_classes()
    point = choose_threshold(predictions, labels, CLASSES, 0.9)
    assert point.positive == "malignant"
    rows = np.flatnonzero(labels == 0)
    found = point.scores(Predictions(predictions.probabilities[rows]), labels[rows])
    assert set(found) == {"specificity", "accuracy"}


def test_no_threshold_without_validation_images_of_both_classes() -> None:
    predictions, labels = two_classes()
    with pytest.raises(UserError, match="no source validation image is of class 'malignant'"):
        choose_threshold(predictions, np.zeros_like(labels), CLASSES, 0.9)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--sensitivity", "0"], "must be above 0 and at most 1"),
        (["--sensitivity", "nan"], "must be above 0 and at most 1"),
        (["--sensitivity", "0.9", "--positive", "plum"], "unknown class 'plum'"),
        (["--positive", "pear"], "give both"),
        (["--sensitivity", "0.9", "--adapter", "bn"], "leave out --adapter"),
    ],
)
def test_a_wrong_threshold_is_one_line(solodg, fruit, options, reason) -> None:
    code, _, err = solodg("evaluate", fruit[0], *options)
    assert code == 2
    assert reason in err
    assert "Traceback" not in err


def test_a_threshold_for_ten_classes_is_refused(solodg, digits_run) -> None:
    code, _, err = solodg("evaluate", digits_run, "--sensitivity", "0.95")
    assert code == 2
    assert "two classes; this one has 10" in err


def test_evaluate_prints_metrics_with_intervals_and_the_threshold(solodg, fruit) -> None:
    code, out, err = solodg("evaluate", fruit[0], "--sensitivity", "0.95")
    assert code == 0, err
    for text in ("balanced accuracy %", "macro AUC", "Brier", "specificity %", "bootstrap samples",
                 "'pear' if its probability is at least"):  # fmt: skip
        assert text in out


def test_json_has_intervals_classes_and_the_threshold(solodg, fruit) -> None:
    run, _ = fruit
    code, out, err = solodg("evaluate", run, "--json", "--sensitivity", "0.9", "--positive",
                            "apple")  # fmt: skip
    assert code == 0, err
    line = json.loads(out.splitlines()[0])
    assert line["scores"]["overall"]["accuracy"]["value"] == line["metrics"]["accuracy"]
    assert line["scores"]["overall"]["brier"]["value"] == line["metrics"]["brier"]
    assert set(line["scores"]["classes"]) == {"apple", "pear"}
    assert line["threshold"]["class"] == "apple"
    assert line["threshold"]["validation"]["sensitivity"] >= 0.9
    assert 0 <= line["threshold"]["sensitivity"]["value"] <= 1
    stored = json.loads((run / "results.jsonl").read_text().splitlines()[-1])
    assert stored["scores"]["overall"].keys() == line["scores"]["overall"].keys()
    assert {"balanced_accuracy", "macro_auc", "macro_f1", "brier"} <= stored["metrics"].keys()
