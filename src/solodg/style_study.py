"""Is it the single image? A trained model on its unseen domains, each image with whose style.

    own           the image's own: the method
    same domain   of another image of its domain, at random
    other domain  of an image of another domain, at random
    mean          the mean style of the source training images: no image at all
    prior         the classifier that the meta-prior writes from the source centres: no style

If `own` does not beat `same domain`, it is the domain and not the image that helps; if it does not
beat `mean`, the style does not help. The same is asked of the frame that an image writes
(`solo_plus`), `none` being no frame at all.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from solodg import checkpoint
from solodg.algorithms.solo import Solo
from solodg.algorithms.solo_plus import SoloPlus
from solodg.assembly import inputs, load_dataset, open_source, single_device
from solodg.config import Machine
from solodg.data import LabelledImages
from solodg.errors import UserError
from solodg.progress import Progress
from solodg.runfolder import read_config, read_machine
from solodg.seeding import torch_generator
from solodg.types import Features

FRAMES = ("own", "same domain", "other domain", "mean", "none")
STYLES = ("own", "same domain", "other domain", "mean", "prior")


class Observed(NamedTuple):
    features: Features
    labels: Tensor


@torch.inference_mode()
def style_study(
    folder: Path, machine: Machine | None, progress: Progress, *, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Accuracy by unseen domain and kind of style."""
    algorithm, centres, targets, device = _opened(folder, machine)
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
def frame_study(
    folder: Path, machine: Machine | None, progress: Progress, *, seed: int = 0
) -> dict[str, dict[str, float]] | None:
    """Accuracy by unseen domain and kind of frame; None where images write no frame."""
    algorithm, centres, targets, device = _opened(folder, machine)
    if not isinstance(algorithm, SoloPlus) or algorithm.frame is None:
        return None
    write = algorithm.frame.maps
    known = torch.cat([write(batch.x.to(device)) for batch in inputs(centres)])
    written = {
        name: torch.cat([write(batch.x.to(device)) for batch in inputs(part)])
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
                "same domain": written[name][torch.randperm(count, generator=generator)],
                "other domain": foreign[torch.randint(len(foreign), (count,), generator=generator)],
                "mean": known.mean(0).expand(count, 2, 3),
                "none": algorithm.frame.identity.expand(count, 2, 3),
            }
            result[name] = {
                kind: _framed_accuracy(algorithm, part, maps, device, advance)
                for kind, maps in kinds.items()
            }
    return result


def _framed_accuracy(
    algorithm: SoloPlus,
    part: LabelledImages,
    maps: Tensor,
    device: torch.device,
    advance: Callable[[int], None],
) -> float:
    right, start = 0, 0
    for batch in inputs(part):
        observed = algorithm.observe(batch.x.to(device), maps[start : start + len(batch.y)])
        right += int((algorithm.logits(observed).argmax(1).cpu() == batch.y).sum())
        start += len(batch.y)
        advance(len(batch.y))
    return right / len(part)


def _opened(
    folder: Path, machine: Machine | None
) -> tuple[Solo, LabelledImages, dict[str, LabelledImages], torch.device]:
    """The model, source images for its centres, and its target domains."""
    algorithm, info = checkpoint.load(folder)
    if not isinstance(algorithm, Solo):
        raise UserError(f"{info.algorithm!r} reads no style: only solo and its kin do.")
    machine = machine or read_machine(folder)
    device = single_device(machine.accelerator)
    source, config = open_source(read_config(folder), machine)
    targets = load_dataset(config, machine).targets(config.targets)
    centres = source.train.balanced(config.centre_images, config.seed)
    return algorithm.to(device), centres, targets, device


def _observe(
    algorithm: Solo, part: LabelledImages, device: torch.device, advance: Callable[[int], None]
) -> Observed:
    found, labels = [], []
    for batch in inputs(part):
        found.append(algorithm.observe(batch.x.to(device)))
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
        "same domain": features.style[torch.randperm(count, generator=generator)],
        "other domain": foreign[torch.randint(len(foreign), (count,), generator=generator)],
        "mean": known.mean(0).expand_as(features.style),
    }
    logits = {n: algorithm.logits(features._replace(style=style)) for n, style in styles.items()}
    logits["prior"] = algorithm.prior_logits(features._replace(style=styles["mean"]))
    return {name: float((v.argmax(1) == seen.labels).double().mean()) for name, v in logits.items()}
