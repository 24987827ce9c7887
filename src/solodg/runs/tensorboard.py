"""Curves for TensorBoard where it is installed; metrics.jsonl has them everywhere."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lightning_fabric import Fabric


def tensorboard(fabric: Fabric, folder: Path) -> Any:
    """Curves for TensorBoard where it is installed; otherwise metrics.jsonl alone."""
    if not fabric.is_global_zero:
        return nullcontext(lambda line: None)
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return nullcontext(lambda line: None)
    return _TensorBoard(SummaryWriter(str(folder / "tensorboard")))


class _TensorBoard:
    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def __enter__(self) -> Callable[[dict[str, float]], None]:
        return self._write

    def __exit__(self, *_: object) -> None:
        self.writer.close()

    def _write(self, line: dict[str, float]) -> None:
        for name, value in line.items():
            if name != "step":
                self.writer.add_scalar(name, value, line["step"])
