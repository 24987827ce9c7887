"""Selection: which of the models of a training is kept."""

from pathlib import Path

from solodg.data import LabelledImages
from solodg.models.backbones import Backbone
from solodg.runs import checkpoint
from solodg.runs.metrics_log import Log
from solodg.runs.training_state import Score, TrainingState
from solodg.runs.validation import validate
from solodg.runs.workplace import Workplace


def select(
    work: Workplace,
    state: TrainingState,
    val: LabelledImages,
    centres: LabelledImages,
    log: Log,
    folder: Path | None,
    backbone: Backbone | None,
) -> Score:
    """Validates the model, and saves it to `folder` if it is the best so far.

    `backbone` is that of a model which reads stored features or maps. Returns the best score so
    far.
    """
    model = state.validated.eval()
    score = validate(model, val, centres, work.fabric.device)
    accuracy, nll = score.accuracy, -score.negative_nll
    work.clock.save()
    log({"step": state.step, "val_accuracy": accuracy, "val_nll": nll})
    if state.best is not None and score <= state.best:
        return state.best
    if folder is not None:
        checkpoint.save_weights(
            folder,
            model,
            step=state.step,
            validation={"accuracy": accuracy, "nll": nll},
            backbone=backbone,
        )
    return score


def progress_note(loss: float, best: Score | None) -> str:
    """Returns what a progress bar says of a training."""
    note = "" if best is None else f", best validation accuracy {100 * best.accuracy:.1f}%"
    return f"loss {loss:.3f}{note}"
