"""The metrics of a training: lines of `metrics.jsonl`, and the loggers that follow them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_fabric import Fabric
from lightning_fabric.loggers.logger import Logger

from solodg.errors import UserError
from solodg.progress import Say
from solodg.runs.loggers import CSV, MLFLOW, WANDB, open_loggers
from solodg.storage import append_line, read_lines, write_lines

METRICS = "metrics.jsonl"
Log = Callable[[dict[str, float]], None]  # takes a line: "step", and values by name


@contextmanager
def metrics_log(
    fabric: Fabric,
    folder: Path,
    loggers: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    say: Say = lambda text: None,
) -> Iterator[Log]:
    """Opens the log of a training in `folder`; only the first process writes to it.

    `loggers` names those that follow it; None: TensorBoard, if it is installed. They get the
    `settings` of the run. One that fails during the training is left out, which `say` is told.
    """
    if not fabric.is_global_zero:
        yield lambda line: None
        return
    opened = open_loggers(loggers, folder)
    status = "failed"
    try:
        _begin(opened, folder, dict(settings or {}))

        def log(line: dict[str, float]) -> None:
            # JSON has no NaN, which the losses of a diverging training may be.
            finite = {name: v if math.isfinite(v) else None for name, v in line.items()}
            append_line(folder / METRICS, finite)
            for name in list(opened):
                try:
                    _log_line(opened[name], line)
                except Exception as error:  # each has its own; training is worth more than a curve
                    del opened[name]
                    say(f"The logger {name} failed and is left out: {error}")

        yield log
        status = "success"
    finally:
        for logger in opened.values():
            logger.finalize(status)


def _begin(opened: Mapping[str, Logger], folder: Path, settings: dict[str, Any]) -> None:
    """Gives loggers the settings; a CSV file also gets the lines of before, which it replaces."""
    for name in (WANDB, MLFLOW):
        if name in opened:
            try:
                opened[name].log_hyperparams(settings)
            except UserError:
                raise
            except Exception as error:  # of its package, or of the network
                raise UserError(f"the logger {name} cannot begin: {error}") from error
    if CSV in opened:
        for line in read_metrics(folder):
            _log_line(opened[CSV], {k: math.nan if v is None else v for k, v in line.items()})


def _log_line(logger: Logger, line: Mapping[str, float]) -> None:
    values = {name: value for name, value in line.items() if name != "step"}
    logger.log_metrics(values, step=int(line["step"]))


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
