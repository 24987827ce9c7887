"""The model of an exported file, by ONNX Runtime: needs NumPy and Pillow, and no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import TypeAdapter, ValidationError

from solodg.errors import UserError, missing_extra, validation_error
from solodg.pixels import Pixels
from solodg.predict.base import ImagePredictor
from solodg.predict.external_data import has_external_data
from solodg.runs.model_info import MODEL_FORMAT, ModelInfo
from solodg.runs.predictions import Predictions
from solodg.runs.recorded_scores import RecordedScores, Several
from solodg.runs.stored_arguments import current_name
from solodg.storage import damaged, is_sealed, parse_json, read_regular

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

SUFFIX = ".onnx"
INPUT = "pixels"  # (B, channels, size, size) uint8
# (B, C) each, and (B,) the last; `before` of methods that adapt, `novelty` of newer models.
OUTPUTS = ("logits", "probabilities", "before", "novelty")
METADATA = "solodg"  # the key of the JSON that describes the model


class OnnxPredictor(ImagePredictor):
    """A model that `solodg export` wrote to a file."""

    runtime = "ONNX Runtime"

    def __init__(
        self,
        session: "InferenceSession",
        info: ModelInfo,
        scores: Sequence[RecordedScores] = (),
    ) -> None:
        super().__init__(info)
        self._scores = list(scores)
        self._session = session  # its `run` may be called by several threads at once
        self._outputs = [output.name for output in session.get_outputs()][1:]

    @classmethod
    def load(cls, path: str | Path) -> "OnnxPredictor":
        """Loads a file of `solodg export`."""
        content = _content(Path(path))
        has_checksum = is_sealed(content, str(path))
        session = open_session(content, str(path))
        info, scores = _description(session, str(path))
        if info.has_checksum and not has_checksum:
            raise damaged(str(path), "it has no checksum")
        _check_graph(session, info, str(path))
        return cls(session, info, scores)

    def to(self, device: object, precision: str | None = None) -> "OnnxPredictor":
        """Returns this predictor; any device but the CPU, or precision but 32-true, is an error."""
        if str(device) != "cpu":
            raise UserError(
                f"device {str(device)!r}: an exported file is computed on the CPU. Load the folder "
                "of the run instead."
            )
        if precision not in (None, "32-true"):
            raise UserError(
                f"precision {precision!r}: an exported file has the precision 32-true. Load the "
                "folder of the run instead."
            )
        return self

    def recorded_scores(self) -> list[RecordedScores]:
        """Returns the scores that were recorded for the run before its export."""
        return list(self._scores)

    def compute(self, pixels: Pixels) -> Predictions:
        """Runs (B, channels, H, W) pixels through the graph, in one forward pass."""
        values: list[Any] = self._session.run(self._outputs, {INPUT: pixels})
        found = {n: v.astype("float64") for n, v in zip(self._outputs, values, strict=True)}
        for name, array in found.items():
            shape = (len(pixels), len(self.classes))
            if array.shape != (shape[:1] if name == OUTPUTS[-1] else shape):
                raise UserError(
                    f"the exported graph returned {name} of shape {array.shape} for {shape[0]} "
                    f"image(s) and {shape[1]} classes: export it again."
                )
        return Predictions(**found)


def is_onnx(path: str | Path) -> bool:
    """Returns whether a path names an ONNX file, by its suffix."""
    return Path(path).suffix.lower() == SUFFIX


def check_suffix(path: str | Path) -> None:
    """Raises `UserError` if a file to write is not named as an ONNX file."""
    if not is_onnx(path):
        raise UserError(f"{path}: the name of an exported file must end with {SUFFIX}.")


def open_session(content: bytes, name: str) -> "InferenceSession":
    """Opens an ONNX model on the CPU; `name` is used in errors.

    It never uses another device, so that a prediction does not depend on the machine's hardware.
    A model that refers to other files is refused.
    """
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise missing_extra("onnx", "ONNX Runtime", error) from error
    try:
        # ORTM: ONNX Runtime's own format, whose references cannot be checked here.
        external = content[4:8] == b"ORTM" or has_external_data(content)
    except ValueError as error:
        raise UserError(f"{name} is not a readable ONNX file ({error}).") from error
    if external:
        raise UserError(
            f"{name} refers to data in other files: only files of `solodg export` can be used, "
            "which hold everything."
        )
    onnxruntime.disable_telemetry_events()  # images may be of patients: nothing is told of a use
    try:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors; it warns of constants that branches share
        # Idle workers would otherwise spin, on cores that the decoding of images needs.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises its own, undocumented types
        raise UserError(f"{name} is not a readable ONNX file ({error}).") from error


def _content(path: Path) -> bytes:
    if not path.exists():
        raise UserError(f"no file at {path}. Write one with `solodg export RUN --onnx {path}`.")
    return read_regular(path)


def _description(session: "InferenceSession", name: str) -> tuple[ModelInfo, list[RecordedScores]]:
    """Reads the description of the model and its recorded scores; older files hold none."""
    metadata = cast(dict[str, str], session.get_modelmeta().custom_metadata_map)
    known = parse_json(metadata.get(METADATA, "null"), f"the metadata of {name}")
    if not isinstance(known, dict) or "model" not in known:
        raise UserError(
            f"{name} holds no description of its model: only files of `solodg export` can be used."
        )
    try:
        info = ModelInfo.model_validate(known["model"])
        scores = TypeAdapter(Several).validate_python(known.get("scores", []))
    except ValidationError as error:
        raise validation_error(f"the description of the model in {name}", error) from error
    algorithm = current_name(info.algorithm, before_pose=info.format != MODEL_FORMAT)
    return info.model_copy(update={"algorithm": algorithm}), scores


def _check_graph(session: "InferenceSession", info: ModelInfo, name: str) -> None:
    """Raises `UserError` unless inputs and outputs of the graph are those of the description."""
    given = [(node.name, node.type, *node.shape[1:]) for node in session.get_inputs()]
    expected = [(INPUT, "tensor(uint8)", info.channels, info.image_size, info.image_size)]
    outputs = session.get_outputs()
    names = [node.name for node in outputs]
    wanted = [name for name in OUTPUTS if name in (*OUTPUTS[:2], *names)]
    if given != expected or names != wanted:
        raise UserError(f"{name} has not the inputs and outputs of a file of `solodg export`.")
    for node in outputs:
        if node.name == OUTPUTS[-1]:
            continue
        # A size that the graph leaves open is checked with every prediction.
        if isinstance(node.shape[-1], int) and node.shape[-1] != len(info.classes):
            raise UserError(
                f"{name} names {len(info.classes)} classes and has {node.shape[-1]} outputs: "
                "export it again."
            )
