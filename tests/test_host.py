"""The library in another program: its random generators, figures and memory stay as they are."""

import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import sklearn  # noqa: F401  (sets variables of the environment when it is imported)
import torch

import solodg
from solodg.bench.duration import estimate_training_seconds
from solodg.bench.plan import Plan
from solodg.bench.records import Results
from solodg.explain.explanation import explain
from solodg.explain.figure import explain_figure
from solodg.explain.projection import stored_projection
from solodg.figures.style import png
from solodg.predict.torch import Predictor
from solodg.progress import NoProgress
from solodg.runs.config import Machine, RunConfig
from solodg.runs.evaluate import evaluate_run
from solodg.runs.train import train_run

ROOT = Path(__file__).parents[1]
CPU = Machine(accelerator="cpu")


def host() -> tuple[object, ...]:
    """What the rest of a program shares with the library."""
    return (
        torch.get_rng_state().tolist(),
        repr(np.random.get_state()),  # noqa: NPY002  (the generator of other programs)
        random.getstate(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        dict(mpl.rcParams),
        dict(os.environ),
    )


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool]:
    """For each piece of work in turn: whether it left its host as it was."""
    run = tmp_path_factory.mktemp("host") / "run"
    fast = {"steps": 2, "batch_size": 4, "context_images": 1, "centre_images": 2}
    config = RunConfig(dataset="toy", targets=("sky",), backbone="small_cnn", **fast)
    plan = Plan(name="p", title="t", dataset="toy", targets=["sky"], seeds=[0],
                run={"backbone": "small_cnn", **fast}, rows=[{"name": "a"}])  # fmt: skip
    X, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    picture = ROOT / "docs" / "disc.png"

    def draw() -> None:
        model = Predictor.load(run)
        projection = stored_projection(run, model)
        png(explain_figure(explain(model, projection, picture)))

    work: dict[str, Callable[[], object]] = {
        "train": lambda: train_run(config, CPU, run),
        "load": lambda: solodg.load(run),
        "predict": lambda: solodg.load(run).predict(picture),
        "evaluate": lambda: evaluate_run(run),
        "evaluate an adapter": lambda: evaluate_run(run, adapter="tent"),
        "explain": draw,
        "estimate": lambda: estimate_training_seconds(plan.cells(), CPU, Results([]), NoProgress()),
        "SoloClassifier": lambda: (
            solodg.SoloClassifier(steps=2)
            .fit(X, y, domains=y // 2 + np.arange(40) // 20)
            .predict(X)
        ),
    }
    found = {}
    for name, do in work.items():
        torch.manual_seed(7)
        random.seed(7)
        before = host()
        do()
        found[name] = host() == before
    return found


def test_nothing_touches_generators_figures_or_settings_of_its_host(unchanged) -> None:
    assert [name for name, same in unchanged.items() if not same] == []


def test_commands_that_end_set_the_allocator_and_nothing_else_does(monkeypatch, solodg) -> None:
    called: list[str] = []
    monkeypatch.setattr("solodg.cli.keep_freed_memory", lambda: called.append("yes"))
    assert solodg("serve", "no-such-run")[0] == 2
    assert called == []
    assert solodg("evaluate", "no-such-run")[0] == 2
    assert called == ["yes"]
    source = ROOT / "src" / "solodg"
    users = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(r"keep_freed_memory\(\)$", path.read_text(), re.MULTILINE)
    }
    assert users == {"cli/__init__.py", "bench/ray.py"}  # the latter in a worker of its own
