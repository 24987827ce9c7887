"""The model of an exported file, by ONNX Runtime: needs NumPy and Pillow, and no torch."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from solodg.errors import UserError, missing_extra
from solodg.pixels import Pixels
from solodg.predict.base import ImagePredictor
from solodg.runs.model_info import ModelInfo
from solodg.runs.predictions import Predictions

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

SUFFIX = ".onnx"
INPUT = "pixels"  # (B, channels, size, size) uint8
OUTPUTS = ("logits", "probabilities", "before")  # (B, C) each; the last for methods that adapt
METADATA = "solodg"  # the key of the JSON that describes the model


class OnnxPredictor(ImagePredictor):
    """A model that `solodg export` wrote to a file."""

    def __init__(self, session: "InferenceSession", info: ModelInfo) -> None:
        super().__init__(info)
        self._session = session  # its `run` may be called by several threads at once
        self._outputs = [output.name for output in session.get_outputs()][1:]

    @classmethod
    def load(cls, path: str | Path) -> "OnnxPredictor":
        """Loads a file of `solodg export`."""
        session = open_session(_content(Path(path)), str(path))
        return cls(session, _info(session, str(path)))

    def compute(self, pixels: Pixels) -> Predictions:
        """Runs (B, channels, H, W) pixels through the graph, in one forward pass."""
        found: list[Any] = self._session.run(self._outputs, {INPUT: pixels})
        return Predictions(*(array.astype("float64") for array in found))  # (B, C) each


def is_onnx(path: str | Path) -> bool:
    """Returns whether a path names an ONNX file, by its suffix."""
    return Path(path).suffix.lower() == SUFFIX


def open_session(content: bytes, name: str) -> "InferenceSession":
    """Opens an ONNX model on the CPU; `name` is used in errors.

    It never uses another device, so that a prediction does not depend on the machine's hardware.
    """
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise missing_extra("onnx", "ONNX Runtime", error) from error
    try:
        options = onnxruntime.SessionOptions()
        # Idle workers would otherwise spin, on cores that the decoding of images needs.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises its own, undocumented types
        raise UserError(f"{name} is not a readable ONNX file ({error}).") from error


def _content(path: Path) -> bytes:
    if not path.is_file():
        raise UserError(f"no file at {path}. Write one with `solodg export RUN --onnx {path}`.")
    return path.read_bytes()


def _info(session: "InferenceSession", name: str) -> ModelInfo:
    metadata = cast(dict[str, str], session.get_modelmeta().custom_metadata_map)
    try:
        return ModelInfo.model_validate(json.loads(metadata[METADATA])["model"])
    except (KeyError, ValueError, ValidationError) as error:
        raise UserError(
            f"{name} holds no description of its model: only files of `solodg export` can be used."
        ) from error
