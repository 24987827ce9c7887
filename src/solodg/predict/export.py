"""Exports a trained model to one ONNX file: 8-bit pixels in, logits and probabilities out.

The graph holds scaling, normalisation, backbone, source class centres and the adaptation to each
image, which is a forward pass. Test-time methods that take gradient steps (tent, memo, ttt, shot)
or keep a state between images (t3a) cannot be exported.
"""

import copy
import json
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from solodg.algorithms import Algorithm
from solodg.algorithms.ridge import Ridge
from solodg.data.transforms import to_unit
from solodg.errors import UserError, missing_extra
from solodg.pixels import Pixels
from solodg.predict.convolution_pads import pad_in_convolutions
from solodg.predict.early_exit_graph import early_exit_model
from solodg.predict.onnx import INPUT, METADATA, OUTPUTS, check_suffix, open_session
from solodg.predict.torch import Predictor
from solodg.runs.model_info import MODEL_FORMAT
from solodg.runs.novelty import Novelty, with_novelty
from solodg.storage import CHECKSUM, PLACEHOLDER, sealed, write_atomically

if TYPE_CHECKING:
    from onnx import ModelProto

MAX_ERROR = 1e-4  # largest difference from PyTorch: absolute in probabilities, relative in logits
_NOVELTY_SCALE = 100.0  # novelty counts images: where they lie close, rounding changes it by more
_MAX_BYTES = 2**31 - 1  # the largest protobuf message


def export_onnx(predictor: Predictor, path: Path) -> float:
    """Writes the model to `path`, after comparing the graph with PyTorch.

    Returns the largest difference; raises UserError where it exceeds `MAX_ERROR`.
    """
    check_suffix(path)
    content = to_onnx(predictor)
    difference = _largest_difference(predictor, content)
    if not difference <= MAX_ERROR:  # NaN too
        raise UserError(
            f"the exported graph differs from PyTorch by {difference:.1e} (at most {MAX_ERROR:.0e} "
            f"is allowed): backbone {predictor.info.backbone!r} cannot be exported faithfully."
        )
    write_atomically(path, content)
    return difference


def to_onnx(predictor: Predictor) -> bytes:
    """Returns the model as the content of an ONNX file, not yet compared with PyTorch."""
    try:
        import onnx  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing_extra("onnx", "ONNX", error) from error
    graph = _Graph(_with_affine_batch_norms(predictor.algorithm), _novelty(predictor)).eval()
    example = torch.from_numpy(_noise(predictor, 2))
    model = _exported(graph, example, predictor.info.backbone)
    info = predictor.info.model_copy(update={"format": MODEL_FORMAT})
    scores = [found.model_dump() for found in predictor.recorded_scores()]
    metadata = {"model": info.model_dump(), "versions": _versions(), "scores": scores}
    model.metadata_props.add(key=METADATA, value=json.dumps(metadata))
    model.metadata_props.add(key=CHECKSUM, value=PLACEHOLDER)
    model.producer_name, model.producer_version = "solodg", version("solodg")
    if model.ByteSize() > _MAX_BYTES:
        raise UserError("a model of more than 2 GB does not fit into one ONNX file.")
    return sealed(model.SerializeToString())


class _Graph(nn.Module):
    """From 8-bit pixels to the tensors named in `OUTPUTS`."""

    def __init__(self, algorithm: Algorithm, novelty: Novelty | None) -> None:
        super().__init__()
        self.algorithm, self.novelty = algorithm, novelty

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self._outputs(pixels) if tensor is not None)

    def names(self, pixels: Tensor) -> list[str]:
        """Returns which of `OUTPUTS` it has."""
        found = zip(OUTPUTS, self._outputs(pixels), strict=True)
        return [name for name, tensor in found if tensor is not None]

    def _outputs(self, pixels: Tensor) -> tuple[Tensor | None, ...]:
        outputs, novelty = with_novelty(self.algorithm.outputs, self.novelty, to_unit(pixels))
        return outputs.logits, outputs.probabilities, outputs.before, novelty


