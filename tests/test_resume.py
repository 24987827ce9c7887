"""Resuming a run: one process at a time, on the data, weights and versions that it began with."""

from pathlib import Path

import pytest

from solodg.errors import UserError
from solodg.runs.config import Machine, RunConfig
from solodg.runs.train import train_run

CPU = Machine(accelerator="cpu")


def small(**values) -> RunConfig:
    fast = {"batch_size": 4, "context_images": 1, "centre_images": 2, "steps": 2}
    defaults = {"dataset": "toy", "targets": ("sky",), "algorithm": "erm", "backbone": "small_cnn"}
    return RunConfig(**defaults | fast | values)


@pytest.mark.parametrize("resume", [True, False])
def test_a_second_training_in_one_folder_is_refused(tmp_path: Path, resume: bool) -> None:
    folder = tmp_path / "run"
    refused: list[str] = []

    def second(text: str) -> None:  # called in the middle of the first training
        with pytest.raises(UserError) as error:
            train_run(small(), CPU, folder, resume=resume)
        refused.append(str(error.value))

    train_run(small(), CPU, folder, say=second)
    assert refused
    assert all(("another process trains" in text) == resume for text in refused)
    assert (folder / "finished.json").is_file()
    assert not (folder / "train.lock").exists()


def test_a_training_that_cannot_begin_leaves_no_folder_and_no_lock(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--context-images"):
        train_run(small(context_images=25), CPU, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_lock_of_a_killed_training_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "train.lock").touch()
    train_run(small(), CPU, tmp_path, resume=True)
    assert not (tmp_path / "train.lock").exists()
