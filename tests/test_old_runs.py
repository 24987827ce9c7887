"""Runs that earlier versions trained: one small run of each format is kept in tests/data.

That of the current format was made by these commands, in an empty folder with docs/disc.png:

    solodg train toy --target sky --backbone small_cnn --steps 30 --batch-size 8 \\
        --context-images 2 --pose on --data-dir /data --output run_format_4
    solodg predict run_format_4 docs/disc.png --json > run_format_4/prediction.json
    rm -rf run_format_4/tensorboard

In `run_format_3_solo_plus`, `solo_plus` is what is called `solo_code` now.
"""

import json
import shutil
from pathlib import Path

import pytest

import solodg
from solodg.runs.evaluate import evaluate_run
from solodg.runs.model_info import READABLE_FORMATS
from solodg.storage import read_json

DATA = Path(__file__).parent / "data"
RUNS = sorted(path.name for path in DATA.glob("run_format_*"))
PICTURE = Path(__file__).parents[1] / "docs" / "disc.png"


@pytest.mark.parametrize("name", RUNS)
def test_an_old_run_predicts_what_it_predicted_then(name: str) -> None:
    then = json.loads((DATA / name / "prediction.json").read_text())
    now = solodg.load(DATA / name).predict(PICTURE)
    assert now.label == then["class"]
    assert now.probabilities == pytest.approx(then["probabilities"], abs=1e-4)
    if then["before"] is None:
        assert now.before is None
    else:
        assert now.before == pytest.approx(then["before"], abs=1e-4)
    assert now.uncertainty == pytest.approx(then["uncertainty"], abs=1e-4)


@pytest.mark.parametrize("name", RUNS)
def test_an_old_run_is_scored(name: str, tmp_path: Path) -> None:
    shutil.copytree(DATA / name, tmp_path / "run")
    records = evaluate_run(tmp_path / "run")
    assert [record.domain for record in records] == ["sky", "ash", "clay", "moss"]
    assert records[0].metrics["accuracy"] > 0.5


def test_there_is_a_run_of_each_format_that_can_be_read() -> None:
    kept = {read_json(DATA / name / "model.json")["format"] for name in RUNS}
    assert kept == set(READABLE_FORMATS)
