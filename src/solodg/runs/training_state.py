"""The state of a training: what changes from step to step, saved so that a killed run resumes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from solodg.algorithms import Algorithm
from solodg.errors import UserError, validation_error
from solodg.progress import Say
from solodg.runs.dense_average import DenseAverage, DenseState
from solodg.runs.devices import on_first
from solodg.runs.metrics_log import drop_lines_after
from solodg.storage.tensors import read_tensors, write_tensors

STATE = "state.safetensors"


class Score(NamedTuple):
    """The score of a model on source validation images; scores compare in this order."""

    accuracy: float
    negative_nll: float


@dataclass
class TrainingState:
    """A model in training: its weights, its optimizer, and how far it has come."""

    algorithm: Algorithm
    model: Any  # the same algorithm wrapped by Fabric, which moves it and synchronises processes
    optimizer: Any  # wrapped by Fabric too
    validated: Algorithm  # is scored and saved: `algorithm`, or a moving average of its weights
    step: int = 0  # updates made so far
    best: Score | None = None  # of the model that is saved; None: none has been validated yet
    dense: DenseAverage | None = None  # of SWAD, which then selects the model that is saved
    precision: Any = None  # of Fabric; holds the gradient scaler of 16-mixed

    @property
    def ended(self) -> bool:
        """Returns whether training may end before its last step."""
        return self.dense is not None and self.dense.ended

    def save(self, folder: Path) -> None:
        """Writes the state to `folder`; call it in the first process only."""
        tensors = {f"model.{name}": tensor for name, tensor in self.algorithm.state_dict().items()}
        if self.validated is not self.algorithm:
            averages = self.validated.state_dict()
            tensors |= {f"kept.{name}": tensor for name, tensor in averages.items()}
        if self.dense is not None:
            tensors |= {f"dense.{name}": mean for name, mean in self.dense.tensors().items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in values.items()}
        scaler = {} if self.precision is None else self.precision.state_dict()
        header = {"step": self.step, "best": self.best, "scaler": scaler}
        if self.dense is not None:
            header["dense"] = self.dense.state().model_dump()
        write_tensors(folder / STATE, tensors, header)

    def restore(self, fabric: Fabric, folder: Path, say: Say = lambda text: None) -> None:
        """Returns to the last state saved in `folder`, if there is one.

        The first process reads the file for all. Metrics logged after that state are dropped;
        `say` gets how many lines of metrics were damaged.
        """
        tensors, header = on_first(fabric, lambda: _read(folder, say))
        if not tensors:
            return
        try:
            self.algorithm.load_state_dict(_with_prefix(tensors, "model."))
            if self.validated is not self.algorithm:
                self.validated.load_state_dict(_with_prefix(tensors, "kept."))
            if self.dense is not None:
                means = _with_prefix(tensors, "dense.")
                self.dense.restore(self.algorithm, means, header.dense)
            self._restore_optimizer(_with_prefix(tensors, "optimizer."))
            if header.scaler:  # states of before have none
                self.precision.load_state_dict(header.scaler)
        except (RuntimeError, ValueError, LookupError) as error:
            raise UserError(f"{folder / STATE} does not fit this run: {error}") from error
        self.step, self.best = header.step, header.best

    def _restore_optimizer(self, tensors: dict[str, Tensor]) -> None:
        """Loads moments named `<number of the parameter>.<name of the moment>`."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            index, key = name.split(".", 1)
            like = parameters[int(index)]
            # A fused optimiser assumes that moments have the memory layout of their parameter.
            value = torch.empty_like(like).copy_(tensor) if tensor.shape == like.shape else tensor
            moments.setdefault(int(index), {})[key] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})


class _Header(BaseModel):
    """What a saved state holds beside tensors."""

    step: int = 0
    best: Score | None = None
    scaler: dict[str, Any] = Field(default_factory=dict)  # of 16-mixed precision
    dense: DenseState = Field(default_factory=DenseState)  # of SWAD


def _read(folder: Path, say: Say) -> tuple[dict[str, Tensor], _Header]:
    """Returns the tensors and the header of the saved state; no tensors if there is none."""
    tensors: dict[str, Tensor] = {}
    header = _Header()
    if (folder / STATE).is_file():
        tensors, found = read_tensors(folder / STATE)
        try:
            header = _Header.model_validate(found)
        except ValidationError as error:
            raise validation_error(f"{folder / STATE} is damaged", error) from error
    drop_lines_after(folder, header.step, say)
    return tensors, header


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
