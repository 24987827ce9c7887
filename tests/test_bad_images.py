"""Runs trained without the images that cannot be read: all commands read what training read."""

from pathlib import Path

import numpy as np
import pytest

from conftest import write_images
from solodg.explain.drawer import figure_drawer
from solodg.explain.projection import stored_projection
from solodg.explain.swap_study import open_study
from solodg.predict.torch import Predictor
from solodg.progress import NoProgress
from solodg.runs.config import Machine, RunConfig
from solodg.runs.folder import read_config, read_machine
from solodg.runs.opened_data import open_source
from solodg.runs.train import train_run

BROKEN = ("a/x/5.png", "a/y/1.png", "c/y/2.png", "c/x/0.png", "b/x/3.png")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on real files, of which some in each domain are broken."""
    folder = tmp_path_factory.mktemp("bad")
    images = write_images(folder / "own", {(d, c): 8 for d in "abc" for c in ("x", "y")})
    for path in BROKEN:
        (images / path).write_bytes(b"broken")
    config = RunConfig(dataset=str(images), targets=("b",), backbone="small_cnn", image_size=32,
                       steps=2, batch_size=4, context_images=2, image_norm=100,
                       skip_bad_images=True)  # fmt: skip
    return train_run(config, Machine(accelerator="cpu"), folder / "run")


def split_of(run: Path) -> dict[str, set[str]]:
    """The readable files of each part, as the split of all listed files puts them."""
    source, _ = open_source(read_config(run), read_machine(run))
    parts = {"train": source.train, "val": source.val}
    return {name: set(part.images.paths) - set(BROKEN) for name, part in parts.items()}


@pytest.mark.parametrize("command", ["explain", "report", "study"])
def test_a_run_that_skipped_bad_images_is_read_without_them(command, run, solodg) -> None:
    image = [Path(read_config(run).dataset) / "b" / "x" / "0.png"] if command == "explain" else []
    (run / "plane.safetensors").unlink(missing_ok=True)
    code, _, err = solodg(command, run, *image)
    assert code == 0, err
    assert "Skipped" in err
    assert "not those of the training" not in err


def test_a_server_draws_figures_of_a_run_that_skipped_bad_images(run: Path) -> None:
    (run / "plane.safetensors").unlink(missing_ok=True)
    draw = figure_drawer(run, Predictor.load(run), None, NoProgress(), print)
    assert draw is not None
    assert b"<svg" in draw(np.zeros((3, 32, 32), np.uint8))


def test_figures_and_studies_keep_the_split_of_the_training(run: Path) -> None:
    (run / "plane.safetensors").unlink(missing_ok=True)
    predictor = Predictor.load(run)
    projection = stored_projection(run, predictor)
    train = split_of(run)["train"]
    assert len(projection.labels) == len(train)  # few enough that all are drawn
    studied = open_study(run, None)
    assert set(studied.source.images.paths) == train
    assert set(studied.targets["b"].images.paths).isdisjoint(BROKEN)
    assert len(studied.targets["b"]) == 15
    labels = np.bincount(studied.source.labels)
    assert np.array_equal(np.bincount(projection.labels), labels)
