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
from solodg.errors import UserError, unknown_name
from solodg.pixels import ImageLike, Pixels
from solodg.predict.base import ImagePredictor
from solodg.runs import checkpoint
from solodg.runs.folder import RESULTS
from solodg.runs.model_info import ModelInfo
from solodg.runs.novelty import Novelty, load_novelty, with_novelty
from solodg.runs.predictions import Predictions
from solodg.runs.recorded_scores import RecordedScores, read_recorded

_TYPES = {"32-true": None, "16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


class Predictor(ImagePredictor):
    """The selected model of a run, in evaluation mode, on the CPU until it is moved."""

    def __init__(
        self,
        algorithm: Algorithm,
        info: ModelInfo,
        novelty: Novelty | None = None,
        folder: Path | None = None,
    ) -> None:
        super().__init__(info)
        self.folder = folder  # of the run; None: it was built in memory
        self.novelty = novelty  # None: a run of an earlier version has none
        self.algorithm = algorithm.eval()
        self.device = torch.device("cpu")
        self.precision = "32-true"

    def to(self, device: torch.device | str, precision: str | None = None) -> "Predictor":
        """Moves the model to a device and returns this predictor.

        `precision` is 32-true, 16-mixed or bf16-mixed; None leaves it as it is. At a mixed
        precision, probabilities may depend on the other images of a batch in the third digit.
        """
        if precision is not None:
            check_precision(precision)
        try:
            self.algorithm.to(device)
            if self.novelty is not None:
                self.novelty.to(device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"cannot move the model to device {str(device)!r}: {reason}") from error
        self.device = torch.device(device)
        self.precision = precision or self.precision
        return self

    def autocast(self) -> torch.autocast:
        """Returns the context in which the model computes at its precision."""
        dtype = _TYPES[self.precision]
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    @classmethod
    def load(cls, path: str | Path) -> "Predictor":
        """Loads the selected model of a run folder."""
        return cls(*checkpoint.load(Path(path)), load_novelty(Path(path)), Path(path))

    def compute(self, pixels: Pixels) -> Predictions:
        """Runs (B, channels, H, W) pixels through the model, in one forward pass."""
        x = torch.from_numpy(pixels).to(self.device)
        with torch.inference_mode(), self.autocast():
            outputs, novelty = with_novelty(self.algorithm.outputs, self.novelty, to_unit(x))
        found = (outputs.probabilities, outputs.before, novelty, outputs.readings)
        return Predictions.from_tensors(*found)

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
            mean = write(self.inputs([image])).mean[0]  # (C, D)
        weights: NDArray[np.float32] = mean.float().cpu().numpy()
        return weights

    def recorded_scores(self) -> list[RecordedScores]:
        """Returns the scores in the records of the run, the latest of each domain."""
        return [] if self.folder is None else read_recorded(self.folder / RESULTS)

    def inputs(self, images: Sequence[ImageLike]) -> Tensor:
        """Returns images as the backbone's input: (B, channels, H, W) in [0, 1], on its device."""
        pixels = np.stack([self.pixels(image) for image in images])
        return to_unit(torch.from_numpy(pixels).to(self.device))


def check_precision(precision: str) -> None:
    """Raises `UserError` for a precision that is not known."""
    if precision not in _TYPES:
        raise unknown_name("precision", precision, _TYPES)
