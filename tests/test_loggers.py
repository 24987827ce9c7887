"""Loggers that follow a training: files of TensorBoard and CSV, W&B and MLflow offline."""

import csv
import json
import math
import re
import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import solodg as package
from solodg.errors import UserError
from solodg.runs.config import Machine
from solodg.runs.metrics_log import METRICS, metrics_log, read_metrics

OPTIONS = {
    "target": "sky", "backbone": "small_cnn", "steps": 4, "image_size": 16, "batch_size": 8,
    "context_images": 2, "algorithm": "erm", "accelerator": "cpu", "verbose": False,
}  # fmt: skip
LINES = [{"step": 10, "loss": 1.5}, {"step": 10, "val_accuracy": 0.25}, {"step": 20, "loss": 0.5}]


class First:
    """A Fabric of one process, as far as the log of a training needs it."""

    is_global_zero = True


def write(folder: Path, names: list[str], lines: list[dict] = LINES, **settings) -> None:
    with metrics_log(First(), folder, names, **settings) as log:
        for line in lines:
            log(line)


def rows(folder: Path) -> list[dict[str, float]]:
    """The lines of the CSV file, by column, without empty cells."""
    with (folder / "csv" / "metrics.csv").open(newline="") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def curve(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_named_loggers_have_the_values_of_the_metrics(tmp_path: Path) -> None:
    options = OPTIONS | {"output": tmp_path / "run", "logger": "csv, tensorboard"}
    package.train("toy", **options)
    lines = read_metrics(tmp_path / "run")
    assert {"loss", "val_accuracy"} <= {name for line in lines for name in line}
    assert rows(tmp_path / "run") == lines
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert curve(tmp_path / "run", "loss") == [(4, pytest.approx(losses[0][1]))]
    assert len(losses) == 1


def test_without_a_name_there_is_tensorboard_and_none_is_nobody(tmp_path: Path) -> None:
    write(tmp_path / "default", None)
    assert curve(tmp_path / "default", "loss") == [(10, 1.5), (20, 0.5)]
    write(tmp_path / "none", ["none"])
    assert [path.name for path in (tmp_path / "none").iterdir()] == [METRICS]


def test_a_continued_csv_file_has_every_line_once(tmp_path: Path) -> None:
    write(tmp_path, ["csv"], [*LINES[:2], {"step": 15, "loss": math.nan}])
    write(tmp_path, ["csv"], LINES[2:])
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [10, 10, 15, 20]
    assert math.isnan(found[2]["loss"])


def test_wandb_offline_has_the_metrics_and_the_settings_without_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    write(tmp_path, ["wandb"], settings={"dataset": "own", "steps": 4})
    wandb.teardown()  # waits for its process, which writes the file
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    identity = json.loads((tmp_path / "loggers.json").read_text())["wandb"]
    assert file.stem == f"run-{identity}"
    content = file.read_bytes()
    assert all(text in content for text in (b"0.25", b"val_accuracy", b"own", b"solodg"))
    write(tmp_path, ["wandb"], [{"step": 30, "loss": 0.125}])
    # Within one second the second folder takes the place of the first.
    files = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert {file.stem for file in files} == {f"run-{identity}"}


def test_mlflow_in_a_folder_continues_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    settings = {"dataset": "own", "steps": 4}
    with pytest.raises(KeyboardInterrupt), metrics_log(First(), tmp_path, ["mlflow"], settings):
        raise KeyboardInterrupt
    client = MlflowClient((tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("solodg").experiment_id
    assert [run.info.status for run in client.search_runs([experiment])] == ["FAILED"]
    write(tmp_path, ["mlflow"], settings=settings)
    (run,) = client.search_runs([experiment])
    assert (run.info.status, run.info.run_name) == ("FINISHED", tmp_path.name)
    assert run.data.params == {"dataset": "own", "steps": "4"}
    losses = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")]
    assert losses == [(10, 1.5), (20, 0.5)]


def test_a_server_that_is_not_there_is_named_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UserError, match=r"MLflow cannot begin a run at http://127\.0\.0\.1:9: "):
        write(tmp_path, ["mlflow"])


def test_wandb_without_an_account_says_how_to_go_on_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    wandb.teardown()  # it reads its variables once
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"W&B cannot begin a run: .* WANDB_MODE=offline"):
        write(tmp_path, ["wandb"])
    wandb.teardown()


def test_a_logger_that_fails_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    said: list[str] = []
    with metrics_log(First(), tmp_path, ["mlflow", "csv"], say=said.append) as log:
        log(LINES[0])
        shutil.rmtree(tmp_path / "mlruns")
        log(LINES[1])
        log(LINES[2])
    assert [text.partition(":")[0] for text in said] == ["The logger mlflow failed and is left out"]
    assert len(rows(tmp_path)) == len(read_metrics(tmp_path)) == 3


@pytest.mark.parametrize("value", ["wandbb", ["csv", "excel"]])
def test_an_unknown_logger_is_refused_with_the_known_ones(value) -> None:
    name = value if isinstance(value, str) else value[-1]
    with pytest.raises(ValueError, match=re.escape(f"'{name}' is no logger; choose from tensorb")):
        Machine(logger=value)


def test_the_command_names_loggers_repeatedly_or_by_commas(solodg) -> None:
    code, _, stderr = solodg("train", "toy", "--logger", "csv,excel")
    assert code == 2
    assert "--logger" in stderr
    assert "'excel' is no logger" in stderr
    assert Machine(logger=["csv,mlflow", "csv"]).logger == ("csv", "mlflow")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'solodg\[wandb\]'"):
        package.train("toy", **OPTIONS | {"logger": "wandb"})
