"""SoloDG: train on several domains, then let every single test image write its own classifier."""

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from solodg.estimator import SoloClassifier
    from solodg.onnx_model import OnnxPredictor
    from solodg.predictor import Predictor

__version__ = version("solodg")
__all__ = ["SoloClassifier", "__version__", "load"]


def load(path: str | Path) -> "Predictor | OnnxPredictor":
    """The model of a run folder or of an exported file: `solodg.load(run).predict(image)`."""
    from solodg.onnx_model import OnnxPredictor, is_onnx

    if is_onnx(path):
        return OnnxPredictor.load(path)
    from solodg.predictor import Predictor  # imports torch: only when it is needed

    return Predictor.load(path)


def __getattr__(name: str) -> Any:
    """Heavy imports wait until they are needed."""
    if name == "SoloClassifier":
        from solodg.estimator import SoloClassifier

        return SoloClassifier
    raise AttributeError(f"module 'solodg' has no attribute {name!r}")
