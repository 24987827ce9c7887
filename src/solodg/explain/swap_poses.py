"""Swaps the poses of images: part of the swap study (swap_study.py)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from solodg.algorithms import Algorithm
from solodg.algorithms.solo_code.method import SoloCode
from solodg.algorithms.solo_code.pose import mean_pose
from solodg.data import LabelledImages
from solodg.explain.studied_run import Accuracies, StudiedRun, random_derangement
from solodg.models.backbones import Backbone
from solodg.models.pose import rotate
from solodg.progress import Progress
from solodg.runs.metrics import chosen_classes
from solodg.runs.opened_data import input_batches
from solodg.seeding import torch_generator

POSES = ("own", "same domain", "other domain", "mean", "none")


class _PoseModel(NamedTuple):
    """A model that estimates poses: angles (B,), or the affine maps (B, 2, 3) of `solo_code`."""

    estimate: Callable[[Tensor], Tensor]  # images -> poses
    logits: Callable[[Tensor, Tensor], Tensor]  # images and the poses to undo -> (B, C)
    mean: Callable[[Tensor], Tensor]  # poses -> one pose
    none: Tensor  # the pose that changes nothing


def has_pose(algorithm: Algorithm) -> bool:
    """Returns whether a model estimates the pose of each image."""
    return _pose_model(algorithm) is not None


@torch.inference_mode()
def swap_poses(run: StudiedRun, progress: Progress, *, seed: int = 0) -> Accuracies | None:
    """Returns the accuracy on each unseen domain with the pose of each kind of donor.

    None where the model estimates no pose.
    """
    model = _pose_model(run.algorithm)
    if model is None:
        return None
    source_poses = _poses(model, run.source, run.device)
    poses = {name: _poses(model, part, run.device) for name, part in run.targets.items()}
    generator = torch_generator(seed, "frame-study")
    result = {}
    images = sum(map(len, run.targets.values()))
    with progress.bar("Swapping poses", images * len(POSES)) as advance:
        for name, part in run.targets.items():
            others = [found for key, found in poses.items() if key != name]
            other_poses, count = torch.cat(others) if others else source_poses, len(part)
            mean, none = model.mean(source_poses), model.none.to(run.device)
            donors = {
                "own": poses[name],
                "same domain": poses[name][random_derangement(count, generator)],
                "other domain": other_poses[
                    torch.randint(len(other_poses), (count,), generator=generator)
                ],
                "mean": mean.expand(count, *mean.shape),
                "none": none.expand(count, *none.shape),
            }
            result[name] = {
                donor: _accuracy(model, part, given, run.device, advance)
                for donor, given in donors.items()
            }
    return result


def _pose_model(algorithm: Algorithm) -> _PoseModel | None:
    if isinstance(algorithm, SoloCode) and algorithm.frame is not None:
        code = algorithm
        return _PoseModel(
            algorithm.frame.poses,
            lambda x, maps: code.logits(code.features(x, maps)),
            mean_pose,
            torch.eye(2, 3),
        )
    backbone = algorithm.backbone
    if not isinstance(backbone, Backbone) or backbone.pose is None:
        return None
    readings = backbone.readings

    def logits(x: Tensor, angles: Tensor) -> Tensor:
        with backbone.reading_as(readings, upright=False):
            found: Tensor = algorithm(rotate(x, -angles))
        return found

    return _PoseModel(backbone.pose.angles, logits, _mean_angle, torch.zeros(()))


def _mean_angle(angles: Tensor) -> Tensor:
    """Returns the direction of the mean of unit vectors at these angles (B,)."""
    return torch.atan2(angles.sin().mean(), angles.cos().mean())


def _poses(model: _PoseModel, part: LabelledImages, device: torch.device) -> Tensor:
    return torch.cat([model.estimate(batch.x.to(device)) for batch in input_batches(part)])


def _accuracy(
    model: _PoseModel,
    part: LabelledImages,
    poses: Tensor,
    device: torch.device,
    advance: Callable[[int], None],
) -> float:
    correct, start = 0, 0
    for batch in input_batches(part):
        logits = model.logits(batch.x.to(device), poses[start : start + len(batch.y)])
        correct += int((chosen_classes(logits).cpu() == batch.y).sum())
        start += len(batch.y)
        advance(len(batch.y))
    return correct / len(part)
