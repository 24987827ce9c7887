"""An exported model: ONNX Runtime, NumPy and Pillow, and no torch."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from solodg.errors import UserError, missing_extra
from solodg.pixels import Pixels
from solodg.predict.base import ImagePredictor, ProbabilityRows
from solodg.runs.model_info import ModelInfo

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

SUFFIX = ".onnx"
INPUT = "pixels"  # (B, channels, size, size) uint8
OUTPUTS = ("logits", "probabilities", "before")  # the last for methods that adapt
METADATA = "solodg"  # the key under which a file says what it is, as JSON


class OnnxPredictor(ImagePredictor):
    """What `solodg export` wrote, ready to predict."""

    def __init__(self, session: "InferenceSession", info: ModelInfo) -> None:
        super().__init__(info)
        self._session = session  # its `run` may be called by several threads at once
        self._outputs = [output.name for output in session.get_outputs()][1:]

    @classmethod
    def load(cls, path: str | Path) -> "OnnxPredictor":
        session = open_session(_content(Path(path)), str(path))
        return cls(session, _info(session, str(path)))

    def compute(self, pixels: Pixels) -> ProbabilityRows:
        found: list[Any] = self._session.run(self._outputs, {INPUT: pixels})
        probabilities, *before = (rows.astype("float64") for rows in found)
        return ProbabilityRows(probabilities, before[0] if before else None)


def is_onnx(path: str | Path) -> bool:
    return Path(path).suffix.lower() == SUFFIX


def open_session(content: bytes, name: str) -> "InferenceSession":
    """On the CPU, wherever it is: an answer should not depend on what else a machine has."""
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise missing_extra("onnx", "ONNX Runtime", error) from error
    try:
        options = onnxruntime.SessionOptions()
        # Idle workers that spin would keep the cores from who decodes the next image.
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
            f"{name} does not say what it is: only files of `solodg export` can be used."
        ) from error
