"""What the README and the docs promise is run, or at least exists."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from solodg.adapters import ADAPTERS
from solodg.algorithms import ALGORITHMS
from solodg.data import DATASETS
from solodg.serving.settings import ServerSettings

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(text: str = README) -> list[list[str]]:
    lines = [line for block in blocks("bash", text) for line in block.splitlines() if line.strip()]
    return [shlex.split(line, comments=True) for line in lines]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the docs and plans alone, and `solodg` on the path."""
    for name in ("docs", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    binaries = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{binaries}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_the_commands_of_the_readme_run_in_order(workplace: Path) -> None:
    runnable = [c for c in commands() if c[0] == "solodg" and "DATA" not in c]
    assert len(runnable) >= 3
    for command in runnable:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, (command, done.stderr)
    for code in blocks("python"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("disc")
        assert "(3, 128)" in done.stdout


def test_every_other_command_of_the_readme_is_one_that_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands():
        if command[0] == "make":
            assert command[1] in targets
        elif command[0] == "pip":
            assert (ROOT / "constraints.txt").is_file()
        else:
            assert command[0] == "solodg"
            help_text = subprocess.run(
                [sys.executable, "-m", "solodg", command[1], "--help"],
                capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "200"},
            ).stdout  # fmt: skip
            for flag in (word for word in command if word.startswith("--")):
                assert flag in help_text


def test_the_options_and_limits_of_the_use_page_are_those_of_the_commands() -> None:
    text = (ROOT / "docs" / "use.md").read_text()
    named = {c[1]: {w for w in c if w.startswith("--")} for c in commands(text) if c[0] == "solodg"}
    named["serve"] |= set(re.findall(r"^\| `(--[a-z-]+)", text, re.MULTILINE))
    assert len(named["serve"]) >= 8
    for command, flags in named.items():
        help_text = subprocess.run(
            [sys.executable, "-m", "solodg", command, "--help"],
            capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "200"},
        ).stdout  # fmt: skip
        assert all(flag in help_text for flag in flags), command
    settings = ServerSettings()
    assert f"| {settings.max_bytes // 1024**2} megabytes" in text
    assert f"| {settings.max_images} a request" in text
    assert f"| {settings.max_pixels // 10**6} million" in text
    assert f"| {settings.queue} images" in text
    assert f"| {settings.seconds:g} seconds" in text
    assert f"| {settings.max_batch} images" in text


@pytest.mark.parametrize("registry", [ALGORITHMS, ADAPTERS, DATASETS])
def test_every_registry_entry_has_a_row(registry: dict) -> None:
    for name in registry:
        assert f"| `{name}` |" in README


def test_linked_files_exist() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_code_named_in_the_method_page_exists() -> None:
    text = (ROOT / "docs" / "method.md").read_text()
    modules = {
        "mean_hidden": "solodg.algorithms.solo.mean_hidden",
        "solo": "solodg.algorithms.solo.method",
        "solo_plus": "solodg.algorithms.solo_plus.method",
        "frame": "solodg.algorithms.solo_plus.pose",
        "image_norm": "solodg.models.image_norm",
        "gaussian": "solodg.algorithms.solo.gaussian",
        "episodes": "solodg.data.episodes",
        "centres": "solodg.algorithms.centres",
    }
    named = re.findall(rf"`({'|'.join(modules)})\.(\w+)(?:\.(\w+))?`", text)
    named += [("solo", "Solo", method) for method in re.findall(r"`Solo\.(_\w+)`", text)]
    assert len(named) > 10
    for module, name, attribute in named:
        thing = getattr(importlib.import_module(modules[module]), name)
        assert not attribute or hasattr(thing, attribute), (module, name, attribute)


def test_the_ci_calls_the_test_command_of_the_readme() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()
    assert ["make", "test"] in commands()


def test_the_figures_of_the_readme_are_those_of_committed_records() -> None:
    """The demo's rows in the README, made again from the records: means and 95% intervals."""
    lines = (ROOT / "docs" / "results" / "demo.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for algorithm, name in (
        ("erm", "ERM"),
        ("solo", "single-sample (`solo`)"),
        ("solo_plus", "single-sample (`solo_plus`)"),
    ):
        cells = []
        for role, domains in (("target", ["0"]), ("target", ["90"]), ("target", ["0", "90"]),
                              ("in-distribution", ["15", "30", "45", "60", "75"])):  # fmt: skip
            accuracy = np.array([
                [r["metrics"]["accuracy"] for r in records
                 if (r["algorithm"], r["role"], r["domain"]) == (algorithm, role, d)
                 and r["seed"] == seed]
                for d in domains for seed in (0, 1, 2)
            ]).reshape(len(domains), 3)  # fmt: skip
            per_seed = 100 * accuracy.mean(0)
            interval = stats.t.ppf(0.975, 2) * per_seed.std(ddof=1) / np.sqrt(3)
            cells.append(f"{per_seed.mean():.1f} ± {interval:.1f}")
        assert f"| {name} | {' | '.join(cells)} |" in README
