"""Selects the model of a training: by source validation, or as the mean that SWAD chooses."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from solodg.data import LabelledImages
from solodg.runs import checkpoint
from solodg.runs.devices import on_first
from solodg.runs.metrics_log import Log
from solodg.runs.training_state import Score, TrainingState
from solodg.runs.validation import validate
from solodg.runs.workplace import Workplace


@dataclass(frozen=True)
class Selection:
    """Where models are validated, and where the selected one is saved."""

    work: Workplace
    val: LabelledImages
    centres: LabelledImages
    log: Log
    folder: Path | None  # None: only the scores are logged
    backbone: nn.Module | None = None  # is saved too, where training reads its stored features

    def validate(self, state: TrainingState, *, is_last: bool) -> Score:
        """Validates the model and saves what is selected; returns the best score so far.

        The best model so far is saved at once. With SWAD the averaged model is saved at the end,
        whatever the scores of single steps are. Call it in all processes.
        """
        fabric = self.work.fabric
        if state.dense is None:
            return on_first(fabric, partial(self._keep_best, state))
        score = on_first(fabric, partial(self._score, state, "val"))
        state.dense.validated(state.algorithm, -score.negative_nll)
        if is_last or state.ended:
            on_first(fabric, partial(self._keep_average, state))
        return score if state.best is None else max(score, state.best)

    def _keep_best(self, state: TrainingState) -> Score:
        """Validates the model, and saves it if it is the best so far."""
        score = self._score(state, "val")
        if state.best is not None and score <= state.best:
            return state.best
        self._save(state, score, state.step)
        return score

    def _keep_average(self, state: TrainingState) -> None:
        """Validates and saves the averaged model, whose weights then replace the trained ones."""
        assert state.dense is not None
        steps = state.dense.load_into(state.algorithm)
        what = f"The model is the mean of the weights of steps {steps[0]} to {steps[-1]} (SWAD)."
        if state.ended:
            what += " The validation loss has risen since, so training ends here."
        elif not state.dense.started:
            what += (
                " The validation loss was still falling: more --steps, or a smaller "
                "--validate-every, may give a better mean."
            )
        self.work.say(what)
        self._save(state, self._score(state, "averaged_val"), steps[-1], first_step=steps[0])

    def _score(self, state: TrainingState, name: str) -> Score:
        model = state.validated.eval()
        score = validate(model, self.val, self.centres, self.work.fabric.device)
        self.work.clock.save()
        values = {f"{name}_accuracy": score.accuracy, f"{name}_nll": -score.negative_nll}
        self.log({"step": state.step} | values)
        return score

    def _save(
        self, state: TrainingState, score: Score, step: int, first_step: int | None = None
    ) -> None:
        if self.folder is not None:
            checkpoint.save_weights(
                self.folder,
                state.validated,
                step=step,
                first_step=first_step,
                validation={"accuracy": score.accuracy, "nll": -score.negative_nll},
                backbone=self.backbone,
            )
