"""What the adaptation does to one image: `explain(predictor, plane, image)`.

Two classifiers are compared. `before` is written from the source centres alone and is the same for
every image; `after` is written for this image. Each is a Gaussian over weights: its prototypes are
the mean, and prototypes times embedding, plus bias, are the logits that the model's `forward`
gives. The probabilities are those that `predict` reports: the softmax averaged over classifiers
sampled from the Gaussian, which is not the softmax of these logits.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from solodg.algorithms import Algorithm
from solodg.algorithms.solo.method import Solo, adapts
from solodg.algorithms.solo_plus.method import SoloPlus
from solodg.data.transforms import to_unit
from solodg.errors import UserError
from solodg.explain.projection import Floats, Plane, apart
from solodg.predict.base import uncertainty
from solodg.predict.torch import ImageLike, Predictor
from solodg.types import Features

NEAREST = 5


@dataclass(frozen=True)
class Judgement:
    """A classifier and what it says of the image."""

    prototypes: Floats | None  # (C, D); None: the method has no linear classifier
    bias: Floats  # (C,)
    logits: Floats  # (C,) of the prototypes
    samples: (
        Floats  # (M, C) probabilities under sampled classifiers; one, where there is no Gaussian
    )

    @cached_property
    def probabilities(self) -> Floats:
        """(C,) what `predict` reports."""
        mean: Floats = self.samples.mean(0)
        return mean

    @property
    def best(self) -> int:
        return int(self.probabilities.argmax())

    @property
    def uncertainty(self) -> float:
        return float(uncertainty(self.probabilities))

    def range(self, share: float = 0.9) -> tuple[Floats, Floats]:
        """(C,) and (C,): between these lies the middle `share` of the sampled probabilities."""
        low, high = np.quantile(self.samples, [(1 - share) / 2, (1 + share) / 2], axis=0)
        return low, high


@dataclass(frozen=True)
class Neighbour:
    """A source training image near the image."""

    index: int  # in the plane
    distance: float  # between embeddings
    label: str
    domain: str


@dataclass(frozen=True)
class Explanation:
    """One image, before and after the adaptation to it."""

    pixels: NDArray[np.uint8]  # (channels, H, W)
    classes: tuple[str, ...]
    plane: Plane
    embedding: Floats  # (D,)
    before: Judgement | None  # None: one classifier for all images, which is `after`
    after: Judgement
    nearest: tuple[Neighbour, ...]
    truth: int | None = None  # the class, where it is known
    framed: NDArray[np.uint8] | None = None  # the image in the frame that it wrote for itself

    @cached_property
    def moved(self) -> Floats | None:
        """(C,) way of each prototype over its length before, apart from what all share."""
        if self.before is None or self.before.prototypes is None or self.after.prototypes is None:
            return None
        start = apart(self.before.prototypes)
        way = np.linalg.norm(apart(self.after.prototypes) - start, axis=1)
        ratio: Floats = way / np.maximum(np.linalg.norm(start, axis=1), 1e-12)
        return ratio

    @property
    def important(self) -> list[int]:
        """Classes, those that the image is about first."""
        weight = self.after.probabilities.copy()
        if self.before is not None:
            weight = np.maximum(weight, self.before.probabilities)
            weight[self.before.best] += 1
        weight[self.after.best] += 2
        if self.truth is not None:
            weight[self.truth] += 1.5
        return [int(i) for i in np.argsort(-weight, kind="stable")]


@torch.inference_mode()
def explain(
    predictor: Predictor, plane: Plane, image: ImageLike, *, truth: int | None = None
) -> Explanation:
    """One image, alone. `truth`: its class, where it is known."""
    pixels = predictor.pixels(image)
    x = to_unit(torch.from_numpy(pixels)[None])
    algorithm = predictor.algorithm
    before = None
    if isinstance(algorithm, Solo):
        observed = algorithm.features(x)
        embedding = algorithm.modulate(observed).embedding[0].double().numpy()
        after = _written(algorithm, observed)
        if adapts(algorithm):
            before = _prior(algorithm, observed)
    else:
        embedding = algorithm.embed(x)[0].double().numpy()
        after = _fixed(algorithm, x)
    return Explanation(
        pixels=pixels,
        framed=_framed(algorithm, x),
        classes=tuple(predictor.classes),
        plane=plane,
        embedding=embedding,
        before=before,
        after=after,
        nearest=_nearest(predictor, plane, embedding),
        truth=truth,
    )


def _framed(algorithm: Algorithm, x: torch.Tensor) -> NDArray[np.uint8] | None:
    if not isinstance(algorithm, SoloPlus) or algorithm.frame is None:
        return None
    shown: NDArray[np.uint8] = (255 * algorithm.frame(x)[0]).round().to(torch.uint8).numpy()
    return shown


def _written(algorithm: Solo, observed: Features) -> Judgement:
    rows = algorithm.classifiers_from(observed).mean[0].double().numpy()
    logits = algorithm.logits(observed)[0].double().numpy()
    samples = algorithm.sampled_probabilities(observed)[0].double().numpy()
    return Judgement(rows, np.zeros(len(rows)), logits, samples)


def _prior(algorithm: Solo, observed: Features) -> Judgement:
    rows = algorithm.prior_classifier().mean.double().numpy()
    logits = algorithm.prior_logits(observed)[0].double().numpy()
    samples = algorithm.prior_sampled_probabilities(observed)[0].double().numpy()
    return Judgement(rows, np.zeros(len(rows)), logits, samples)


def _fixed(algorithm: Algorithm, x: torch.Tensor) -> Judgement:
    logits = algorithm(x)[0].double().numpy()
    samples = algorithm.probabilities(x).double().numpy()
    try:
        weight, bias = algorithm.linear_classifier()
    except UserError:  # a method without one
        return Judgement(None, np.zeros(len(logits)), logits, samples)
    offset = torch.as_tensor(bias).detach().double().numpy() + np.zeros(len(logits))
    return Judgement(weight.detach().double().numpy(), offset, logits, samples)


def _nearest(predictor: Predictor, plane: Plane, embedding: Floats) -> tuple[Neighbour, ...]:
    distances = np.linalg.norm(plane.embeddings - embedding, axis=1)
    return tuple(
        Neighbour(
            index=int(i),
            distance=float(distances[i]),
            label=predictor.classes[plane.labels[i]],
            domain=plane.domain_names[plane.domains[i]],
        )
        for i in np.argsort(distances, kind="stable")[:NEAREST]
    )
