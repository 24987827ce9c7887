"""The model of a command, on the device and with the precision that its options name."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from solodg.predict.onnx import OnnxPredictor
    from solodg.predict.torch import Predictor
    from solodg.progress import Progress


def load_run(
    run: Path, accelerator: str | None, precision: str | None, progress: "Progress"
) -> "Predictor":
    """Loads the model of a run folder; without options it is on the CPU, at full precision."""
    with progress.stage("Loading PyTorch"), _without_garbage_collection():
        from solodg.predict.torch import Predictor, check_precision

    if precision is not None:
        check_precision(precision)
    device: torch.device | str = "cpu"
    if accelerator is not None:
        from solodg.runs.devices import single_device

        device = single_device(accelerator)
    with progress.stage("Loading the model"), _without_garbage_collection():  # imports timm
        return Predictor.load(run).to(device, precision)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Imports large packages faster: what they create stays, and is not searched for garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def load_model(
    path: Path, accelerator: str | None, precision: str | None, progress: "Progress"
) -> "Predictor | OnnxPredictor":
    """Loads a run folder or an exported file; the latter is always computed on the CPU."""
    from solodg.predict.onnx import OnnxPredictor, is_onnx

    if not is_onnx(path):
        return load_run(path, accelerator, precision, progress)
    device = "cpu" if accelerator in (None, "auto") else accelerator
    with progress.stage("Loading the model"):
        return OnnxPredictor.load(path).to(device, precision)
