"""A trained model for someone who has images: `solodg.load(run).predict(image)`."""

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
from solodg.predict.base import ImagePredictor, Prediction, ProbabilityRows
from solodg.runs import checkpoint
from solodg.runs.model_info import ModelInfo

__all__ = ["ImageLike", "Prediction", "Predictor"]


class Predictor(ImagePredictor):
    """The selected model of a run, in evaluation mode."""

    def __init__(self, algorithm: Algorithm, info: ModelInfo) -> None:
        super().__init__(info)
        self.algorithm = algorithm.eval()

    @classmethod
    def load(cls, path: str | Path) -> "Predictor":
        return cls(*checkpoint.load(Path(path)))

    def compute(self, pixels: Pixels) -> ProbabilityRows:
        with torch.inference_mode():
            _, probabilities, before = self.algorithm.outputs(to_unit(torch.from_numpy(pixels)))
        return ProbabilityRows(
            probabilities.double().numpy(), None if before is None else before.double().numpy()
        )

    def adapted_classifier(self, image: ImageLike) -> NDArray[np.float32]:
        write: Callable[[Tensor], Gaussian] | None = getattr(self.algorithm, "classifiers", None)
        if write is None:
            raise UserError(
                f"algorithm {self.info.algorithm!r} has one classifier for all images; "
                "only solo and its kin write one for each."
            )
        with torch.inference_mode():
            mean: NDArray[np.float32] = write(self.inputs([image])).mean[0].numpy()
        return mean

    def inputs(self, images: Sequence[ImageLike]) -> Tensor:
        return to_unit(torch.from_numpy(np.stack([self.pixels(image) for image in images])))
