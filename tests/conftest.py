"""Small real things that many tests share."""

import io
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from PIL import Image

from solodg import cli
from solodg.data import DATASETS, DomainDataset, Loading
from solodg.predict.export import export_onnx
from solodg.predict.torch import Predictor
from solodg.runs.config import Machine, RunConfig
from solodg.runs.train import train_run
from solodg.storage import lock
from solodg.torchvision_shim import make_torchvision_importable

settings.register_profile("no-deadline", deadline=None)  # a slow machine is no failure
settings.load_profile("no-deadline")
make_torchvision_importable()  # tests import timm and torchvision themselves


LONG_FILES = ("test_benchmark", "test_contracts", "test_contract_runs", "test_training",
              "test_evidence", "test_serving", "test_report", "test_stored_maps", "test_cli",
              "test_onnx", "test_dense_average", "test_explain", "test_study", "test_figures",
              "test_adapters", "test_backbones", "test_estimator", "test_readme", "test_features",
              "test_damaged_runs", "test_page", "test_pose", "test_plan")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files of long tests first, so that all processes of a run end at about one time."""
    rank = {name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    """No test reads or writes the user's data and caches."""
    monkeypatch.setenv("SOLODG_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("SOLODG_DATA", str(tmp_path_factory.getbasetemp() / "no-data"))


@pytest.fixture(scope="session")
def toy() -> DomainDataset:
    return DATASETS["toy"].load(Loading(Path("nowhere"), image_size=32, channels=3))


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all processes of this call of pytest."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def digits_run(shared_folder: Path) -> Path:
    """A model of real digits that has learned something, trained once for all processes."""
    config = RunConfig(
        dataset="rotated-mnist", algorithm="solo", backbone="small_cnn", steps=60, train_images=200,
        batch_size=16, context_images=2, centre_images=20, validate_every=60, seed=0,
    )  # fmt: skip
    machine = Machine(accelerator="cpu", data_dir=Path("nowhere"))
    with lock(shared_folder / "digits.lock"):
        return train_run(config, machine, shared_folder / "digits", resume=True)


@pytest.fixture(scope="session")
def digits_onnx(digits_run: Path) -> Path:
    """The same model as an exported file."""
    path = digits_run.with_suffix(".onnx")
    with lock(digits_run.with_suffix(".lock")):
        if not path.is_file():
            export_onnx(Predictor.load(digits_run), path)
    return path


@pytest.fixture(scope="session")
def digits() -> np.ndarray:
    """500 real digits, (500, 1, 32, 32), at angles that the run has never seen."""
    dataset = DATASETS["rotated-mnist"].load(Loading(Path("nowhere"), image_size=32, channels=1))
    parts = dataset.targets(["0", "90"])
    return np.concatenate([part.images.take(range(250)).numpy() for part in parts.values()])


@pytest.fixture
def solodg(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs commands in this process; each returns (exit code, stdout, stderr)."""

    def run(*arguments: object, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["solodg", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def write_images(root: Path, cells: dict[tuple[str, str], int], size: int = 24) -> Path:
    """Real files `domain/class/i.png`; brightness tells the class, tint the domain."""
    generator = np.random.default_rng(0)
    classes = sorted({c for _, c in cells})
    domains = sorted({d for d, _ in cells})
    for (domain, label), count in cells.items():
        folder = root / domain / label
        folder.mkdir(parents=True, exist_ok=True)
        for i in range(count):
            level = 40 + 170 * classes.index(label) / max(1, len(classes) - 1)
            pixels = generator.normal(level, 12, (size, size, 3))
            pixels[..., domains.index(domain) % 3] *= 0.8
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{i}.png")
    return root


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Three domains, two classes; domain `c` lacks the class `apple`."""
    cells = {(d, c): 10 for d in "abc" for c in ("apple", "pear")}
    del cells["c", "apple"]
    return write_images(tmp_path / "own", cells)


@pytest.fixture
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
