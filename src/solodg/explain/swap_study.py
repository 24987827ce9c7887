"""Is it the single image? A trained model on its unseen domains, with what whose image says.

A style, a frame (`solo_plus`) and the statistics of image norm can be an image's

    own           the method
    same domain   those of another image of its domain, at random
    other domain  those of an image of another domain, at random

or no image's: `mean` is the mean style or frame of the source training images, `prior` the
classifier that the meta-prior writes from the source centres alone, `none` no frame, or the
statistics of the sources alone.

Accuracies are those of the mean classifier; `solodg evaluate` averages sampled ones, which may
differ in a few images.

If `own` does not beat `same domain`, it is the domain and not the image that helps; if it does not
beat `mean` or `none`, what the image says does not help.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from solodg.algorithms.solo.method import Solo, adapts
from solodg.algorithms.solo_plus.method import SoloPlus
from solodg.algorithms.solo_plus.pose import mean_pose
from solodg.data import LabelledImages
from solodg.data.domains import Ints
from solodg.data.transforms import to_unit
from solodg.errors import UserError
from solodg.inference import inference_batch_size
from solodg.models.image_norm import donor_statistics, image_norms
from solodg.progress import NoProgress, Progress
from solodg.runs import checkpoint
from solodg.runs.build import input_batches, open_source
from solodg.runs.config import Machine
from solodg.runs.devices import single_device
from solodg.runs.folder import read_config, read_machine
from solodg.runs.scored_data import open_scored
from solodg.runs.stream import Stream, gather
from solodg.seeding import numpy_generator, torch_generator
from solodg.types import Features

STYLES = ("own", "same domain", "other domain", "mean", "prior")
FRAMES = ("own", "same domain", "other domain", "mean", "none")
STATISTICS = ("own", "same domain", "other domain", "none")

Accuracies = dict[str, dict[str, float]]  # unseen domain -> whose -> accuracy


class Studied(NamedTuple):
    """The model, source images for its centres, and its target domains."""

    algorithm: Solo
    centres: LabelledImages
    targets: dict[str, LabelledImages]
    device: torch.device


def open_study(folder: Path, machine: Machine | None, *, images: int | None = None) -> Studied:
    """`images` of each target domain, drawn once for all; None: all of them."""
    algorithm, info = checkpoint.load(folder)
    if not adapts(algorithm):
        raise UserError(
            f"{info.algorithm!r} ({info.variant}) reads no style: only solo and its kin do."
        )
    machine = machine or read_machine(folder)
    device = single_device(machine.accelerator)
    source, config = open_source(read_config(folder), machine)
    opened = open_scored(
        folder, algorithm, info, machine, device,
        needs_images=True, progress=NoProgress(), say=lambda text: None,
    )  # fmt: skip
    drawn = {
        part.images.domain_name: Stream(images=images).draw(part.images)
        for part in opened.parts
        if part.role == "target"
    }
    centres = source.train.balanced(config.centre_images, config.seed)
    return Studied(algorithm.to(device), centres, drawn, device)


def study_run(
    folder: Path,
    machine: Machine | None,
    progress: Progress,
    *,
    seed: int = 0,
    images: int | None = None,
) -> dict[str, Accuracies]:
    """By question: whose style, whose frame, whose statistics; those that the model knows."""
    studied = open_study(folder, machine, images=images)
    found = {
        "style": style_study(studied, progress, seed=seed),
        "frame": frame_study(studied, progress, seed=seed),
        "statistics": statistics_study(studied, progress, seed=seed),
    }
    return {question: answer for question, answer in found.items() if answer is not None}


class Observed(NamedTuple):
    features: Features
    labels: Tensor


@torch.inference_mode()
def style_study(studied: Studied, progress: Progress, *, seed: int = 0) -> Accuracies:
    """Accuracy by unseen domain and kind of style."""
    algorithm, centres, targets, device = studied
    count = len(centres) + sum(len(part) for part in targets.values())
    with progress.bar("Looking at images", count) as advance:

        def observe(part: LabelledImages) -> Observed:
            return _observe(algorithm, part, device, advance)

        known = observe(centres)
        unseen = {name: observe(part) for name, part in targets.items()}
    generator = torch_generator(seed, "style-study")
    result = {}
    for name, seen in unseen.items():
        others = [other.features.style for key, other in unseen.items() if key != name]
        foreign = torch.cat(others) if others else known.features.style
        result[name] = _accuracies(algorithm, seen, foreign, known.features.style, generator)
    return result


@torch.inference_mode()
def frame_study(studied: Studied, progress: Progress, *, seed: int = 0) -> Accuracies | None:
    """Accuracy by unseen domain and kind of frame; None where images write no frame."""
    algorithm, centres, targets, device = studied
    if not isinstance(algorithm, SoloPlus) or algorithm.frame is None:
        return None
    write = algorithm.frame.poses
    known = torch.cat([write(batch.x.to(device)) for batch in input_batches(centres)])
    written = {
        name: torch.cat([write(batch.x.to(device)) for batch in input_batches(part)])
        for name, part in targets.items()
    }
    generator = torch_generator(seed, "frame-study")
    result = {}
    with progress.bar("Frame by frame", sum(map(len, targets.values())) * len(FRAMES)) as advance:
        for name, part in targets.items():
            others = [maps for key, maps in written.items() if key != name]
            foreign, count = torch.cat(others) if others else known, len(part)
            kinds = {
                "own": written[name],
                "same domain": written[name][_another(count, generator)],
                "other domain": foreign[torch.randint(len(foreign), (count,), generator=generator)],
                "mean": mean_pose(known).expand(count, 2, 3),
                "none": torch.eye(2, 3, device=device).expand(count, 2, 3),
            }
            result[name] = {
                kind: _framed_accuracy(algorithm, part, maps, device, advance)
                for kind, maps in kinds.items()
            }
    return result


@torch.inference_mode()
def statistics_study(studied: Studied, progress: Progress, *, seed: int = 0) -> Accuracies | None:
    """Accuracy by unseen domain and whose statistics normalise; None without image norm."""
    algorithm, centres, targets, _ = studied
    if not image_norms(algorithm):
        return None
    generator = numpy_generator(seed, "statistics-study")
    others = torch_generator(seed, "statistics-study")
    result = {}
    total = sum(map(len, targets.values())) * len(STATISTICS)
    with progress.bar("Statistics by statistics", total) as advance:
        for name, part in targets.items():
            foreign = [other for key, other in targets.items() if key != name] or [centres]
            which = np.repeat(np.arange(len(foreign)), [len(other) for other in foreign])
            index = np.concatenate([np.arange(len(other)) for other in foreign])
            drawn = generator.integers(len(which), size=len(part))
            nobody = np.zeros(len(part), dtype=np.int64)
            lenders = {
                "own": _Lenders([part], nobody, np.arange(len(part))),
                "same domain": _Lenders([part], nobody, _another(len(part), others).numpy()),
                "other domain": _Lenders(foreign, which[drawn], index[drawn]),
                "none": None,
            }
            result[name] = {
                kind: _lent_accuracy(studied, part, lender, advance)
                for kind, lender in lenders.items()
            }
    return result


class _Lenders(NamedTuple):
    """For each image, whose statistics it takes: image `row` of part `which`."""

    parts: list[LabelledImages]
    which: Ints
    row: Ints


def _another(count: int, generator: torch.Generator) -> Tensor:
    """For each of so many images another one, at random, each once."""
    order = torch.randperm(count, generator=generator)
    other = torch.empty_like(order)
    other[order] = order.roll(1)
    return other


def _lent_accuracy(
    studied: Studied,
    part: LabelledImages,
    lenders: _Lenders | None,
    advance: Callable[[int], None],
) -> float:
    """A lender goes through the network beside the image, normalised by itself."""
    right = 0
    size = inference_batch_size(part.images.take([0]).numel())
    for start in range(0, len(part), size):
        rows = np.arange(start, min(start + size, len(part)))
        x, count, lender = part.images.take(rows), len(rows), None
        if lenders is not None:
            lent = gather(lenders.parts, lenders.which[rows], lenders.row[rows])
            x = torch.cat([x, lent])
            lender = torch.arange(count, 2 * count, device=studied.device).repeat(2)
        with donor_statistics(studied.algorithm, lender):
            logits = studied.algorithm(to_unit(x).to(studied.device))[:count]
        right += int((logits.argmax(1).cpu().numpy() == part.labels[rows]).sum())
        advance(count)
    return right / len(part)


def _framed_accuracy(
    algorithm: SoloPlus,
    part: LabelledImages,
    maps: Tensor,
    device: torch.device,
    advance: Callable[[int], None],
) -> float:
    right, start = 0, 0
    for batch in input_batches(part):
        observed = algorithm.features(batch.x.to(device), maps[start : start + len(batch.y)])
        right += int((algorithm.logits(observed).argmax(1).cpu() == batch.y).sum())
        start += len(batch.y)
        advance(len(batch.y))
    return right / len(part)


def _observe(
    algorithm: Solo, part: LabelledImages, device: torch.device, advance: Callable[[int], None]
) -> Observed:
    found, labels = [], []
    for batch in input_batches(part):
        found.append(algorithm.features(batch.x.to(device)))
        labels.append(batch.y)
        advance(len(batch.y))
    features = Features(*(torch.cat(tensors) for tensors in zip(*found, strict=True)))
    return Observed(features, torch.cat(labels).to(device))


def _accuracies(
    algorithm: Solo, seen: Observed, foreign: Tensor, known: Tensor, generator: torch.Generator
) -> dict[str, float]:
    features, count = seen.features, len(seen.labels)
    styles = {
        "own": features.style,
        "same domain": features.style[_another(count, generator)],
        "other domain": foreign[torch.randint(len(foreign), (count,), generator=generator)],
        "mean": known.mean(0).expand_as(features.style),
    }
    logits = {n: algorithm.logits(features._replace(style=style)) for n, style in styles.items()}
    logits["prior"] = algorithm.prior_logits(features._replace(style=styles["mean"]))
    return {name: float((v.argmax(1) == seen.labels).double().mean()) for name, v in logits.items()}
