"""The swap study: what does the single image contribute to the accuracy on unseen domains?

A trained model is scored again, each time with one thing that it reads from the image replaced by
that of another image, the donor. What can be swapped is the style, the pose (swap_poses.py) and
the statistics of image norm. They come from

    own           the image itself: the method as it is
    same domain   a random other image of its domain
    other domain  a random image of another domain

or from no single image:

    mean          the mean style or pose of source training images
    prior         in place of a style: the classifier written from the source class centres alone
    none          the pose is not changed; or the statistics are those of the sources alone

Accuracies are those of the mean classifier; `solodg evaluate` averages sampled classifiers, which
may differ in a few images.

If `own` does not beat `same domain`, the domain helps and not the single image. If it does not beat
`mean` or `none`, reading the image does not help.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from solodg.algorithms.solo.method import Solo, adapts
from solodg.data import LabelledImages
from solodg.data.splits import Ints
from solodg.data.transforms import to_unit
from solodg.errors import UserError
from solodg.explain.studied_run import Accuracies, StudiedRun, random_derangement
from solodg.explain.swap_poses import has_pose, swap_poses
from solodg.inference import inference_batch_size
from solodg.models.image_norm import donor_statistics, image_norms
from solodg.progress import NoProgress, Progress, Say
from solodg.runs import checkpoint
from solodg.runs.config import Machine
from solodg.runs.devices import single_device
from solodg.runs.folder import read_config, read_machine
from solodg.runs.metrics import chosen_classes
from solodg.runs.opened_data import input_batches, reopen_source
from solodg.runs.scored_data import open_scored
from solodg.runs.stream import Stream, gather
from solodg.seeding import numpy_generator, torch_generator
from solodg.types import Features

STYLES = ("own", "same domain", "other domain", "mean", "prior")
STATISTICS = ("own", "same domain", "other domain", "none")


class LabelledFeatures(NamedTuple):
    """What the backbone reads from N images, and their classes."""

    features: Features
    labels: Tensor  # (N,)


def open_study(
    folder: Path, machine: Machine | None, *, images: int | None = None,
    say: Say = lambda text: None,
) -> StudiedRun:  # fmt: skip
    """Loads a run with its data; draws `images` of each unseen domain, or takes all (None)."""
    algorithm, info = checkpoint.load(folder)
    if not (adapts(algorithm) or has_pose(algorithm) or image_norms(algorithm)):
        raise UserError(
            f"{info.algorithm!r} ({info.variant}) of {folder} does not adapt to the image: it has "
            "neither style nor pose nor image norm."
        )
    if not read_config(folder).targets:
        raise UserError(
            f"{folder} was trained on all domains, and the study needs images of an unseen one. "
            "Give runs with a --target; those of --estimate are in the folder estimate of the run."
        )
    machine = machine or read_machine(folder)
    device = single_device(machine.accelerator)
    source, config = reopen_source(read_config(folder), machine, NoProgress(), lambda text: None)
    opened = open_scored(
        folder, algorithm, info, machine, device, needs_images=True, progress=NoProgress(), say=say
    )
    drawn = {
        part.images.domain_name: Stream(images=images).draw(part.images)
        for part in opened.parts
        if part.role == "target"
    }
    centres = source.train.balanced(config.centre_images, config.seed)
    return StudiedRun(algorithm.to(device), centres, drawn, device)


def study_run(
    folder: Path, machine: Machine | None, progress: Progress, *, images: int | None = None,
    seed: int = 0, say: Say = lambda text: None,
) -> dict[str, Accuracies]:  # fmt: skip
    """Swaps all that a run's model reads from an image: `style`, `pose` and `statistics`.

    What the model does not read is left out.
    """
    run = open_study(folder, machine, images=images, say=say)
    found = {
        "style": swap_styles(run, progress, seed=seed),
        "pose": swap_poses(run, progress, seed=seed),
        "statistics": swap_statistics(run, progress, seed=seed),
    }
    return {swapped: accuracies for swapped, accuracies in found.items() if accuracies is not None}


@torch.inference_mode()
def swap_styles(run: StudiedRun, progress: Progress, *, seed: int = 0) -> Accuracies | None:
    """Returns the accuracy on each unseen domain with the style of each kind of donor.

    None where the model writes no classifier from a style.
    """
    algorithm, source, targets, device = run
    if not adapts(algorithm):
        return None
    count = len(source) + sum(len(part) for part in targets.values())
    with progress.bar("Reading images", count) as advance:
        source_styles = _read_features(algorithm, source, device, advance).features.style
        unseen = {
            name: _read_features(algorithm, part, device, advance) for name, part in targets.items()
        }
    generator = torch_generator(seed, "style-study")
    result = {}
    for name, images in unseen.items():
        others = [other.features.style for key, other in unseen.items() if key != name]
        other_domains = torch.cat(others) if others else source_styles
        result[name] = style_accuracies(algorithm, images, other_domains, source_styles, generator)
    return result


def style_accuracies(
    algorithm: Solo,
    images: LabelledFeatures,
    other_domains: Tensor,
    source: Tensor,
    generator: torch.Generator,
) -> dict[str, float]:
    """Returns the accuracy on one domain with the style of each kind of donor.

    `images` are those of the domain. `other_domains` are styles (N, S) of images of other unseen
    domains, `source` those of source images.
    """
    features, count = images.features, len(images.labels)
    styles = {
        "own": features.style,
        "same domain": features.style[random_derangement(count, generator)],
        "other domain": other_domains[
            torch.randint(len(other_domains), (count,), generator=generator)
        ],
        "mean": source.mean(0).expand_as(features.style),
    }
    logits = {n: algorithm.logits(features._replace(style=style)) for n, style in styles.items()}
    logits["prior"] = algorithm.prior_logits(features._replace(style=styles["mean"]))
    right = {name: chosen_classes(rows) == images.labels for name, rows in logits.items()}
    return {name: float(values.double().mean()) for name, values in right.items()}


@torch.inference_mode()
def swap_statistics(run: StudiedRun, progress: Progress, *, seed: int = 0) -> Accuracies | None:
    """Returns the accuracy on each unseen domain with the statistics of each kind of donor.

    None where the model has no image norm.
    """
    algorithm, source, targets, _ = run
    if not image_norms(algorithm):
        return None
    generator = numpy_generator(seed, "statistics-study")
    others = torch_generator(seed, "statistics-study")
    result = {}
    total = sum(map(len, targets.values())) * len(STATISTICS)
    with progress.bar("Swapping statistics", total) as advance:
        for name, part in targets.items():
            foreign = [other for key, other in targets.items() if key != name] or [source]
            which = np.repeat(np.arange(len(foreign)), [len(other) for other in foreign])
            index = np.concatenate([np.arange(len(other)) for other in foreign])
            drawn = generator.integers(len(which), size=len(part))
            first = np.zeros(len(part), dtype=np.int64)
            same = random_derangement(len(part), others).numpy()
            donors = {
                "own": _Donors([part], first, np.arange(len(part))),
                "same domain": _Donors([part], first, same),
                "other domain": _Donors(foreign, which[drawn], index[drawn]),
                "none": None,
            }
            result[name] = {
                kind: _accuracy_with_statistics(run, part, donor, advance)
                for kind, donor in donors.items()
            }
    return result


class _Donors(NamedTuple):
    """The donor image of each image: image `row` of part `which`."""

    parts: list[LabelledImages]
    which: Ints  # (N,)
    row: Ints  # (N,)


def _read_features(
    algorithm: Solo, part: LabelledImages, device: torch.device, advance: Callable[[int], None]
) -> LabelledFeatures:
    found, labels = [], []
    for batch in input_batches(part):
        found.append(algorithm.features(batch.x.to(device)))
        labels.append(batch.y)
        advance(len(batch.y))
    features = Features(*(torch.cat(tensors) for tensors in zip(*found, strict=True)))
    return LabelledFeatures(features, torch.cat(labels).to(device))


def _accuracy_with_statistics(
    run: StudiedRun,
    part: LabelledImages,
    donors: _Donors | None,
    advance: Callable[[int], None],
) -> float:
    """Sends each donor through the network beside its image; a donor is normalised by itself."""
    correct = 0
    size = inference_batch_size(part.images.take([0]).numel())
    for start in range(0, len(part), size):
        rows = np.arange(start, min(start + size, len(part)))
        x, count, donor = part.images.take(rows), len(rows), None
        if donors is not None:
            given = gather(donors.parts, donors.which[rows], donors.row[rows])
            x = torch.cat([x, given])  # (2 B, C, H, W)
            donor = torch.arange(count, 2 * count, device=run.device).repeat(2)
        with run.algorithm.all_readings(), donor_statistics(run.algorithm, donor):
            logits = run.algorithm(to_unit(x).to(run.device))[:count]
        correct += int((chosen_classes(logits).cpu().numpy() == part.labels[rows]).sum())
        advance(count)
    return correct / len(part)
