"""A trained model for someone who has images: `solodg.load(run).predict(image)`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from solodg import checkpoint
from solodg.algorithms import Algorithm
from solodg.data.decode import decode
from solodg.data.transforms import to_unit
from solodg.errors import UserError
from solodg.evaluation import uncertainty
from solodg.gaussian import Gaussian

ImageLike = str | Path | bytes | Image.Image | NDArray[Any] | Tensor
_BATCH = 32


@dataclass(frozen=True)
class Prediction:
    """What the model says of one image."""

    label: str
    probability: float
    uncertainty: float  # 0: certain; 1: a guess
    probabilities: dict[str, float]  # by class


class Predictor:
    """A model in evaluation mode with its classes and preprocessing. Safe to share by threads."""

    def __init__(self, algorithm: Algorithm, info: checkpoint.ModelInfo) -> None:
        self.algorithm, self.info = algorithm.eval(), info

    @classmethod
    def load(cls, path: str | Path) -> "Predictor":
        return cls(*checkpoint.load(Path(path)))

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

    def adapted_classifier(self, image: ImageLike) -> NDArray[np.float32]:
        """The weights written for this image, (classes, embedding)."""
        write: Callable[[Tensor], Gaussian] | None = getattr(self.algorithm, "classifiers", None)
        if write is None:
            raise UserError(
                f"algorithm {self.info.algorithm!r} has one classifier for all images; "
                "only solo writes one for each."
            )
        with torch.inference_mode():
            mean: NDArray[np.float32] = write(self._inputs([image])).mean[0].numpy()
        return mean

    def _predict_all(self, images: Sequence[ImageLike]) -> list[Prediction]:
        results = []
        for start in range(0, len(images), _BATCH):
            with torch.inference_mode():
                inputs = self._inputs(images[start : start + _BATCH])
                rows = self.algorithm.probabilities(inputs).double().numpy()
            results += [self._prediction(row) for row in rows]
        return results

    def _inputs(self, images: Sequence[ImageLike]) -> Tensor:
        return to_unit(torch.stack([self.pixels(image) for image in images]))

    def pixels(self, image: ImageLike) -> Tensor:
        """As the model sees it: (channels, size, size), 8-bit."""
        if isinstance(image, Tensor | np.ndarray):
            image = _as_pil(image)
        return decode(image, channels=self.info.channels, size=self.info.image_size)

    def _prediction(self, row: NDArray[np.float64]) -> Prediction:
        best = int(row.argmax())
        by_class = dict(zip(self.classes, row.tolist(), strict=True))
        return Prediction(self.classes[best], float(row[best]), float(uncertainty(row)), by_class)


def _as_pil(image: NDArray[Any] | Tensor) -> Image.Image:
    """(H, W), (H, W, C) arrays or (C, H, W) tensors, 8-bit or float in [0, 1]."""
    if isinstance(image, Tensor):
        pixels = image.detach().cpu().numpy()
        pixels = pixels.transpose(1, 2, 0) if pixels.ndim == 3 else pixels
    else:
        pixels = image
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (3, 4)):
        raise UserError(
            f"an image of shape {tuple(image.shape)}: expected (H, W) or (H, W, 3) for an array, "
            "(1, H, W) or (3, H, W) for a tensor."
        )
    if np.issubdtype(pixels.dtype, np.floating):
        if pixels.size and (pixels.min() < 0 or pixels.max() > 1):
            raise UserError("float images must lie in [0, 1]: do not normalise them yourself.")
        pixels = (pixels * 255).round().astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise UserError(f"an image of type {pixels.dtype}: expected 8-bit, or float in [0, 1].")
    return Image.fromarray(np.ascontiguousarray(pixels))
