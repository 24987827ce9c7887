"""Results go to stdout and all else to stderr; `--quiet` leaves nothing but the result."""

import json
from pathlib import Path

import pytest
import typer.main

from solodg import cli

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "disc.png"
FAST = ["--backbone", "small_cnn", "--steps", "2", "--batch-size", "4", "--context-images", "1",
        "--algorithm", "solo", "--accelerator", "cpu"]  # fmt: skip
PLAN = ROOT / "configs" / "quick" / "ablation.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quiet")


@pytest.fixture
def run(folder: Path, solodg) -> Path:
    """A run that was trained with `--quiet`."""
    if not (folder / "run").is_dir():
        code, out, err = solodg(
            "train", "toy", "--target", "sky", *FAST, "--quiet", "--output", folder / "run"
        )
        assert (code, err) == (0, "")
        assert [line.split(":")[0] for line in out.splitlines()] == [
            "Selected step 2", "Model", "Model card"
        ]  # fmt: skip
    return folder / "run"


def test_every_command_can_be_quiet() -> None:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    without = [
        name for name, command in commands.items()
        if not any("--quiet" in parameter.opts for parameter in command.params)
    ]  # fmt: skip
    assert without == []


@pytest.mark.parametrize(
    ("command", "result"),
    [
        (["evaluate", "RUN"], "sky"),
        (["predict", "RUN", PICTURE], "disc.png"),
        (["explain", "RUN", PICTURE, "--output", "OUT"], "Figure: "),
        (["report", "RUN", "--images", "2", "--output", "OUT.html"], "Report: "),
        (["study", "RUN", "--images", "4", "--figure", "OUT.png"], "Picture: "),
        (["export", "RUN", "--onnx", "OUT.onnx"], "Wrote "),
        (["bench", PLAN, "--table-only", "--output", "OUT-bench"], "Single-sample, whole"),
        (["datasets", "toy"], "ring"),
        (["cache", "--cache-dir", "OUT-cache"], "features: 0 files"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_quiet_command_says_its_result_and_nothing_else(
    solodg, run: Path, tmp_path: Path, command: list, result: str
) -> None:
    words = [str(w).replace("OUT", str(tmp_path / "out")) for w in command]
    code, out, err = solodg(*(str(run) if w == "RUN" else w for w in words), "--quiet")
    assert (code, err) == (0, "")
    assert result in out
    assert not any(word in out for word in ("Next:", " 0 of ", "done in"))


@pytest.mark.parametrize(
    "command",
    [["evaluate", "RUN"], ["predict", "RUN", PICTURE], ["datasets", "toy"], ["datasets"]],
    ids=lambda command: " ".join(map(str, command[:1])) + str(len(command)),
)
def test_stdout_of_json_is_json_and_progress_is_elsewhere(solodg, run: Path, command) -> None:
    words = [run if word == "RUN" else word for word in command]
    code, out, err = solodg(*words, "--json")
    assert code == 0
    texts = [out] if command[0] == "datasets" else out.splitlines()
    assert all(json.loads(text) for text in texts)
    assert ("0 of" in err) == (command[0] != "datasets")
    assert solodg(*words, "--json", "--quiet")[0] == 0


def test_a_mistake_is_said_even_quietly(solodg, tmp_path: Path) -> None:
    code, out, err = solodg("evaluate", tmp_path / "nothing", "--quiet")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
