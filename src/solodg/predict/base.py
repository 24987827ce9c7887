"""What a model says of an image, and what every model that takes images has in common.

Without torch: a run (`predictor.py`) and an exported file (`onnx_model.py`) answer alike.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from solodg.errors import UserError
from solodg.inference import inference_batch_size
from solodg.pixels import ImageLike, Pixels, pixels_of
from solodg.runs.model_info import ModelInfo


@dataclass(frozen=True)
class Prediction:
    """What the model says of one image."""

    label: str
    probability: float
    uncertainty: float  # 0: certain; 1: a guess
    probabilities: dict[str, float]  # by class
    before: dict[str, float] | None = None  # by class, before the image wrote its classifier


class ProbabilityRows(NamedTuple):
    """What the model computes for a batch, (B, C) each."""

    probabilities: NDArray[np.float64]
    before: NDArray[np.float64] | None  # of methods that adapt, from the sources alone


class ImagePredictor(ABC):
    """A model with its classes and preprocessing. Safe to share by threads."""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info

    @property
    def classes(self) -> list[str]:
        return self.info.classes

    @overload
    def predict(self, images: ImageLike) -> Prediction: ...
    @overload
    def predict(self, images: list[ImageLike] | list[str] | list[Path]) -> list[Prediction]: ...

    def predict(self, images: ImageLike | Sequence[ImageLike]) -> Prediction | list[Prediction]:
        """A path, PIL image, array or tensor -> its prediction; a list -> a list.

        Each image is judged alone: its prediction does not depend on the others.
        """
        if isinstance(images, list | tuple):
            return self._predict_all(images)
        return self._predict_all([images])[0]  # type: ignore[list-item]

    def predict_pixels(self, pixels: Pixels) -> list[Prediction]:
        """Predictions for pixels (B, C, H, W) at the model's own size."""
        probabilities, before = self.compute(pixels)
        earlier = [None] * len(probabilities) if before is None else list(before)
        return [self._prediction(*rows) for rows in zip(probabilities, earlier, strict=True)]

    @abstractmethod
    def compute(self, pixels: Pixels) -> ProbabilityRows:
        """One forward pass."""

    def adapted_classifier(self, image: ImageLike) -> NDArray[np.float32]:
        """The weights written for this image, (classes, embedding)."""
        raise UserError("an exported file gives no classifiers: load the run it was made of.")

    def _predict_all(self, images: Sequence[ImageLike]) -> list[Prediction]:
        results = []
        size = inference_batch_size(self.info.channels * self.info.image_size**2)
        for start in range(0, len(images), size):
            chunk = [self.pixels(image) for image in images[start : start + size]]
            results += self.predict_pixels(np.stack(chunk))
        return results

    def pixels(self, image: ImageLike) -> Pixels:
        """(channels, H, W) as the model sees it."""
        return pixels_of(image, channels=self.info.channels, size=self.info.image_size)

    def _prediction(
        self, row: NDArray[np.float64], before: NDArray[np.float64] | None
    ) -> Prediction:
        best = int(row.argmax())
        return Prediction(
            self.classes[best],
            float(row[best]),
            float(uncertainty(row)),
            self._by_class(row),
            None if before is None else self._by_class(before),
        )

    def _by_class(self, row: NDArray[np.float64]) -> dict[str, float]:
        return dict(zip(self.classes, row.tolist(), strict=True))


def uncertainty(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Entropy of the prediction over its largest possible value: 0 is certain, 1 is a guess."""
    p = np.clip(probabilities, 1e-12, 1.0)
    result: NDArray[np.float64] = -(p * np.log(p)).sum(-1) / np.log(p.shape[-1])
    return result
