"""A run trained with relative paths is used from another working folder."""

import os
from pathlib import Path

import pytest
from safetensors.torch import save_file

from solodg.explain.projection import stored_projection
from solodg.models.backbones import build_backbone
from solodg.predict.torch import Predictor
from solodg.runs.config import Machine, RunConfig
from solodg.runs.evaluate import evaluate_run
from solodg.runs.train import train_run
from solodg.storage import read_json


def test_a_run_with_relative_paths_is_scored_and_explained_from_another_folder(
    tmp_path: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = build_backbone("small_cnn", channels=3, image_size=16).net
    save_file({k: t.contiguous() for k, t in network.state_dict().items()}, tmp_path / "blob")
    (tmp_path / "w.safetensors").symlink_to(tmp_path / "blob")
    monkeypatch.chdir(tmp_path)
    config = RunConfig(
        dataset="own", targets=("c",), algorithm="erm", backbone="small_cnn", image_size=16,
        weights="w.safetensors", freeze_backbone=True, steps=2, batch_size=4, context_images=1,
    )  # fmt: skip
    machine = Machine(accelerator="cpu", data_dir=Path("data"), cache_dir=Path("cache"))
    run = train_run(config, machine, tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    records = evaluate_run(run)
    assert [record.domain for record in records] == ["c", "a", "b"]
    stored_projection(run, Predictor.load(run))
    assert os.listdir() == []  # the cache is not here either
    assert (records[0].config["dataset"], records[0].config["weights"]) == ("own", "w.safetensors")
    assert str(tmp_path) not in records[0].model_dump_json()
    assert read_json(run / "machine.json")["data_dir"] == str(tmp_path / "data")
    monkeypatch.chdir("..")
    train_run(config, machine, run, resume=True)  # the same command is the same run
