"""What every algorithm promises of a whole run: stopped and resumed, and in two processes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from solodg.algorithms import ALGORITHMS
from solodg.progress import Advance, NoProgress
from solodg.runs import train as run
from solodg.runs.config import Machine, RunConfig
from solodg.runs.train import train_run
from solodg.storage import read_lines

CPU = Machine(accelerator="cpu")
TRAINED = [name for name, kind in ALGORITHMS.items() if not kind.is_closed_form({})]


class Stopped(Exception):
    """As if the power went."""


class StopsAt(NoProgress):
    """Ends a run in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    @contextmanager
    def bar(self, title: str, total: int, done: int = 0) -> Iterator[Advance]:
        def advance(count: int, note: str = "") -> None:
            nonlocal done
            done += count
            if title == "Training" and done >= self.step:
                raise Stopped

        yield advance


TRICKS = {"weight_average": 0.9, "decay": "cosine", "label_smoothing": 0.1}
LINEAR = {"linear_steps": 3, "decay": "cosine"}  # the run is stopped in the middle of them


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in TRAINED), ("erm", TRICKS), ("erm", LINEAR)]
)
def test_a_stopped_run_resumes_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options
) -> None:
    config = RunConfig(
        **options,
        dataset="toy",
        targets=("sky",),
        backbone="small_cnn",
        algorithm=name,
        steps=6,
        validate_every=2,
        batch_size=8,
        context_images=2,
        centre_images=4,
        train_images=10,
    )
    ends = []  # the last weights, which need not be the selected ones

    def fit(fabric, state, *rest):
        yield from real_fit(fabric, state, *rest)
        ends.append({key: value.clone() for key, value in state.algorithm.state_dict().items()})

    real_fit = run.fit
    monkeypatch.setattr(run, "fit", fit)
    whole = train_run(config, CPU, tmp_path / "whole")
    with pytest.raises(Stopped):
        train_run(config, CPU, tmp_path / "broken", progress=StopsAt(3))
    broken = train_run(config, CPU, tmp_path / "broken", resume=True)
    saved = [load_file(folder / "model.safetensors") for folder in (whole, broken)]
    for first, second in (ends, saved):
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)
    assert read_lines(whole / "metrics.jsonl") == read_lines(broken / "metrics.jsonl")


SCRIPT = """
import hashlib, json, os, sys
from pathlib import Path
import solodg.runs.begin as beginning
import solodg.runs.train as run
from solodg.algorithms import ALGORITHMS
from solodg.runs.config import Machine, RunConfig

written, real_open, real_fit = [], Path.open, run.fit

def watched_open(path, mode="r", *rest, **options):
    if any(letter in mode for letter in "wa+x"):
        written.append(path.name)
    return real_open(path, mode, *rest, **options)

def fit(fabric, state, *rest):
    algorithm = state.algorithm
    before = {n: p.detach().clone() for n, p in algorithm.named_parameters()}
    yield from real_fit(fabric, state, *rest)
    content = b"".join(p.detach().numpy().tobytes() for p in algorithm.parameters())
    moved = any(not p.equal(before[n]) for n, p in algorithm.named_parameters())
    report = {"name": name, "rank": fabric.global_rank, "world": fabric.world_size,
              "moved": moved, "weights": hashlib.sha256(content).hexdigest(),
              "written": len(written)}
    own = Path(sys.argv[1]) / f"{name}-{fabric.global_rank}.json"  # a shared pipe tears lines
    with real_open(own, "w") as file:
        file.write(json.dumps(report))

run.fit, Path.open = fit, watched_open
for name, kind in ALGORITHMS.items():
    if kind.is_closed_form({}):
        continue
    config = RunConfig(dataset="toy", targets=("sky",), backbone="small_cnn", algorithm=name,
                       steps=2, batch_size=8, context_images=2, centre_images=4,
                       train_images=10, devices="2")
    run.train_run(config, Machine(accelerator="cpu", strategy="ddp"), Path(sys.argv[1]) / name)

def broken(*arguments):
    raise ZeroDivisionError("as if")

beginning.claim = broken  # which the first process alone calls
try:
    run.train_run(config, Machine(accelerator="cpu", strategy="ddp"), Path(sys.argv[1]) / "broken")
except Exception as error:
    with real_open(Path(sys.argv[1]) / f"failed-{os.environ['RANK']}", "w") as file:
        file.write(f"{type(error).__name__}: {error}")
"""


def test_two_processes_share_weights_and_failures_and_only_the_first_writes(tmp_path: Path) -> None:
    """Real processes, every algorithm in turn."""
    script = tmp_path / "all.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [sys.executable, *launcher, script, tmp_path / "runs"],
        capture_output=True, text=True, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    reports = [json.loads(file.read_text()) for file in (tmp_path / "runs").glob("*.json")]
    for name in TRAINED:
        own = [report for report in reports if report["name"] == name]
        assert sorted(report["rank"] for report in own) == [0, 1], name
        assert all(report["world"] == 2 and report["moved"] for report in own), name
        assert len({report["weights"] for report in own}) == 1, name
        steps = [line["step"] for line in read_lines(tmp_path / "runs" / name / "metrics.jsonl")]
        assert steps == sorted(steps)
        assert steps.count(2) == 2  # one line of losses, one of validation
    writers = {report["rank"] for report in reports if report["written"]}
    assert writers == {0}
    failures = [(tmp_path / "runs" / f"failed-{rank}").read_text() for rank in (0, 1)]
    assert failures == ["ZeroDivisionError: as if", "UserError: ZeroDivisionError: as if"]
    assert not (tmp_path / "runs" / "broken").exists()
