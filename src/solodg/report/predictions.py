"""Predictions for every scored image of a run, and the galleries of images chosen by them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from solodg.algorithms import Algorithm
from solodg.data import LabelledImages
from solodg.predict.torch import Predictor
from solodg.progress import Progress, Say
from solodg.runs.config import Machine, ResolvedConfig
from solodg.runs.devices import single_device
from solodg.runs.evaluate import protocol
from solodg.runs.folder import read_machine
from solodg.runs.metrics import metrics, predict
from solodg.runs.novelty import Novelty
from solodg.runs.opened_data import input_batches
from solodg.runs.predictions import Floats, Predictions
from solodg.runs.scored_data import ScoredPart, open_scored
from solodg.runs.target_images import give_target_images
from solodg.seeding import numpy_generator

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class DomainPredictions:
    """The images of one domain, with the predictions for them."""

    role: str  # as in a record
    domain: str
    pixels: LabelledImages
    predictions: Predictions

    @property
    def labels(self) -> NDArray[np.int64]:
        """The true class of each image, (N,)."""
        return self.pixels.labels

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Accuracy, NLL, ECE and the number of images, as in a record."""
        return metrics(self.predictions, self.labels)

    @cached_property
    def right(self) -> Bools:
        """Whether each image is classified correctly, (N,)."""
        found: Bools = self.predictions.chosen == self.labels
        return found

    @cached_property
    def right_before(self) -> Bools | None:
        """Whether each image was correct before adaptation, (N,); None: nothing adapts."""
        before = self.predictions.chosen_before
        return None if before is None else before == self.labels


@dataclass(frozen=True)
class ScoredRun:
    """A run, with the predictions of its model on the domains that `solodg evaluate` scores."""

    config: ResolvedConfig
    dataset: str
    protocol: str
    parts: Iterator[DomainPredictions]  # see `predict_run`


def predict_run(
    predictor: Predictor,
    folder: Path,
    machine: Machine | None = None,
    *,
    dataset: str | None = None,
    images: int | None = None,
    progress: Progress,
    say: Say = lambda text: None,
) -> ScoredRun:
    """Opens the data that a run is scored on; iterating over `parts` predicts domain by domain.

    At most `images` of each domain are predicted. Until the next domain is requested, the model
    stays in the state that predicted the last one: `da_erm` has another state for every domain.
    """
    algorithm = predictor.algorithm
    machine = machine or read_machine(folder)
    device = single_device(machine.accelerator)
    config, data, parts, scorer = open_scored(
        folder, algorithm, predictor.info, machine, device, dataset=dataset, progress=progress,
        say=say,
    )  # fmt: skip

    def predicted() -> Iterator[DomainPredictions]:
        for part in parts:
            scorer.to(device)
            if predictor.novelty is not None:
                predictor.novelty.to(device)
            give_target_images(scorer, part.images, device)
            chosen = _draw_images(part, images)
            found = _predict_part(scorer, predictor.novelty, chosen, device, progress)
            scorer.cpu()
            if predictor.novelty is not None:
                predictor.novelty.cpu()
            if scorer is not algorithm:  # it reads stored features; the model itself reads images
                algorithm.load_state_dict(scorer.state_dict(), strict=False)
            yield found

    return ScoredRun(config, data.name, protocol(data, config), predicted())


def _predict_part(
    algorithm: Algorithm,
    novelty: Novelty | None,
    part: ScoredPart,
    device: torch.device,
    progress: Progress,
) -> DomainPredictions:
    domain = part.images.domain_name
    with progress.bar(f"Predicting {domain}", len(part.images)) as advance:
        predictions = predict(
            algorithm.outputs,
            input_batches(part.images),
            device=device,
            advance=advance,
            novelty=novelty,
        )
    return DomainPredictions(part.role, domain, part.pixels, predictions)


def _draw_images(part: ScoredPart, count: int | None) -> ScoredPart:
    """Draws `count` images of a part, always the same; None: all of them."""
    if count is None or len(part.images) <= count:
        return part
    order = numpy_generator(0, "report", *part.images.domain_names).permutation(len(part.images))
    chosen = np.sort(order[:count])
    return ScoredPart(part.role, part.images.subset(chosen), part.pixels.subset(chosen))


# Galleries: each returns indices of images, the most telling first.


def helped(part: DomainPredictions) -> NDArray[np.int64]:
    """Returns images wrong before adaptation and right after, by gain of the true class."""
    gain = _gain(part)
    if gain is None or part.right_before is None:
        return np.empty(0, dtype=np.int64)
    return _ranked(part.right & ~part.right_before, gain)


def hurt(part: DomainPredictions) -> NDArray[np.int64]:
    """Returns images right before adaptation and wrong after, by loss of the true class."""
    gain = _gain(part)
    if gain is None or part.right_before is None:
        return np.empty(0, dtype=np.int64)
    return _ranked(~part.right & part.right_before, -gain)


def uncertain(part: DomainPredictions) -> NDArray[np.int64]:
    """Returns all images, the most uncertain first."""
    return _ranked(np.ones(len(part.labels), dtype=bool), part.predictions.uncertainty)


def mistaken(part: DomainPredictions) -> NDArray[np.int64]:
    """Returns wrong images, the most confident first."""
    return _ranked(~part.right, part.predictions.probabilities.max(1))


GALLERIES: dict[str, Callable[[DomainPredictions], NDArray[np.int64]]] = {
    "helped": helped,
    "hurt": hurt,
    "mistaken": mistaken,
    "uncertain": uncertain,
}


def _gain(part: DomainPredictions) -> Floats | None:
    """Returns by how much adaptation raised the probability of the true class, (N,)."""
    before, after = part.predictions.before, part.predictions.probabilities
    if before is None:
        return None
    rows = np.arange(len(part.labels))
    gain: Floats = after[rows, part.labels] - before[rows, part.labels]
    return gain


def _ranked(mask: Bools, value: Floats) -> NDArray[np.int64]:
    """Returns the indices where `mask` holds, the largest value first, ties in their order."""
    chosen = np.flatnonzero(mask)
    return chosen[np.argsort(-value[chosen], kind="stable")]