def _novelty(predictor: Predictor) -> Novelty | None:
    """Returns a copy of the score on the CPU."""
    return None if predictor.novelty is None else copy.deepcopy(predictor.novelty).cpu()


def _with_affine_batch_norms(algorithm: Algorithm) -> Algorithm:
    """Returns a copy on the CPU in which every BatchNorm has a scale and a shift.

    Added scales are one, added shifts zero. The exporter supports no BatchNorm without them.
    """
    algorithm = copy.deepcopy(algorithm).cpu()
    for module in algorithm.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not module.affine:
            module.weight = nn.Parameter(torch.ones_like(module.running_mean))  # type: ignore[arg-type]
            module.bias = nn.Parameter(torch.zeros_like(module.running_mean))  # type: ignore[arg-type]
    return algorithm


@torch.no_grad()
def _exported(graph: _Graph, example: Tensor, backbone: str) -> "ModelProto":
    """Exports by tracing, which takes a second where the newer exporter takes twenty.

    Tracing may record a size of the example batch as a constant; `_largest_difference` detects it.
    """
    algorithm = graph.algorithm
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation, and shapes taken for constants
        try:
            if isinstance(algorithm, Ridge) and algorithm.exits_early:
                model = early_exit_model(algorithm, graph.novelty, example)
            else:
                model = _traced(graph, example)
        except (RuntimeError, TypeError, ValueError) as error:  # an operator that ONNX lacks
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"backbone {backbone!r} cannot be exported: {reason}") from error
    pad_in_convolutions(model)
    return model


def _traced(graph: _Graph, example: Tensor) -> "ModelProto":
    import onnx

    names = graph.names(example)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.onnx"
        torch.onnx.export(
            graph,
            (example,),
            file,
            dynamo=False,
            # Else the exporter joins equal weights, and loses some that a branch uses.
            keep_initializers_as_inputs=True,
            input_names=[INPUT],
            output_names=names,
            dynamic_axes={name: {0: "batch"} for name in (INPUT, *names)},
        )
        model = onnx.load(file)
    weights = {tensor.name for tensor in model.graph.initializer}
    for given in [node for node in model.graph.input if node.name in weights]:
        model.graph.input.remove(given)
    return model


def _largest_difference(predictor: Predictor, content: bytes) -> float:
    """Compares the graph with PyTorch on a batch of one and of several; relative for logits."""
    session, largest = open_session(content, "the exported graph"), 0.0
    graph = _Graph(copy.deepcopy(predictor.algorithm).cpu(), _novelty(predictor)).eval()
    for count in (1, 5):
        pixels = _noise(predictor, count)
        with torch.inference_mode():
            wanted = [tensor.numpy() for tensor in graph(torch.from_numpy(pixels))]
        names = [node.name for node in session.get_outputs()]
        results = session.run(names, {INPUT: pixels})
        for name, expected, found in zip(names, wanted, results, strict=True):
            finite = np.isfinite(expected)  # a class without images has logits of -inf
            if not np.array_equal(finite, np.isfinite(found)):
                return float("inf")
            size = max(1.0, float(np.abs(expected[finite]).max()))
            size = _NOVELTY_SCALE if name == OUTPUTS[-1] else size
            difference = np.abs(expected[finite] - found[finite])
            largest = max(largest, float(difference.max()) / size)
    return largest


def _noise(predictor: Predictor, count: int) -> Pixels:
    """Returns (count, channels, H, W) random images of various brightness and noise levels."""
    info, generator = predictor.info, np.random.default_rng(0)
    shape = (count, info.channels, info.image_size, info.image_size)
    levels = generator.uniform(0, 255, (count, info.channels, 1, 1))
    grain = generator.normal(0, 1, shape) * generator.uniform(0, 80, (count, 1, 1, 1))
    return (levels + grain).clip(0, 255).astype(np.uint8)


def _versions() -> dict[str, str]:
    import onnxruntime

    versions = {name: version(name) for name in ("solodg", "torch", "timm", "onnx")}
    return versions | {"onnxruntime": onnxruntime.__version__}  # several packages may provide it
