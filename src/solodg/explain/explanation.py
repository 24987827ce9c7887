"""Explains what the adaptation does to one image: `explain(predictor, projection, image)`.

Two classifiers are compared. `before` is written from the source class centres alone and is the
same for every image; `after` is written for this image. Each is a Gaussian over weights. Its mean
rows are called prototypes: prototypes times embedding, plus bias, are the logits that the model's
`forward` returns. The probabilities are those that `predict` reports: the softmax averaged over
classifiers sampled from the Gaussian, which is not the softmax of these logits.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from solodg.algorithms import Algorithm
from solodg.algorithms.solo.method import Solo, adapts
from solodg.algorithms.solo_code.method import SoloCode
from solodg.data.transforms import to_unit
from solodg.errors import UserError
from solodg.explain.projection import Projection, centred
from solodg.pixels import ImageLike, Pixels
from solodg.predict.torch import Predictor
from solodg.runs.predictions import Floats, Prediction, Predictions
from solodg.types import Features

NEAREST = 5


@dataclass(frozen=True)
class ClassifierOutput:
    """A classifier, and what it computes for the image."""

    prototypes: Floats | None  # (C, D); None: the method has no linear classifier
    bias: Floats  # (C,)
    logits: Floats  # (C,) of the prototypes
    samples: Floats  # (M, C) probabilities by M sampled classifiers; M = 1 without a Gaussian

    def interval(self, share: float = 0.9) -> tuple[Floats, Floats]:
        """Returns the (C,) bounds of the middle `share` of the sampled probabilities."""
        low, high = np.quantile(self.samples, [(1 - share) / 2, (1 + share) / 2], axis=0)
        return low, high


@dataclass(frozen=True)
class Neighbour:
    """A source training image near the explained image."""

    index: int  # among the images of the projection
    distance: float  # between the embeddings
    label: str
    domain: str


@dataclass(frozen=True)
class Explanation:
    """One image, before and after the adaptation to it."""

    pixels: NDArray[np.uint8]  # (channels, H, W)
    classes: tuple[str, ...]
    projection: Projection
    embedding: Floats  # (D,)
    predictions: Predictions  # of this image alone, (1, C)
    before: ClassifierOutput | None  # None: nothing adapts, `after` is used for all images
    after: ClassifierOutput
    nearest: tuple[Neighbour, ...]
    truth: int | None = None  # number of the true class, where it is known
    aligned: NDArray[np.uint8] | None = None  # the image with its pose corrected, if the model does

    @cached_property
    def prediction(self) -> Prediction:
        """The prediction for the image, by class name."""
        return self.predictions.named(self.classes)[0]

    @cached_property
    def moved(self) -> Floats | None:
        """How far each centred prototype moved, relative to its length before, (C,)."""
        if self.before is None or self.before.prototypes is None or self.after.prototypes is None:
            return None
        start = centred(self.before.prototypes)
        distance = np.linalg.norm(centred(self.after.prototypes) - start, axis=1)
        ratio: Floats = distance / np.maximum(np.linalg.norm(start, axis=1), 1e-12)
        return ratio

    @property
    def important(self) -> list[int]:
        """The numbers of all classes, those to show first: predicted, true, predicted before."""
        weight = self.predictions.probabilities[0].copy()  # (C,)
        before, chosen_before = self.predictions.before, self.predictions.chosen_before
        if before is not None and chosen_before is not None:
            weight = np.maximum(weight, before[0])
            weight[chosen_before[0]] += 1
        weight[self.predictions.chosen[0]] += 2
        if self.truth is not None:
            weight[self.truth] += 1.5
        return [int(i) for i in np.argsort(-weight, kind="stable")]


def explain(
    predictor: Predictor, projection: Projection, image: ImageLike, *, truth: int | None = None
) -> Explanation:
    """Explains the prediction for one image; `truth` is the number of its class, if known."""
    return explain_pixels(predictor, projection, predictor.pixels(image), truth=truth)


@torch.inference_mode()
def explain_pixels(
    predictor: Predictor,
    projection: Projection,
    pixels: Pixels,
    *,
    truth: int | None = None,
) -> Explanation:
    """Explains the prediction for (channels, H, W) pixels as the model reads them."""
    x = to_unit(torch.from_numpy(pixels)[None].to(predictor.device))  # (1, channels, H, W)
    algorithm = predictor.algorithm
    before = None
    with predictor.autocast():
        if isinstance(algorithm, Solo):
            observed = algorithm.features(x)
            embedding = _array(algorithm.modulate(observed).embedding[0])
            after = _adapted(algorithm, observed)
            if adapts(algorithm):
                before = _prior(algorithm, observed)
        else:
            embedding = _array(algorithm.embed(x)[0])
            after = _fixed(algorithm, x)
    return Explanation(
        pixels=pixels,
        aligned=_aligned(algorithm, x),
        classes=tuple(predictor.classes),
        projection=projection,
        embedding=embedding,
        predictions=predictor.compute(pixels[None]),
        before=before,
        after=after,
        nearest=_nearest(predictor, projection, embedding),
        truth=truth,
    )


def _aligned(algorithm: Algorithm, x: torch.Tensor) -> NDArray[np.uint8] | None:
    pose = algorithm.frame if isinstance(algorithm, SoloCode) else None
    pose = pose or getattr(algorithm.backbone, "pose", None)
    if pose is None:
        return None
    shown: NDArray[np.uint8] = (255 * pose(x)[0]).round().to(torch.uint8).cpu().numpy()
    return shown


def _adapted(algorithm: Solo, observed: Features) -> ClassifierOutput:
    rows = _array(algorithm.classifiers_from(observed).mean[0])
    logits = _array(algorithm.logits(observed)[0])
    samples = _array(algorithm.sampled_probabilities(observed)[0])
    return ClassifierOutput(rows, np.zeros(len(rows)), logits, samples)


def _prior(algorithm: Solo, observed: Features) -> ClassifierOutput:
    rows = _array(algorithm.prior_classifier().mean)
    logits = _array(algorithm.prior_logits(observed)[0])
    samples = _array(algorithm.prior_sampled_probabilities(observed)[0])
    return ClassifierOutput(rows, np.zeros(len(rows)), logits, samples)


def _fixed(algorithm: Algorithm, x: torch.Tensor) -> ClassifierOutput:
    """Describes the one classifier of a method that does not adapt."""
    logits = _array(algorithm(x)[0])
    samples = _array(algorithm.probabilities(x))
    try:
        weight, bias = algorithm.linear_classifier()
    except UserError:  # this method has no linear classifier
        return ClassifierOutput(None, np.zeros(len(logits)), logits, samples)
    offset = _array(torch.as_tensor(bias)) + np.zeros(len(logits))
    return ClassifierOutput(_array(weight), offset, logits, samples)


def _array(tensor: torch.Tensor) -> Floats:
    """Copies a tensor to a float64 array, from whatever device it is on."""
    array: Floats = tensor.detach().double().cpu().numpy()
    return array


def _nearest(
    predictor: Predictor, projection: Projection, embedding: Floats
) -> tuple[Neighbour, ...]:
    distances = np.linalg.norm(projection.embeddings - embedding, axis=1)  # (N,)
    return tuple(
        Neighbour(
            index=int(i),
            distance=float(distances[i]),
            label=predictor.classes[projection.labels[i]],
            domain=projection.domain_names[projection.domains[i]],
        )
        for i in np.argsort(distances, kind="stable")[:NEAREST]
    )
