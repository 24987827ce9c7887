"""The notebooks of the examples: executed, and the outputs in them are those of now."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))


def texts(notebook: nbformat.NotebookNode) -> list[str]:
    """The printed outputs, without their numbers, which may differ between processors."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert all(output.get("name") != "stderr" for output in outputs)
    return [re.sub(r"\d+(\.\d*)?", "#", o.text) for o in outputs if o.output_type == "stream"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs_and_its_outputs_are_those_of_now(path: Path, tmp_path: Path) -> None:
    committed = nbformat.read(path, as_version=4)
    nbformat.validate(committed)
    assert path.stat().st_size < 60_000
    fresh = nbformat.from_dict(committed)
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(fresh, timeout=240, kernel_name="python3", resources=folder).execute()
    assert texts(fresh) == texts(committed)
    outputs = [output for cell in fresh.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_both_notebooks_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["features_sklearn", "first_steps"]
