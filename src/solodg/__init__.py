"""SoloDG: image classifiers, trained on several domains, that adapt to each single test image."""

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from solodg.predict.onnx import OnnxPredictor
    from solodg.predict.torch import Predictor
    from solodg.sklearn import SoloClassifier

__version__ = version("solodg")
__all__ = ["SoloClassifier", "__version__", "load"]


def load(path: str | Path) -> "Predictor | OnnxPredictor":
    """Loads the model of a run folder or of an exported file: `solodg.load(run).predict(image)`."""
    from solodg.predict.onnx import OnnxPredictor, is_onnx

    if is_onnx(path):
        return OnnxPredictor.load(path)
    from solodg.predict.torch import (
        Predictor,
    )  # imports torch, which an exported file does not need

    return Predictor.load(path)


def __getattr__(name: str) -> Any:
    """Imports `SoloClassifier` on first use, since it imports torch."""
    if name == "SoloClassifier":
        from solodg.sklearn import SoloClassifier

        return SoloClassifier
    raise AttributeError(f"module 'solodg' has no attribute {name!r}")
