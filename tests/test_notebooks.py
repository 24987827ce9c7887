"""The notebooks of the examples: executed, and the outputs in them are those of now."""

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))


def texts(notebook: nbformat.NotebookNode) -> list[str]:
    """The printed outputs, without their numbers, which may differ between processors."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert all(output.get("name") != "stderr" for output in outputs)
    return [re.sub(r"\d+(\.\d*)?", "#", o.text) for o in outputs if o.output_type == "stream"]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelManager]:
    """One process for all notebooks, which imports PyTorch once."""
    manager, client = start_new_kernel(cwd=str(tmp_path_factory.mktemp("notebooks")))
    client.stop_channels()
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs_and_its_outputs_are_those_of_now(
    path: Path, kernel: KernelManager
) -> None:
    committed = nbformat.read(path, as_version=4)
    nbformat.validate(committed)
    assert path.stat().st_size < 60_000
    fresh = nbformat.from_dict(committed)
    fresh.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))  # no name of another notebook
    NotebookClient(fresh, timeout=240, km=kernel).execute()
    assert texts(fresh) == texts(committed)
    outputs = [output for cell in fresh.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_both_notebooks_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["features_sklearn", "first_steps"]
