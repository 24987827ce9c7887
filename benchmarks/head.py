"""The head alone: our training step and inference against the plain form, and how both grow.

`python -m benchmarks.head` prints the tables. Peak memory is that of a process of its own.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.plain import PlainSolo
from benchmarks.timing import alternate, milliseconds, ratio, table
from solodg.algorithms.solo import Solo
from solodg.models.allocator import keep_freed_memory
from solodg.models.extractor import ReadyFeatures
from solodg.types import Batch, Episode

QUERIES, SAMPLES, CONTEXT, STYLE = 128, 10, 4, 1024
HIDDEN = 256  # the default width, for growth and memory; the bars use a width of D
KINDS: dict[str, type[Solo]] = {"ours": Solo, "plain": PlainSolo}
GROWTH = [(dim, classes) for dim in (512, 2048) for classes in (7, 65, 345, 1000)]
_MEMORY_GB = 15.0  # the plain form is not measured beyond it


def build(kind: str, dim: int, classes: int, hidden: int | None = None) -> Solo:
    """Builds a head on ready features: "ours", or the plain form of the same method."""
    torch.manual_seed(0)
    return KINDS[kind](
        ReadyFeatures(dim, STYLE),
        num_classes=classes,
        hidden=hidden or dim,
        turns="one",
        source_samples=SAMPLES,
        posterior_samples=SAMPLES,
        prior_samples=SAMPLES,
    )


def episode(dim: int, classes: int) -> Episode:
    """Returns an episode of random features: context of two domains, queries of the second."""
    torch.manual_seed(1)

    def batch(y: torch.Tensor, domain: int) -> Batch:
        x = torch.randn(len(y), dim + STYLE, requires_grad=True)  # as a backbone would need
        return Batch(x, y, torch.full_like(y, domain))

    context = torch.arange(classes).repeat(CONTEXT)
    queries = torch.arange(QUERIES) % classes
    return Episode(batch(context, 0), batch(torch.cat([context, queries]), 1), len(context))


def training_step(
    kind: str, dim: int, classes: int, hidden: int | None = None
) -> Callable[[], object]:
    """Returns a function that computes the loss of one episode and its gradients."""
    head, shown = build(kind, dim, classes, hidden).train(), episode(dim, classes)

    def step() -> None:
        head.zero_grad(set_to_none=True)
        head.losses(shown)["loss"].backward()

    return step


def inference(
    kind: str, dim: int, classes: int, batch: int, hidden: int | None = None
) -> Callable[[], object]:
    """Returns a function that predicts one batch of features."""
    head, shown = build(kind, dim, classes, hidden).eval(), episode(dim, classes)
    x = shown.target.x[-QUERIES:].detach()[:batch]
    with torch.inference_mode():
        head.finalize([shown.merged])

    def predict() -> None:
        with torch.inference_mode():
            head(x)

    return predict


def plain_gigabytes(dim: int, classes: int) -> float:
    """Returns the memory of a plain training step: (B, L, C, .) layers, (B, M, C, D) weights."""
    rows = QUERIES * SAMPLES * classes * 4 / 1024**3
    return rows * dim * 14


def peak_megabytes(kind: str, dim: int, classes: int) -> float:
    """Returns the peak memory that one training step adds to a process of its own."""
    command = [sys.executable, "-m", "benchmarks.head", "--memory", kind, str(dim), str(classes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout))


def _measure_memory(kind: str, dim: int, classes: int) -> None:
    step = training_step(kind, dim, classes, HIDDEN)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak of starting up
    step()
    sys.stdout.write(json.dumps((_status("VmHWM") - before) / 1024))


def _status(name: str) -> int:
    """A line of this process's status, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def main_table() -> str:
    """Measures the sizes that performance goals are set for: 128 queries, D 512, 10 samples."""
    rows = []
    for classes in (7, 65):
        steps = alternate({k: training_step(k, 512, classes) for k in KINDS}, rounds=9)
        rows.append([f"training step, {classes} classes", *_cells(steps)])
    for batch in (1, 64):
        runs = alternate({k: inference(k, 512, 7, batch) for k in KINDS}, rounds=15)
        rows.append([f"inference, batch {batch}, 7 classes", *_cells(runs)])
    runs = alternate({k: inference(k, 512, 65, 64) for k in KINDS}, rounds=9)
    rows.append(["inference, batch 64, 65 classes", *_cells(runs)])
    peak = {k: peak_megabytes(k, 2048, 65) for k in KINDS}
    cells = [f"{peak[k]:.0f} MB" for k in KINDS] + [f"{peak['plain'] / peak['ours']:.1f}"]
    rows.append([f"peak memory of a step, 65 classes, D 2048, hidden {HIDDEN}", *cells])
    return table(
        "The head alone (128 queries, D 512, hidden 512, L = M = N = 10)",
        ["", "ours", "plain form", "plain / ours"],
        rows,
    )


def growth_table() -> str:
    """Measures how time and memory grow with dimension and number of classes."""
    rows = []
    for dim, classes in GROWTH:
        kinds = [k for k in KINDS if k == "ours" or plain_gigabytes(dim, classes) < _MEMORY_GB]
        slow = dim * classes > 50_000  # seconds per step: one round has to do
        steps = alternate(
            {k: training_step(k, dim, classes, HIDDEN) for k in kinds},
            rounds=1 if slow else 5,
            warmup=0 if slow else 1,
        )
        runs = alternate(
            {k: inference(k, dim, classes, 64, HIDDEN) for k in kinds},
            rounds=1 if slow else 3,
            warmup=0 if slow else 1,
        )
        peak = {k: f"{peak_megabytes(k, dim, classes):.0f}" for k in kinds}
        row = [str(dim), str(classes)]
        for measured in (steps, runs):
            row += [f"{1000 * measured['ours'].median:.0f}"]
            fits = "plain" in measured
            row += [f"{1000 * measured['plain'].median:.0f}" if fits else "does not fit"]
        row += [peak["ours"], peak.get("plain", "does not fit")]
        rows.append(row)
    header = ["D", "classes", "step, ours (ms)", "plain", "inference of 64, ours (ms)", "plain",
              "peak memory, ours (MB)", "plain"]  # fmt: skip
    return table(f"Growth (128 queries, hidden {HIDDEN}, L = M = N = 10)", header, rows)


def _cells(measured: dict) -> list[str]:
    return [*(milliseconds(measured[k]) for k in KINDS), ratio(measured["plain"], measured["ours"])]


def main() -> None:
    """Prints both tables, or with --memory the peak memory of one step."""
    keep_freed_memory()  # as the command line does, for all that is compared
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", nargs=3, metavar=("KIND", "DIM", "CLASSES"))
    arguments = parser.parse_args()
    if arguments.memory:
        kind, dim, classes = arguments.memory
        _measure_memory(kind, int(dim), int(classes))
        return
    for part in (main_table, growth_table):
        sys.stdout.write(part() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
