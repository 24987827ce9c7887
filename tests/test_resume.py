"""Resuming a run: one process at a time, on the data, weights and versions that it began with."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from solodg.bench.cell import Cell
from solodg.bench.runner import run_cell
from solodg.errors import UserError
from solodg.models.backbones import build_backbone
from solodg.runs.config import Machine, RunConfig
from solodg.runs.defaults import resolve
from solodg.runs.origin import describe_origin
from solodg.runs.train import train_run
from solodg.storage import read_json, write_json

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


class Killed(BaseException):
    """Stands for the end of the process."""


def killed_run(config: RunConfig, folder: Path) -> Path:
    """A run that was stopped when training began."""

    def stop(text: str) -> None:
        raise Killed

    with pytest.raises(Killed):
        train_run(config, CPU, folder, say=stop)
    assert (folder / "config.json").is_file()
    assert not (folder / "finished.json").exists()
    return folder


def test_a_run_does_not_resume_on_other_images(tmp_path: Path, image_folder: Path) -> None:
    config = small(dataset=str(image_folder), targets=("c",), image_size=16)
    folder = killed_run(config, tmp_path / "run")
    claimed = (folder / "source.json").read_bytes()
    new = image_folder / "a" / "pear" / "new.png"
    shutil.copy(image_folder / "a" / "pear" / "0.png", new)
    with pytest.raises(UserError, match="source domain 'a' had 20 images and has 21"):
        train_run(config, CPU, folder, resume=True)
    new.unlink()
    changed = image_folder / "b" / "pear" / "1.png"
    before = changed.read_bytes()
    shutil.copy(image_folder / "b" / "pear" / "0.png", changed)
    with pytest.raises(UserError, match="source domain 'b' has other images") as error:
        train_run(config, CPU, folder, resume=True)
    assert "'a'" not in str(error.value)
    assert (folder / "source.json").read_bytes() == claimed
    changed.write_bytes(before)
    train_run(config, CPU, folder, resume=True)
    assert (folder / "finished.json").is_file()


def test_a_run_does_not_resume_with_other_classes_of_the_same_images(
    tmp_path: Path, image_folder: Path
) -> None:
    manifest = tmp_path / "all.csv"
    rows = [
        f"{path},{path.parent.name},{path.parent.parent.name}"
        for path in sorted(image_folder.rglob("*.png"))
    ]
    manifest.write_text("\n".join(["path,label,domain", *rows]))
    config = small(dataset=str(manifest), targets=("c",), image_size=16)
    folder = killed_run(config, tmp_path / "run")
    manifest.write_text(manifest.read_text().replace("0.png,apple,a", "0.png,pear,a"))
    with pytest.raises(UserError, match="source domain 'a' has other images, classes"):
        train_run(config, CPU, folder, resume=True)


def test_a_run_does_not_resume_with_other_weights_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    for seed in (0, 1):
        torch.manual_seed(seed)
        network = build_backbone("small_cnn", channels=3, image_size=32).net
        if seed == 1:
            folder = killed_run(small(weights=str(file)), tmp_path / "run")
        save_file({name: t.contiguous() for name, t in network.state_dict().items()}, file)
    with pytest.raises(UserError, match="initial weights of the backbone are others"):
        train_run(small(weights=str(file)), CPU, folder, resume=True)


def test_a_run_does_not_resume_with_another_version_and_says_how_to_go_on(tmp_path: Path) -> None:
    folder = killed_run(small(), tmp_path / "run")
    versions = read_json(folder / "versions.json")
    write_json(folder / "versions.json", versions | {"torch": "1.0", "python": "3.0"})
    with pytest.raises(UserError, match=r"torch was 1\.0 and is .* another with --output") as error:
        train_run(small(), CPU, folder, resume=True)
    assert "python" not in str(error.value)
    write_json(folder / "versions.json", versions)
    train_run(small(), CPU, folder, resume=True)
    write_json(folder / "versions.json", versions | {"torch": "1.0"})
    train_run(small(), CPU, folder, resume=True)  # a finished run has nothing to mix


def test_a_run_of_before_resumes_by_its_fingerprint(tmp_path: Path) -> None:
    folder = killed_run(small(), tmp_path / "run")
    found = read_json(folder / "source.json")["fingerprint"]
    write_json(folder / "source.json", {"fingerprint": "0" * 16})
    with pytest.raises(UserError, match="the source images or their split are others"):
        train_run(small(), CPU, folder, resume=True)
    write_json(folder / "source.json", {"fingerprint": found})
    train_run(small(), CPU, folder, resume=True)


def test_a_finished_cell_of_other_images_is_not_scored(tmp_path: Path, image_folder: Path) -> None:
    config = small(dataset=str(image_folder), targets=("c",), image_size=16)
    cell = Cell("x", "none", resolve(config))
    run_cell(cell, CPU, tmp_path / "out")
    (image_folder / "a" / "pear" / "0.png").unlink()
    with pytest.raises(UserError, match="was trained on other source images"):
        run_cell(cell, CPU, tmp_path / "out")


def test_a_run_does_not_resume_on_images_in_another_order(toy) -> None:
    source = toy.leave_out(["sky"])
    order = np.arange(len(source.train))[::-1]
    turned = replace(source, train=source.train.subset(order))
    before, now = describe_origin(source, None), describe_origin(turned, None)
    assert before.differences(before) == []
    assert before.differences(now) == ["the source images are in another order"]
