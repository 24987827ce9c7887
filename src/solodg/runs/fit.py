"""fit(): the only place with an optimiser.

A run is a pure function of its configuration: whatever is random in a step is seeded by the run's
seed and the step's number. So a run that was killed and resumed ends with the same weights as one
that was not.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from lightning_fabric import Fabric
from torch import Tensor

from solodg.algorithms import Algorithm
from solodg.errors import UserError
from solodg.progress import NoProgress, Progress
from solodg.runs.config import Decay
from solodg.seeding import derive, torch_generator
from solodg.storage import append_line, read_lines, read_tensors, write_lines, write_tensors
from solodg.types import Batch, Episode

STATE, METRICS = "state.safetensors", "metrics.jsonl"
LOG_EVERY = 10

Result = TypeVar("Result")
Transform = Callable[[Tensor, torch.Generator], Tensor]  # pixels -> model inputs, at random


class Episodes(Protocol):
    def episodes(self, start: int, stop: int, rank: int = 0) -> Iterator[Episode]: ...


@dataclass(frozen=True)
class Schedule:
    """How long and how fast."""

    steps: int
    validate_every: int
    learning_rate: float
    backbone_learning_rate: float
    weight_decay: float
    seed: int
    decay: Decay = "constant"  # how the learning rates fall; see `factor`
    average: float | None = None  # what is validated and kept is a moving average of the weights
    stop: int | None = None  # before the last step, the schedule being that of all steps

    @property
    def last(self) -> int:
        return self.stop or self.steps

    def factor(self, step: int) -> float:
        """Returns the factor of the learning rates at a step, the first being step 1.

        `cosine` falls to zero along half a cosine; `step` falls to a tenth after 60% of the steps,
        as in the code of the paper's authors.
        """
        if self.decay == "cosine":
            return 0.5 * (1 + math.cos(math.pi * (step - 1) / self.steps))
        return 0.1 if self.decay == "step" and step > 0.6 * self.steps else 1.0


class Score(NamedTuple):
    """Of source validation; compared in this order."""

    accuracy: float
    negative_nll: float


class Hooks(Protocol):
    """What fit() asks of the run around it."""

    def validate(self, algorithm: Algorithm) -> Score:
        """Finalise in eval mode and score on source validation images."""

    def selected(self, algorithm: Algorithm, step: int, score: Score) -> None:
        """Save: this is the best model so far."""


def fit(
    fabric: Fabric,
    algorithm: Algorithm,
    loader: Episodes,
    transform: Transform,
    schedule: Schedule,
    hooks: Hooks,
    folder: Path,
    progress: Progress | None = None,
    watch: Callable[[dict[str, float]], None] = lambda metrics: None,
) -> None:
    """Train from the beginning, or from the state that a killed run left in `folder`."""
    model, optimizer = fabric.setup(algorithm, build_optimizer(algorithm, schedule))
    model.mark_forward_method("losses")
    kept = algorithm if schedule.average is None else copy.deepcopy(algorithm)
    start, best = _restore(fabric, algorithm, kept, optimizer, folder)
    rates = [group["lr"] for group in optimizer.param_groups]
    episodes = loader.episodes(start, schedule.last, fabric.global_rank)
    with (progress or NoProgress()).bar("Training", schedule.last, start) as advance:
        for step, episode in enumerate(episodes, start=start + 1):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * schedule.factor(step)
            losses = train_step(fabric, model, optimizer, episode, transform, schedule.seed, step)
            if schedule.average is not None:
                _average(kept, algorithm, schedule.average, step)
            if step % LOG_EVERY == 0 or step == schedule.last:
                line = {"step": step} | {name: v.item() for name, v in losses.items()}
                _log(fabric, folder, line, watch)
                advance(0, f"loss {line['loss']:.3f}{_best_note(best)}")
            if step % schedule.validate_every == 0 or step == schedule.last:
                best = _select(fabric, kept, step, best, hooks, folder, watch)
                _save_state(fabric, algorithm, kept, optimizer, folder, step, best)
            advance(1)


@torch.no_grad()
def _average(kept: Algorithm, algorithm: Algorithm, decay: float, step: int) -> None:
    """Move the kept weights towards the current ones; at first fast, since those were random."""
    share = 1 - min(decay, step / (step + 9))
    for own, new in zip(kept.state_dict().values(), algorithm.state_dict().values(), strict=True):
        if own.is_floating_point():
            own.lerp_(new, share)
        else:
            own.copy_(new)


def build_optimizer(algorithm: Algorithm, schedule: Schedule) -> torch.optim.Optimizer:
    """Adam; the backbone has a learning rate of its own."""
    backbone = {id(p) for p in algorithm.backbone.parameters()}
    trained = [p for p in algorithm.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) not in backbone], "lr": schedule.learning_rate},
        {
            "params": [p for p in trained if id(p) in backbone],
            "lr": schedule.backbone_learning_rate,
        },
    ]
    filled = [group for group in groups if group["params"]]
    return torch.optim.Adam(filled, weight_decay=schedule.weight_decay, fused=True)


def train_step(
    fabric: Fabric,
    model: Any,
    optimizer: torch.optim.Optimizer,
    episode: Episode,
    transform: Transform,
    seed: int,
    step: int,
) -> dict[str, Tensor]:
    """Updates the model with one episode and returns its losses, "loss" being their sum.

    `model` and `optimizer` are those of `fabric.setup`. The noise of a step depends on `seed` and
    `step` alone.
    """
    generator = torch_generator(seed, "augment", step, fabric.global_rank)
    ready = Episode(
        _to_inputs(fabric, episode.source, transform, generator),
        _to_inputs(fabric, episode.target, transform, generator),
        episode.num_context,
    )
    torch.manual_seed(derive(seed, "noise", step, fabric.global_rank))
    model.train()
    losses: dict[str, Tensor] = model.losses(ready)
    optimizer.zero_grad(set_to_none=True)
    fabric.backward(losses["loss"])
    optimizer.step()
    return losses


def _to_inputs(
    fabric: Fabric, batch: Batch, transform: Transform, generator: torch.Generator
) -> Batch:
    on_device: Batch = fabric.to_device(batch)
    return on_device._replace(x=transform(on_device.x, generator))


def _select(
    fabric: Fabric,
    algorithm: Algorithm,
    step: int,
    best: Score | None,
    hooks: Hooks,
    folder: Path,
    watch: Callable[[dict[str, float]], None],
) -> Score | None:
    """Validate, and keep the model if it is the best so far."""

    def validate() -> Score | None:
        algorithm.eval()
        score = hooks.validate(algorithm)
        line = {"step": step, "val_accuracy": score.accuracy, "val_nll": -score.negative_nll}
        _log(fabric, folder, line, watch)
        if best is not None and score <= best:
            return best
        hooks.selected(algorithm, step, score)
        return score

    return on_first(fabric, validate)


def on_first(fabric: Fabric, work: Callable[[], Result]) -> Result:
    """Do the work in the first process; all get its result, or fail with its error."""
    result: Any = None
    failure: Exception | None = None
    if fabric.is_global_zero:
        try:
            result = work()
        except (UserError, OSError) as error:
            failure = error
    result, failure = fabric.broadcast((result, failure))
    if failure is not None:
        raise failure
    return result  # type: ignore[no-any-return]


def _log(
    fabric: Fabric,
    folder: Path,
    line: dict[str, float],
    watch: Callable[[dict[str, float]], None],
) -> None:
    if fabric.is_global_zero:
        append_line(folder / METRICS, line)
        watch(line)


def _best_note(best: Score | None) -> str:
    return "" if best is None else f", best validation accuracy {100 * best.accuracy:.1f}%"


def _save_state(
    fabric: Fabric,
    algorithm: Algorithm,
    kept: Algorithm,
    optimizer: Any,
    folder: Path,
    step: int,
    best: Score | None,
) -> None:
    if not fabric.is_global_zero:
        return
    tensors = {f"model.{name}": tensor for name, tensor in algorithm.state_dict().items()}
    if kept is not algorithm:
        tensors |= {f"kept.{name}": tensor for name, tensor in kept.state_dict().items()}
    for index, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in values.items()}
    write_tensors(folder / STATE, tensors, {"step": step, "best": best})


def _restore(
    fabric: Fabric, algorithm: Algorithm, kept: Algorithm, optimizer: Any, folder: Path
) -> tuple[int, Score | None]:
    """Go on from the last state, if any; only the first process has to see its file."""
    tensors, header = on_first(fabric, lambda: _last_state(folder))
    if not tensors:
        return 0, None
    for prefix, own in (("model.", algorithm), ("kept.", kept)):
        state = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        if state:
            own.load_state_dict(state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            like = parameters[int(index)]
            # In the memory layout of its parameter, which a fused optimiser takes for granted.
            value = torch.empty_like(like).copy_(tensor) if tensor.shape == like.shape else tensor
            moments.setdefault(int(index), {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})
    return header["step"], Score(*header["best"]) if header["best"] else None


def _last_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of a killed run, if there is one; what was logged after it is forgotten."""
    tensors: dict[str, Tensor] = {}
    header: dict[str, Any] = {"step": 0}
    if (folder / STATE).is_file():
        tensors, header = read_tensors(folder / STATE)
    lines = read_lines(folder / METRICS)
    if lines:
        write_lines(folder / METRICS, [x for x in lines if x["step"] <= header["step"]])
    return tensors, header
