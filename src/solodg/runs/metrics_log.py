"""The metrics of a training: lines of `metrics.jsonl`, and curves for TensorBoard if installed."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_fabric import Fabric

from solodg.progress import Say
from solodg.storage import append_line, read_lines, write_lines

METRICS = "metrics.jsonl"
Log = Callable[[dict[str, float]], None]  # takes a line: "step", and values by name


@contextmanager
def metrics_log(fabric: Fabric, folder: Path) -> Iterator[Log]:
    """Opens the log of a training in `folder`; only the first process writes to it."""
    if not fabric.is_global_zero:
        yield lambda line: None
        return
    with _tensorboard(folder / "tensorboard") as draw:

        def log(line: dict[str, float]) -> None:
            # JSON has no NaN, which the losses of a diverging training may be.
            finite = {name: v if math.isfinite(v) else None for name, v in line.items()}
            append_line(folder / METRICS, finite)
            draw(line)

        yield log


def drop_lines_after(folder: Path, step: int, say: Say = lambda text: None) -> None:
    """Removes the lines of later steps, which a resumed training will write again.

    `say` gets how many damaged lines are removed with them.
    """
    lines = read_metrics(folder, say)
    if lines:
        write_lines(folder / METRICS, [line for line in lines if line["step"] <= step])


def read_metrics(folder: Path, say: Say = lambda text: None) -> list[dict[str, Any]]:
    """Reads the lines of a training; `say` gets how many damaged ones were left out."""
    return read_lines(folder / METRICS, say, fits=_is_metrics)


def _is_metrics(line: dict[str, Any]) -> bool:
    """Returns whether a line holds a step and numbers only; None stands for NaN."""
    numbers = (value for name, value in line.items() if name != "step")
    return isinstance(line.get("step"), int) and all(
        isinstance(value, int | float | None) for value in numbers
    )


def validation_curve(folder: Path) -> dict[int, float]:
    """Returns the validation accuracy by step."""
    lines = read_metrics(folder)
    accuracies = {line["step"]: line.get("val_accuracy") for line in lines}
    return {step: value for step, value in accuracies.items() if value is not None}


@contextmanager
def _tensorboard(folder: Path) -> Iterator[Log]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # an optional dependency; metrics.jsonl holds the same values
        yield lambda line: None
        return
    writer = SummaryWriter(str(folder))

    def draw(line: dict[str, float]) -> None:
        for name, value in line.items():
            if name != "step":
                writer.add_scalar(name, value, line["step"])

    try:
        yield draw
    finally:
        writer.close()
