"""The metrics of a training: lines of `metrics.jsonl`, and curves for TensorBoard if installed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_fabric import Fabric

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
            append_line(folder / METRICS, line)
            draw(line)

        yield log


def drop_lines_after(folder: Path, step: int) -> None:
    """Removes the lines of later steps, which a resumed training will write again."""
    lines = read_lines(folder / METRICS)
    if lines:
        write_lines(folder / METRICS, [line for line in lines if line["step"] <= step])


def validation_curve(folder: Path) -> dict[int, float]:
    """Returns the validation accuracy by step."""
    lines = read_lines(folder / METRICS)
    return {line["step"]: line["val_accuracy"] for line in lines if "val_accuracy" in line}


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
