"""The model of a run folder, by PyTorch: `solodg.load(run).predict(image)`."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from solodg.algorithms import Algorithm
from solodg.algorithms.solo.gaussian import Gaussian
from solodg.data.transforms import to_unit
from solodg.errors import UserError
from solodg.pixels import ImageLike, Pixels
from solodg.predict.base import ImagePredictor
from solodg.runs import checkpoint
from solodg.runs.model_info import ModelInfo
from solodg.runs.predictions import Predictions


class Predictor(ImagePredictor):
    """The selected model of a run, in evaluation mode, on the CPU."""

    def __init__(self, algorithm: Algorithm, info: ModelInfo) -> None:
        super().__init__(info)
        self.algorithm = algorithm.eval()

    @classmethod
    def load(cls, path: str | Path) -> "Predictor":
        """Loads the selected model of a run folder."""
        return cls(*checkpoint.load(Path(path)))

    def compute(self, pixels: Pixels) -> Predictions:
        """Runs (B, channels, H, W) pixels through the model, in one forward pass."""
        with torch.inference_mode():
            outputs = self.algorithm.outputs(to_unit(torch.from_numpy(pixels)))
        return Predictions.from_tensors(outputs.probabilities, outputs.before)

    def adapted_classifier(self, image: ImageLike) -> NDArray[np.float32]:
        """Returns the mean weights of the classifier written for this image, (classes, embedding).

        Only solo and solo_code write a classifier for each image.
        """
        write: Callable[[Tensor], Gaussian] | None = getattr(self.algorithm, "classifiers", None)
        if write is None:
            raise UserError(
                f"algorithm {self.info.algorithm!r} has one classifier for all images; "
                "only solo and solo_code write one for each."
            )
        with torch.inference_mode():
            mean: NDArray[np.float32] = write(self.inputs([image])).mean[0].numpy()  # (C, D)
        return mean

    def inputs(self, images: Sequence[ImageLike]) -> Tensor:
        """Returns images as the backbone's input: (B, channels, H, W) in [0, 1]."""
        return to_unit(torch.from_numpy(np.stack([self.pixels(image) for image in images])))
