"""Commands on folders that cannot be written: they do what can be done, and say what helps."""

import errno
import json
import shutil
from pathlib import Path

import pytest

from solodg.cli.write_errors import write_error
from solodg.runs.config import Machine, RunConfig
from solodg.runs.train import train_run

PICTURE = Path(__file__).parents[1] / "docs" / "disc.png"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = RunConfig(
        dataset="toy", targets=("sky",), algorithm="erm", backbone="small_cnn", steps=2,
        batch_size=4, context_images=1,
    )  # fmt: skip
    return train_run(config, Machine(accelerator="cpu"), tmp_path_factory.mktemp("run") / "run")


@pytest.fixture
def read_only(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on a read-only file system: for root, too, who may write into any other folder."""
    run = tmp_path / "ro" / "run"
    shutil.copytree(trained, run)
    real = Path.open

    def refuse(path: Path, mode: str = "r", *rest, **options):
        if set(mode) & set("wax+") and path.resolve().is_relative_to(tmp_path / "ro"):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, mode, *rest, **options)

    monkeypatch.setattr(Path, "open", refuse)
    return run


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_evaluate_shows_scores_that_it_cannot_write(read_only: Path, solodg, form) -> None:
    code, out, err = solodg("evaluate", read_only, *form)
    assert code == 2
    assert "the scores above are complete, but cannot be added" in err
    assert "Traceback" not in err
    if form:
        assert json.loads(out.splitlines()[0])["domain"] == "sky"
    else:
        assert "sky" in out
        assert "Records:" not in out + err  # there are none


def test_a_run_that_cannot_be_written_is_explained_and_reported(
    read_only: Path, tmp_path: Path, solodg
) -> None:
    code, _, err = solodg("explain", read_only, PICTURE)
    assert code == 2
    assert "write the figures elsewhere with --output" in err
    assert solodg("explain", read_only, PICTURE, "--output", tmp_path / "figures")[0] == 0
    assert (tmp_path / "figures" / "disc.png").is_file()
    code, _, err = solodg("report", read_only, "--images", 3)
    assert code == 2
    assert "write the page elsewhere with --output" in err
    page = tmp_path / "page.html"
    assert solodg("report", read_only, "--images", 3, "--output", page)[0] == 0
    assert page.is_file()


def test_training_into_a_folder_that_cannot_be_written_names_output(read_only, solodg) -> None:
    code, _, err = solodg("train", "toy", "--target", "sky", "--backbone", "small_cnn", "--steps",
                          2, "--output", read_only.parent / "new")  # fmt: skip
    assert code == 2
    assert "Read-only file system" in err
    assert "choose another folder with --output" in err
    assert "--resume" not in err


def test_an_error_has_a_hint_of_its_command_and_kind() -> None:
    forbidden = PermissionError(errno.EACCES, "Permission denied", "/x/features/a.npy")
    assert "$SOLODG_CACHE" in str(write_error(forbidden, "evaluate"))
    full = OSError(errno.ENOSPC, "No space left on device", "/x/model.onnx")
    assert str(write_error(full, "export")).endswith("Make space and repeat the command.")
    assert write_error(OSError(errno.EIO, "Input/output error"), "train") is None
