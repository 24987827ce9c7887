"""Figures leave the caller's matplotlib alone, in one thread and in several."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure

from solodg.figures.plots import plan_drawing, plan_figure
from solodg.figures.style import new_figure, png, svg, themed_svg

IMPORTS = """
import importlib, pkgutil, sys
import matplotlib
before = dict(dict.items(matplotlib.rcParams))
import solodg
for module in pkgutil.walk_packages(solodg.__path__, "solodg."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
after = dict(dict.items(matplotlib.rcParams))
changed = [name for name in after if after[name] != before[name]]
assert not changed, changed
assert "solodg.figures.plots" in sys.modules
assert "matplotlib.pyplot" not in sys.modules
"""


def test_importing_solodg_changes_neither_backend_nor_settings_of_matplotlib() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def settings() -> dict[str, object]:
    return dict(dict.items(mpl.rcParams))  # without choosing a backend, as [] would


def drawing(number: int) -> Figure:
    rows = [(f"costs ${i}$ or ${number}$", 50.0 + i, 2.0) for i in range(number + 2)]
    return plan_drawing(f"plan ${number}$", "accuracy", rows)


@pytest.mark.parametrize("write", [png, svg, themed_svg])
def test_writing_a_figure_leaves_the_settings_as_they_were(write, tmp_path: Path) -> None:
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": None, "text.parse_math": True}):
        before = settings()
        write(drawing(1))
        plan_figure("title", "x", [("a", 1.0, 0.0)], tmp_path / "x.png")
        assert settings() == before


def test_settings_are_restored_after_a_failure(tmp_path: Path) -> None:
    before = settings()
    with pytest.raises(ValueError, match="no-such-format"):
        plan_figure("title", "x", [("a", 1.0, 0.0)], tmp_path / "x.no-such-format")
    assert settings() == before


def test_text_is_real_and_takes_any_sign_whatever_the_caller_has_set() -> None:
    with mpl.rc_context({"svg.fonttype": "path", "text.parse_math": True}):
        text = svg(drawing(2)).decode()
    assert "costs $1$ or $2$" in text
    assert "plan $2$" in text


def test_figures_written_by_several_threads_are_those_written_alone() -> None:
    def written(number: int) -> tuple[bytes, bytes, bytes]:
        figure = drawing(number % 4)
        return svg(figure), themed_svg(figure), png(figure)

    alone = [written(number) for number in range(8)]
    before = settings()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(written, range(8))) == alone
    assert settings() == before


def test_a_new_figure_is_unknown_to_pyplot() -> None:
    from matplotlib import pyplot as plt

    open_before = plt.get_fignums()
    new_figure(2, 2)
    drawing(1)
    assert plt.get_fignums() == open_before
