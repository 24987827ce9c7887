"""Every scored image of a run, judged before and after the adaptation to it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from solodg.algorithms import Algorithm
from solodg.data import LabelledImages
from solodg.predict.base import uncertainty
from solodg.progress import Progress
from solodg.runs import checkpoint
from solodg.runs.build import Say, input_batches
from solodg.runs.config import Machine, RunConfig
from solodg.runs.devices import single_device
from solodg.runs.evaluate import protocol
from solodg.runs.folder import read_machine
from solodg.runs.metrics import Predictions, metrics
from solodg.runs.model_info import ModelInfo
from solodg.runs.scored_data import ScoredPart, open_scored
from solodg.runs.target_images import give_target_images
from solodg.seeding import numpy_generator

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class DomainPredictions:
    """The images of one domain, with what the model says of each."""

    role: str  # as in a record
    domain: str
    pixels: LabelledImages
    before: Floats | None  # (N, C) probabilities; None: one classifier for all images
    after: Floats  # (N, C)

    @property
    def labels(self) -> NDArray[np.int64]:
        return self.pixels.labels

    @cached_property
    def metrics(self) -> dict[str, float]:
        return metrics(Predictions(self.after, self.labels))

    @cached_property
    def right(self) -> Bools:
        found: Bools = self.after.argmax(1) == self.labels
        return found

    @cached_property
    def right_before(self) -> Bools | None:
        return None if self.before is None else self.before.argmax(1) == self.labels

    @cached_property
    def uncertainty(self) -> Floats:
        return uncertainty(self.after)


@dataclass(frozen=True)
class RunPredictions:
    config: RunConfig
    info: ModelInfo
    dataset: str
    protocol: str
    parts: list[DomainPredictions]
    shortened: int | None  # at most so many images of each domain were judged; None: all


def predict_run(
    folder: Path,
    machine: Machine | None = None,
    *,
    dataset: str | None = None,
    images: int | None = None,
    progress: Progress,
    say: Say = lambda text: None,
) -> RunPredictions:
    """The domains that `solodg evaluate` scores; `images`: at most so many of each, drawn."""
    algorithm, info = checkpoint.load(folder)
    machine = machine or read_machine(folder)
    device = single_device(machine.accelerator)
    algorithm.to(device)
    config, data, parts, algorithm = open_scored(
        folder, algorithm, info, machine, device, dataset=dataset, progress=progress, say=say
    )
    judged = []
    for part in parts:
        give_target_images(algorithm, part.images, device)
        judged.append(_judge(algorithm, _some(part, images), device, progress))
    return RunPredictions(config, info, data.name, protocol(data, config), judged, images)


def _some(part: ScoredPart, count: int | None) -> ScoredPart:
    if count is None or len(part.images) <= count:
        return part
    order = numpy_generator(0, "report", *part.images.domain_names).permutation(len(part.images))
    chosen = np.sort(order[:count])
    return ScoredPart(part.role, part.images.subset(chosen), part.pixels.subset(chosen))


@torch.inference_mode()
def _judge(
    algorithm: Algorithm, part: ScoredPart, device: torch.device, progress: Progress
) -> DomainPredictions:
    images = part.images
    domain = images.domain_name
    before, after = [], []
    with progress.bar(f"Judging {domain}", len(images)) as advance:
        for batch in input_batches(images):
            verdicts = algorithm.outputs(batch.x.to(device))
            after.append(_rows(verdicts.probabilities))
            if verdicts.before is not None:
                before.append(_rows(verdicts.before))
            advance(len(batch.y))
    stacked = np.concatenate(before) if before else None
    return DomainPredictions(part.role, domain, part.pixels, stacked, np.concatenate(after))


def _rows(x: torch.Tensor) -> Floats:
    rows: Floats = x.double().cpu().numpy()
    return rows


# Galleries: which images, the most telling first.


def helped(part: DomainPredictions) -> NDArray[np.int64]:
    """Wrong before the adaptation, right after it; by how much it gave to the true class."""
    if part.before is None or part.right_before is None:
        return np.empty(0, dtype=np.int64)
    return _ranked(part.right & ~part.right_before, _gain(part, part.before))


def hurt(part: DomainPredictions) -> NDArray[np.int64]:
    """Right before, wrong after; by how much it took from the true class."""
    if part.before is None or part.right_before is None:
        return np.empty(0, dtype=np.int64)
    return _ranked(~part.right & part.right_before, -_gain(part, part.before))


def uncertain(part: DomainPredictions) -> NDArray[np.int64]:
    return _ranked(np.ones(len(part.labels), dtype=bool), part.uncertainty)


def mistaken(part: DomainPredictions) -> NDArray[np.int64]:
    """Wrong, the surest first."""
    return _ranked(~part.right, part.after.max(1))


GALLERIES: dict[str, Callable[[DomainPredictions], NDArray[np.int64]]] = {
    "helped": helped,
    "hurt": hurt,
    "mistaken": mistaken,
    "uncertain": uncertain,
}


def _gain(part: DomainPredictions, before: Floats) -> Floats:
    rows = np.arange(len(part.labels))
    gain: Floats = part.after[rows, part.labels] - before[rows, part.labels]
    return gain


def _ranked(mask: Bools, value: Floats) -> NDArray[np.int64]:
    """Indices where `mask`, the largest value first, ties in their order."""
    chosen = np.flatnonzero(mask)
    return chosen[np.argsort(-value[chosen], kind="stable")]
