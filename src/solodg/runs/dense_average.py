"""SWAD: the mean of the weights of every step while the source validation loss is low.

Cha et al., "SWAD: Domain Generalization by Seeking Flat Minima", NeurIPS 2021, Algorithm 1, with
N_s = 3, N_e = 6 and r = 1.3. Validation losses decide where the average starts and ends
(`averaged_span`). The first averaged weights are those of the validation where it starts, the last
ones those of the validation where it ends, or those of the last step.

If the loss falls until the end, the average never starts. The algorithm in the paper then averages
all steps, the authors' code those after the last validation but one. We do as the code does. In
all else we follow the paper: the code also averages steps before the start, and some steps twice.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

START_PATIENCE = 3  # N_s: validations, the first of which must have the lowest loss
END_PATIENCE = 6  # N_e: validations in a row whose loss is too high
TOLERANCE = 1.3  # r: a loss is too high above this many times the mean of those at the start

_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)


class Span(NamedTuple):
    """The validations between which weights are averaged, counted from 0."""

    start: int
    limit: float  # of losses; a higher one is too high
    end: int | None  # None: it has not ended


def averaged_span(losses: list[float]) -> Span | None:
    """Returns the span that follows from all validation losses so far; None: it has not started.

    The span starts at the first validation whose loss is the lowest of the three from it on. It
    ends at the last validation before six in a row whose losses are higher than 1.3 times the mean
    of those three.
    """
    for start in range(len(losses) - START_PATIENCE + 1):
        window = losses[start : start + START_PATIENCE]
        if window[0] == min(window):
            break
    else:
        return None
    limit = TOLERANCE * sum(window) / START_PATIENCE
    low = start  # the last validation whose loss is not too high
    for number in range(start + 1, len(losses)):
        if losses[number] <= limit:
            low = number
        elif number - low == END_PATIENCE:
            return Span(start, limit, low)
    return Span(start, limit, None)


class Mean:
    """A running mean of named tensors over steps that follow each other."""

    def __init__(self, tensors: Mapping[str, Tensor], last_step: int, count: int = 1) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self.last_step, self.count = last_step, count

    @property
    def first_step(self) -> int:
        """Returns the first step of the mean."""
        return self.last_step - self.count + 1

    def add(self, tensors: Mapping[str, Tensor], count: int = 1) -> None:
        """Adds the tensors of the next step, or their mean over the next `count` steps."""
        self.last_step, self.count = self.last_step + count, self.count + count
        for name, mean in self.tensors.items():
            mean.lerp_(tensors[name], count / self.count)


class DenseState(BaseModel):
    """The part of a dense average that is not tensors, for the header of a saved state."""

    losses: list[float] = Field(default_factory=list)
    steps: dict[str, tuple[int, int]] = Field(default_factory=dict)  # last step, count; by name


class DenseAverage:
    """Averages the trained tensors of an algorithm over the steps that SWAD chooses.

    `add` takes the weights of each step, `validated` the loss of each validation. After the last
    validation `load_into` gives an algorithm the result. The trained tensors are the parameters
    that have gradients and, where training updates them, the running statistics of BatchNorms,
    which the authors' code computes anew instead. Other buffers are those of the last step, until
    `Algorithm.finalize` computes them for the averaged weights.

    Between two validations only a mean is kept. So there are at most four copies of the trained
    tensors before the start, and three after it; two more for a moment at a validation.
    """

    def __init__(self, algorithm: nn.Module) -> None:
        self._names = _trained_names(algorithm)
        self._losses: list[float] = []
        # Before the start: "at.3" are the weights at validation 3, which may become the start;
        # "to.3" is the mean of the steps after validation 2 up to 3. After the start: "low" is the
        # mean up to the last validation whose loss was not too high, "high" that of later steps.
        self._means: dict[str, Mean] = {}
        self._current: Mean | None = None  # of the steps since the last validation

    @property
    def ended(self) -> bool:
        """Returns whether the average has ended: further steps do not change it."""
        span = averaged_span(self._losses)
        return span is not None and span.end is not None

    @property
    def started(self) -> bool:
        """Returns whether validation losses have chosen the start of the average."""
        return "low" in self._means

    def add(self, algorithm: nn.Module, step: int) -> None:
        """Takes the weights of the algorithm after a step."""
        if self._current is None:
            self._current = Mean(self._trained(algorithm), step)
        else:
            self._current.add(self._trained(algorithm))

    def validated(self, algorithm: nn.Module, loss: float) -> None:
        """Takes the validation loss of the weights that were added last.

        Validations before the first step that was added do not count.
        """
        if self._current is None or self.ended:
            return
        current, self._current = self._current, None
        number = len(self._losses)
        self._losses.append(loss)
        if not self.started:
            self._means[f"at.{number}"] = Mean(self._trained(algorithm), current.last_step)
            self._means[f"to.{number}"] = current
            self._try_to_start()
        else:
            self._extend(current, loss)
        if self.ended:
            del self._means["high"]

    @torch.no_grad()
    def load_into(self, algorithm: nn.Module) -> range:
        """Gives an algorithm the averaged weights; returns the steps that they are the mean of.

        Call it after a validation: they are the weights to save if training ends there.
        """
        if not self.started:
            mean = self._means[f"to.{len(self._losses) - 1}"]
        else:
            low = self._means["low"]
            mean = Mean(low.tensors, low.last_step, low.count)
            if "high" in self._means:
                mean.add(self._means["high"].tensors, self._means["high"].count)
        for name, tensor in self._trained(algorithm).items():
            tensor.copy_(mean.tensors[name])
        return range(mean.first_step, mean.last_step + 1)

    def tensors(self) -> dict[str, Tensor]:
        """Returns all means, to be saved after a validation."""
        return {
            f"{mean}.{name}": tensor
            for mean, kept in self._means.items()
            for name, tensor in kept.tensors.items()
        }

    def state(self) -> DenseState:
        """Returns what has to be saved beside `tensors`."""
        steps = {name: (mean.last_step, mean.count) for name, mean in self._means.items()}
        return DenseState(losses=self._losses, steps=steps)

    def restore(
        self, algorithm: nn.Module, tensors: Mapping[str, Tensor], state: DenseState
    ) -> None:
        """Returns to a saved state, on the device of the algorithm."""
        self._losses, self._current = list(state.losses), None
        like = self._trained(algorithm)
        self._means = {
            mean: Mean({n: tensors[f"{mean}.{n}"].to(t.device) for n, t in like.items()}, *steps)
            for mean, steps in state.steps.items()
        }

    def _try_to_start(self) -> None:
        """Starts the average if the losses say so; otherwise drops what no later start needs."""
        span, number = averaged_span(self._losses), len(self._losses) - 1
        if span is None:
            self._means.pop(f"at.{number - START_PATIENCE + 1}", None)
            self._means.pop(f"to.{number - START_PATIENCE + 2}", None)
            return
        window, self._means = self._means, {}
        self._means["low"] = window[f"at.{span.start}"]
        for later in range(span.start + 1, number + 1):
            self._extend(window[f"to.{later}"], self._losses[later])

    def _extend(self, steps: Mean, loss: float) -> None:
        """Adds the steps up to a validation, whose loss decides whether they are sure to stay."""
        span = averaged_span(self._losses)
        assert span is not None
        if "high" in self._means:
            self._means["high"].add(steps.tensors, steps.count)
        else:
            self._means["high"] = steps
        if loss <= span.limit:
            high = self._means.pop("high")
            self._means["low"].add(high.tensors, high.count)

    def _trained(self, algorithm: nn.Module) -> dict[str, Tensor]:
        tensors = algorithm.state_dict()
        return {name: tensors[name] for name in self._names}


def _trained_names(algorithm: nn.Module) -> list[str]:
    """Returns the names of all tensors that training changes, for an algorithm in training mode."""
    names = [name for name, p in algorithm.named_parameters() if p.requires_grad]
    for prefix, module in algorithm.named_modules():
        if isinstance(module, _BATCH_NORMS) and module.training:
            own = module.named_buffers(prefix, recurse=False)
            names += [name for name, buffer in own if buffer.is_floating_point()]
    return names
