"""The model of a command, on the device and with the precision that its options name."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from solodg.predict.onnx import OnnxPredictor
    from solodg.predict.torch import Predictor


def load_run(run: Path, accelerator: str | None, precision: str | None) -> "Predictor":
    """Loads the model of a run folder; without options it is on the CPU, at full precision."""
    from solodg.predict.torch import Predictor, check_precision

    if precision is not None:
        check_precision(precision)
    if accelerator is None:
        return Predictor.load(run).to("cpu", precision)
    from solodg.runs.devices import single_device

    device = single_device(accelerator)
    return Predictor.load(run).to(device, precision)


def load_model(
    path: Path, accelerator: str | None, precision: str | None
) -> "Predictor | OnnxPredictor":
    """Loads a run folder or an exported file; the latter is always computed on the CPU."""
    from solodg.predict.onnx import OnnxPredictor, is_onnx

    if not is_onnx(path):
        return load_run(path, accelerator, precision)
    device = "cpu" if accelerator in (None, "auto") else accelerator
    return OnnxPredictor.load(path).to(device, precision)
