"""An exported model in ONNX Runtime beside the same in PyTorch, pixels to probabilities.

`python -m benchmarks.onnx` prints the table.
"""

import sys
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.timing import alternate, milliseconds, ratio, table
from solodg.algorithms import ALGORITHMS
from solodg.models.allocator import keep_freed_memory
from solodg.models.backbones import build_backbone
from solodg.pixels import Pixels
from solodg.predict.base import ImagePredictor
from solodg.predict.export import to_onnx
from solodg.predict.onnx import OnnxPredictor, open_session
from solodg.predict.torch import Predictor
from solodg.runs.model_info import ModelInfo
from solodg.types import Batch

CLASSES, SIZE = 7, 224
BACKBONES = ("resnet18", "tf_efficientnet_lite0")


def build(backbone: str, classes: int = CLASSES, size: int = SIZE) -> Predictor:
    """Random weights: time does not depend on what they know."""
    torch.manual_seed(0)
    network = build_backbone(backbone, image_size=size)
    algorithm = ALGORITHMS["solo"](network, num_classes=classes).eval()
    y = torch.arange(classes)
    with torch.inference_mode():
        algorithm.finalize([Batch(torch.rand(classes, 3, size, size), y, y * 0)])
    info = ModelInfo(
        algorithm="solo", variant="default", arguments={}, backbone=backbone, channels=3,
        image_size=size, classes=[str(i) for i in range(classes)], source_domains=["a"],
        dataset="noise",
    )  # fmt: skip
    return Predictor(algorithm, info)


def exported(model: Predictor) -> OnnxPredictor:
    """Exports a model and opens it in ONNX Runtime, without a file."""
    return OnnxPredictor(open_session(to_onnx(model), "the exported graph"), model.info)


def rows(backbone: str, rounds: dict[int, int]) -> list[list[str]]:
    """Measures a backbone; `rounds` are given by batch size. Returns the rows of the table."""
    model = build(backbone)
    models = {"ONNX Runtime": exported(model), "PyTorch": model}
    found = []
    for batch, count in rounds.items():
        shape = (batch, 3, SIZE, SIZE)
        pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        work = {name: _computation(model, pixels) for name, model in models.items()}
        measured = alternate(work, rounds=count, warmup=1)
        per_image = [f"{1000 * measured[name].median / batch:.1f} ms" for name in models]
        cost = ratio(measured["PyTorch"], measured["ONNX Runtime"])
        spread = milliseconds(measured["ONNX Runtime"])
        found.append([f"{backbone}, batch {batch}", *per_image, cost, spread])
    return found


def _computation(model: ImagePredictor, pixels: Pixels) -> Callable[[], object]:
    return lambda: model.compute(pixels)


def main() -> None:
    """Prints the table of ONNX Runtime and PyTorch."""
    keep_freed_memory()  # as the command line does, for all that is compared
    header = ["", "ONNX Runtime, an image", "PyTorch, an image", "PyTorch / ONNX",
              "ONNX Runtime, the batch"]  # fmt: skip
    found = [row for name in BACKBONES for row in rows(name, {1: 30, 64: 3})]
    sys.stdout.write(table(f"Prediction at {SIZE} pixels, `solo`, 7 classes", header, found))


if __name__ == "__main__":
    main()
