"""The base class of predictors: images in, predictions out. It does not import torch.

The model of a run folder (`predict.torch`) and that of an exported file (`predict.onnx`) give the
same predictions.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from solodg.errors import UserError
from solodg.inference import inference_batch_size
from solodg.pixels import ImageLike, Pixels, pixels_of
from solodg.runs.model_info import ModelInfo
from solodg.runs.predictions import NotFiniteError, Prediction, Predictions
from solodg.runs.recorded_scores import RecordedScores


class ImagePredictor(ABC):
    """A trained model with its classes and preprocessing. Threads may share it."""

    runtime = "PyTorch"  # the library that computes the predictions

    def __init__(self, info: ModelInfo) -> None:
        self.info = info

    @property
    def classes(self) -> list[str]:
        """The names of the classes, in the order of the model's outputs."""
        return self.info.classes

    @overload
    def predict(self, images: ImageLike) -> Prediction: ...
    @overload
    def predict(self, images: list[ImageLike] | list[str] | list[Path]) -> list[Prediction]: ...

    def predict(self, images: ImageLike | Sequence[ImageLike]) -> Prediction | list[Prediction]:
        """Predicts the class of an image, or of each image of a list.

        An image is a path, a PIL image, an array or a tensor. A prediction depends on its own image
        alone, not on the others of the list.
        """
        if isinstance(images, list | tuple):
            return self._predict_all(images)
        return self._predict_all([images])[0]  # type: ignore[list-item]

    @property
    def batch_size(self) -> int:
        """How many images go through the model at once."""
        return inference_batch_size(self.info.channels * self.info.image_size**2)

    def predict_pixels(self, pixels: Pixels) -> list[Prediction]:
        """Predicts the classes of (B, channels, H, W) pixels at the model's own size."""
        return self.compute(pixels).named(self.classes)

    @abstractmethod
    def compute(self, pixels: Pixels) -> Predictions:
        """Runs (B, channels, H, W) pixels through the model, in one forward pass."""

    def adapted_classifier(self, image: ImageLike) -> NDArray[np.float32]:
        """Returns the weights of the classifier written for this image, (classes, embedding)."""
        raise UserError(
            "an exported file does not return its classifiers: load the run that it was exported "
            "from."
        )

    def recorded_scores(self) -> list[RecordedScores]:
        """Returns the scores recorded for the model, the latest of each domain; there may be none.

        Those of an exported file were recorded before its export.
        """
        return []

    def predict_each(self, images: Sequence[ImageLike]) -> Iterator[Prediction | UserError]:
        """Yields the prediction of each image, or the error of one that cannot be predicted.

        The next batch is decoded while the model computes this one.
        """
        size = self.batch_size
        chunks = [images[start : start + size] for start in range(0, len(images), size)]
        with ThreadPoolExecutor(1) as decoder:
            ahead = [decoder.submit(self._decoded, chunk) for chunk in chunks[:1]]
            for place in range(len(chunks)):
                decoded = ahead.pop().result()
                ahead += [decoder.submit(self._decoded, c) for c in chunks[place + 1 : place + 2]]
                yield from self._predict_decoded(decoded)

    def _decoded(self, images: Sequence[ImageLike]) -> list[Pixels | UserError]:
        """Returns the pixels of each image, or the error of one that cannot be read."""
        results: list[Pixels | UserError] = []
        for image in images:
            try:
                results.append(self.pixels(image))
            except UserError as error:
                results.append(error)
        return results

    def _predict_decoded(
        self, decoded: list[Pixels | UserError]
    ) -> Iterator[Prediction | UserError]:
        """Yields the predictions of one batch; if one is not finite, of each image on its own."""
        pixels = [found for found in decoded if not isinstance(found, UserError)]
        try:
            answers = self.predict_pixels(np.stack(pixels)) if pixels else []  # (B, channels, H, W)
        except NotFiniteError as error:
            if len(decoded) == 1:
                yield error
                return
            for found in decoded:
                yield from self._predict_decoded([found])
            return
        predicted = iter(answers)
        for found in decoded:
            yield found if isinstance(found, UserError) else next(predicted)

    def _predict_all(self, images: Sequence[ImageLike]) -> list[Prediction]:
        results = []
        for found in self.predict_each(images):
            if isinstance(found, UserError):
                raise found
            results.append(found)
        return results

    def pixels(self, image: ImageLike) -> Pixels:
        """Returns an image as the model reads it: 8-bit, (channels, H, W)."""
        return pixels_of(
            image,
            channels=self.info.channels,
            size=self.info.image_size,
            window=self.info.window,
        )
