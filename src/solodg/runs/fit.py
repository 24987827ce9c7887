"""Training steps: the only place with an optimiser.

    state = start(fabric, algorithm, schedule)
    for step, losses in fit(fabric, state, loader, transform, schedule):
        ...  # log, validate, save

A run is a pure function of its configuration: whatever is random in a step is seeded by the run's
seed and the step's number. So a run that was killed and resumed ends with the same weights as one
that was not.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from solodg.algorithms import Algorithm
from solodg.runs.config import SWAD, Decay, WeightAverage
from solodg.runs.dense_average import DenseAverage
from solodg.runs.training_state import TrainingState
from solodg.seeding import derive, torch_generator
from solodg.types import Batch, Episode, Transform


class Episodes(Protocol):
    """Where training reads its episodes from: one for each step."""

    def episodes(self, start: int, stop: int, rank: int = 0) -> Iterator[Episode]:
        """Yields the episodes of steps `start` to `stop`, those of the process `rank`."""


@dataclass(frozen=True)
class Schedule:
    """How many updates training makes, at which learning rates."""

    steps: int
    validate_every: int
    learning_rate: float
    backbone_learning_rate: float
    weight_decay: float
    seed: int
    decay: Decay = "constant"  # of the learning rates
    average: WeightAverage = None  # of the weights: decay of a moving average, or SWAD
    stop: int | None = None  # end here, earlier than `steps`; the learning rates do not change
    linear_steps: int = 0  # first steps, which leave the backbone's parameters as they are

    @property
    def last(self) -> int:
        """Returns the step after which training ends."""
        return self.stop or self.steps

    @property
    def averages_after(self) -> int:
        """Returns the step after which SWAD begins: it leaves linear steps out, if others follow.

        In these the validation loss may stop falling before the backbone is trained at all.
        """
        return self.linear_steps if self.linear_steps < self.last else 0

    def factor(self, step: int) -> float:
        """Returns the factor of the learning rates at a step; the first step is 1.

        `cosine` falls to zero along half a cosine; `step` falls to a tenth after 60% of the steps,
        as in the code of the paper's authors. In the linear steps the factor is 1; the decay counts
        the steps after them.
        """
        step, steps = step - self.linear_steps, self.steps - self.linear_steps
        if step < 1:
            return 1.0
        if self.decay == "cosine":
            return 0.5 * (1 + math.cos(math.pi * (step - 1) / steps))
        return 0.1 if self.decay == "step" and step > 0.6 * steps else 1.0

    def validates_at(self, step: int) -> bool:
        """Returns whether the model is validated after a step; after the last one it always is."""
        return step % self.validate_every == 0 or step == self.last


def start(fabric: Fabric, algorithm: Algorithm, schedule: Schedule) -> TrainingState:
    """Prepares an algorithm for training: puts it on its device and gives it an optimizer."""
    model, optimizer = fabric.setup(algorithm, build_optimizer(algorithm, schedule))
    model.mark_forward_method("losses")
    moving = isinstance(schedule.average, float)
    validated = copy.deepcopy(algorithm) if moving else algorithm
    dense = DenseAverage(algorithm.train()) if schedule.average == SWAD else None
    precision = fabric.strategy.precision
    return TrainingState(algorithm, model, optimizer, validated, dense=dense, precision=precision)


def fit(
    fabric: Fabric,
    state: TrainingState,
    loader: Episodes,
    transform: Transform,
    schedule: Schedule,
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Trains from the step of `state` to the last one; yields each step and its losses.

    In the linear steps of the schedule the backbone's parameters get no update and no weight decay
    (LP-FT; Kumar et al., ICLR 2022); the statistics of its BatchNorms, unless they are frozen, are
    updated as in all other steps.

    Between two steps the caller may log, validate and save: `state` is complete then. With SWAD
    training ends once validation losses have ended the average.
    """
    rates = [group["lr"] for group in state.optimizer.param_groups]
    episodes = loader.episodes(state.step, schedule.last, fabric.global_rank)
    for step, episode in enumerate(episodes, start=state.step + 1):
        if state.ended:
            return
        for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * schedule.factor(step)
        inputs = _to_inputs(fabric, episode, transform, schedule.seed, step)
        torch.manual_seed(derive(schedule.seed, "noise", step, fabric.global_rank))
        state.model.train()
        held = state.algorithm.backbone.parameters() if step <= schedule.linear_steps else ()
        losses = update(state.model, state.optimizer, inputs, fabric.backward, held)
        if isinstance(schedule.average, float):
            _average(state.validated, state.algorithm, schedule.average, step)
        elif state.dense is not None and step > schedule.averages_after:
            state.dense.add(state.algorithm, step)
        state.step = step
        yield step, losses


def update(
    model: Algorithm,
    optimizer: torch.optim.Optimizer,
    episode: Episode,
    backward: Callable[[Tensor], None] = Tensor.backward,
    held: Iterable[nn.Parameter] = (),
) -> dict[str, Tensor]:
    """Makes one update of the weights from an episode of model inputs; returns its losses.

    It needs no run folder, so a benchmark or an estimate of duration measures the same work as
    training does. `backward` is Fabric's in training, for mixed precision and several processes.
    The parameters `held` stay as they are, and so do their moments in the optimizer.
    """
    losses = model.losses(episode)
    optimizer.zero_grad(set_to_none=True)
    backward(losses["loss"])
    for parameter in held:
        parameter.grad = None  # the optimizer then leaves it out, its weight decay included
    optimizer.step()
    return losses


def build_optimizer(algorithm: Algorithm, schedule: Schedule) -> torch.optim.Optimizer:
    """Returns Adam for all trained parameters; those of the backbone have their own rate.

    So have parts of which the algorithm says so.
    """
    apart: list[tuple[nn.Module, float]] = [(algorithm.backbone, schedule.backbone_learning_rate)]
    for part, of_backbone, factor in algorithm.other_rates():
        rate = schedule.backbone_learning_rate if of_backbone else schedule.learning_rate
        apart.append((part, rate * factor))
    known = {id(p) for part, _ in apart for p in part.parameters()}
    rest = [p for p in algorithm.parameters() if id(p) not in known]
    groups = [(rest, schedule.learning_rate), *((list(m.parameters()), rate) for m, rate in apart)]
    trained = [([p for p in group if p.requires_grad], rate) for group, rate in groups]
    filled = [{"params": group, "lr": rate} for group, rate in trained if group]
    return torch.optim.Adam(filled, weight_decay=schedule.weight_decay, fused=True)


@torch.no_grad()
def _average(averaged: Algorithm, algorithm: Algorithm, decay: float, step: int) -> None:
    """Moves the averaged weights towards the current ones.

    At first it moves them fast, since the average starts from random weights.
    """
    share = 1 - min(decay, step / (step + 9))
    tensors = zip(averaged.state_dict().values(), algorithm.state_dict().values(), strict=True)
    for average, current in tensors:
        if average.is_floating_point():
            average.lerp_(current, share)
        else:
            average.copy_(current)


def _to_inputs(
    fabric: Fabric, episode: Episode, transform: Transform, seed: int, step: int
) -> Episode:
    """Moves an episode of pixels to the device and turns it into model inputs, augmented."""
    generator = torch_generator(seed, "augment", step, fabric.global_rank)

    def to_inputs(pixels: Batch) -> Batch:
        batch: Batch = fabric.to_device(pixels)
        return batch._replace(x=transform(batch.x, generator))

    return Episode(to_inputs(episode.source), to_inputs(episode.target), episode.num_context)
