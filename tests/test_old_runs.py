"""Runs that earlier versions trained: one small run of each format is kept in tests/data."""

import json
import shutil
from pathlib import Path

import pytest

import solodg
from solodg.runs.evaluate import evaluate_run

DATA = Path(__file__).parent / "data"
PICTURE = Path(__file__).parents[1] / "docs" / "disc.png"


@pytest.mark.parametrize("name", ["run_format_2"])
def test_an_old_run_predicts_what_it_predicted_then(name: str) -> None:
    then = json.loads((DATA / name / "prediction.json").read_text())
    now = solodg.load(DATA / name).predict(PICTURE)
    assert now.label == then["class"]
    assert now.probabilities == pytest.approx(then["probabilities"], abs=1e-4)
    assert now.before == pytest.approx(then["before"], abs=1e-4)
    assert now.uncertainty == pytest.approx(then["uncertainty"], abs=1e-4)


@pytest.mark.parametrize("name", ["run_format_2"])
def test_an_old_run_is_scored(name: str, tmp_path: Path) -> None:
    shutil.copytree(DATA / name, tmp_path / "run")
    records = evaluate_run(tmp_path / "run")
    assert [record.domain for record in records] == ["sky", "ash", "clay", "moss"]
    assert records[0].metrics["accuracy"] > 0.5
