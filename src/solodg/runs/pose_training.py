"""Trains the pose network, before the classifier and without its loss.

The rotation of each source domain is known (`domain_rotations`). So every training image can be
brought to one common orientation and from there to any angle, and the network learns to tell that
angle. The angles reach as far beyond those of the sources as the sources lie apart, so that an
unseen domain may be rotated by more than any source.
"""

from collections.abc import Callable

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor

from solodg.algorithms import Algorithm
from solodg.data import SourceData
from solodg.data.episodes import EpisodeLoader, EpisodeSampler
from solodg.models.backbones import Backbone
from solodg.models.extractor import Extractor
from solodg.models.pose import PoseNetwork, rotate, shrink
from solodg.runs.domain_rotations import DomainRotations
from solodg.runs.fit import Schedule, Transform, fit, start
from solodg.types import Episode

_LEARNING_RATE = 1e-3


class _AngleTask(Algorithm):
    """Learns the angle by which images were rotated from the common orientation."""

    def __init__(self, pose: PoseNetwork, rotations: DomainRotations) -> None:
        super().__init__(Extractor(), num_classes=1)
        self.pose = pose
        self.range = float(np.deg2rad(rotations.span))  # to either side
        angles = torch.from_numpy(np.deg2rad(rotations.angles)).float()
        self.register_buffer("domain_angles", angles)
        self.domain_angles: Tensor  # (D,)

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        """Returns the squared distance of the vectors from those of the true angles."""
        x, _, domain = episode.merged
        angles = self.range * (2 * torch.rand(len(x), device=x.device) - 1)
        with torch.autocast(x.device.type, enabled=False):
            rotated = rotate(shrink(x), angles - self.domain_angles[domain])
        vectors = self.pose.vectors(rotated)
        truth = torch.stack([angles.cos(), angles.sin()], dim=1)
        return {"loss": (vectors - truth).square().sum(1).mean()}


def train_pose(
    fabric: Fabric,
    backbone: Backbone,
    source: SourceData,
    rotations: DomainRotations,
    sampler: EpisodeSampler,
    transform: Transform,
    *,
    steps: int,
    seed: int,
    workers: int,
    advance: Callable[[int], None] = lambda steps: None,
) -> None:
    """Trains the pose network of a backbone on the source images."""
    assert backbone.pose is not None
    task = _AngleTask(backbone.pose.requires_grad_(True), rotations)
    schedule = Schedule(
        steps, steps, _LEARNING_RATE, _LEARNING_RATE, weight_decay=0.0, seed=seed, decay="cosine"
    )
    state = start(fabric, task, schedule)
    loader = EpisodeLoader(source.train, sampler, workers=workers)
    for _ in fit(fabric, state, loader, transform, schedule):
        advance(1)
    backbone.pose.requires_grad_(False)
    backbone.pose.eval()
