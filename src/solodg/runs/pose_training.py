"""Trains the pose network, before the classifier and without its loss.

The rotation of each source domain is known (`domain_rotations`). So every training image can be
brought to one common orientation and from there to any angle, and the network learns to tell that
angle. The angles reach as far to either side of the mean orientation as the outermost sources lie
apart, so that an unseen domain may be rotated by more than any source.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from solodg.algorithms import Algorithm
from solodg.data import SourceData
from solodg.data.episodes import EpisodeLoader, EpisodeSampler
from solodg.data.transforms import without_flip
from solodg.models.backbones import Backbone
from solodg.models.extractor import Extractor
from solodg.models.pose import PoseNetwork, rotate, shrink
from solodg.runs.devices import on_first
from solodg.runs.domain_rotations import DomainRotations, domain_rotations
from solodg.runs.fit import Schedule, fit, start
from solodg.runs.workplace import Workplace
from solodg.types import Episode, Transform

_LEARNING_RATE = 1e-3
_MAX_STEPS = 1000


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
    work: Workplace,
    backbone: Backbone,
    source: SourceData,
    sampler: EpisodeSampler,
    transform: Transform,
    *,
    steps: int,
    seed: int,
) -> None:
    """Trains the pose network of a backbone on the source images, for at most 1,000 steps.

    Mirrored images would have the angle of their domain with the other sign: there are none.
    """
    assert backbone.pose is not None
    rotations = on_first(work.fabric, partial(domain_rotations, source.train, seed))
    if not rotations.explain:
        work.say(
            "These domains do not differ by rotation: the pose network learns to leave images as "
            "they are."
        )
    task = _AngleTask(backbone.pose.requires_grad_(True), rotations)
    steps = min(steps, _MAX_STEPS)
    schedule = Schedule(
        steps, steps, _LEARNING_RATE, _LEARNING_RATE, weight_decay=0.0, seed=seed, decay="cosine"
    )
    state = start(work.fabric, task, schedule)
    loader = EpisodeLoader(source.train, sampler, workers=work.machine.workers)
    with work.progress.bar("Training the pose network", steps) as advance:
        for _ in fit(work.fabric, state, loader, without_flip(transform), schedule):
            advance(1)
    backbone.pose.requires_grad_(False)
    backbone.pose.eval()
