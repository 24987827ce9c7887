"""The selected model on disk: `model.json` describes it, `model.safetensors` holds its weights.

Together they are all that prediction needs: weights, class centres of the sources, classes,
preprocessing. Never pickle.
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from torch import nn

from solodg.algorithms import ALGORITHMS, Algorithm, build_algorithm
from solodg.errors import UserError, unknown_name, validation_error
from solodg.models.backbones import build_backbone
from solodg.models.weights import not_finite
from solodg.runs.defaults import checked_arguments
from solodg.runs.model_info import MODEL_FORMAT, READABLE_FORMATS, ModelInfo
from solodg.runs.stored_arguments import complete_arguments, current_name
from solodg.seeding import unchanged_generators
from solodg.storage import read_json, write_json
from solodg.storage.tensors import read_tensors, write_tensors

DESCRIPTION, WEIGHTS = "model.json", "model.safetensors"


def save_info(folder: Path, info: ModelInfo) -> None:
    """Writes the description of the model to a run folder."""
    write_json(folder / DESCRIPTION, info.model_dump())


def save_weights(
    folder: Path,
    algorithm: Algorithm,
    *,
    step: int,
    validation: dict[str, float],
    first_step: int | None = None,
    runs: int | None = None,
    backbone: nn.Module | None = None,
) -> None:
    """Writes the weights of the selected model, with its step and its validation score.

    Weights that are a mean over steps (SWAD) are those of steps `first_step` to `step`. Those that
    are a mean over `runs` name their number, and `step` is the latest that a run selected.
    An algorithm that was trained on stored features or maps does not contain the `backbone` that
    computed them, or its last stages alone. Give it, and its other weights are saved under the
    names that a model for images expects.
    """
    state = algorithm.state_dict()
    if backbone is not None:
        whole = {f"backbone.{name}": tensor for name, tensor in backbone.state_dict().items()}
        state = whole | state
    header = {"step": step, "validation": validation}
    if first_step is not None:
        header["first_step"] = first_step
    if runs is not None:
        header["runs"] = runs
    write_tensors(folder / WEIGHTS, state, header)


def load_info(folder: Path) -> ModelInfo:
    """Reads the description of the model in a run folder.

    Arguments that an earlier format does not name have the defaults of its time.
    """
    path = folder / DESCRIPTION
    if not path.is_file():
        raise UserError(
            f"{folder} holds no model ({DESCRIPTION} is missing). Give the folder of a finished "
            "`solodg train` run."
        )
    found = read_json(path).get("format")
    if found not in READABLE_FORMATS:
        raise UserError(
            f"{path} is of format {found!r}; this version reads "
            f"{' and '.join(map(repr, READABLE_FORMATS))}. Train again, or install the version of "
            "solodg that wrote it."
        )
    info = read_json(path, ModelInfo, checksum_required=found != READABLE_FORMATS[0])
    algorithm = current_name(info.algorithm, before_pose=found != MODEL_FORMAT)
    arguments = complete_arguments(algorithm, info.arguments)
    return info.model_copy(update={"algorithm": algorithm, "arguments": arguments})


def load(folder: Path) -> tuple[Algorithm, ModelInfo]:
    """Loads the model of a run folder in eval mode, with its description."""
    info = load_info(folder)
    if info.algorithm not in ALGORITHMS:
        raise unknown_name("algorithm", info.algorithm, ALGORITHMS)
    if not (folder / WEIGHTS).is_file():
        raise UserError(
            f"{folder} has no {WEIGHTS} yet: the run has not reached its first validation, or with "
            "--weight-average swad its end. Continue it with the same command and --resume."
        )
    state, _ = read_tensors(folder / WEIGHTS, checksum_required=info.has_checksum)
    broken = not_finite(state)
    if broken is not None:
        raise UserError(
            f"{folder / WEIGHTS} holds weights that are not finite, e.g. in {broken!r}: training "
            "diverged, or the file is damaged. Train again."
        )
    try:
        with unchanged_generators():
            algorithm = _build(info)
        algorithm.load_state_dict(state)
    except UserError as error:
        raise UserError(f"{folder / DESCRIPTION} describes no model: {error}") from error
    except (RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{folder / WEIGHTS} does not fit {DESCRIPTION}: {error}") from error
    return algorithm.eval(), info


def _build(info: ModelInfo) -> Algorithm:
    """Builds the described model with random weights."""
    backbone = build_backbone(
        info.backbone,
        channels=info.channels,
        image_size=info.image_size,
        image_norm=info.image_norm,
        pose=info.pose,
    )
    return build_algorithm(
        info.algorithm,
        backbone,
        num_classes=len(info.classes),
        num_domains=len(info.source_domains),
        **checked_arguments(info.algorithm, info.arguments),
    )


class Selection(BaseModel):
    """The step whose weights are saved, and their score on source validation images.

    With `first_step` they are the mean of the weights of all steps from that one on; with `runs`
    the mean of those that so many runs selected, at `step` or before.
    """

    step: int
    first_step: int | None = None
    runs: int | None = None
    validation: dict[str, float]


def selection(folder: Path) -> dict[str, Any]:
    """Returns the step and the source-validation score of the saved weights.

    `first_step` or `runs` is among them where the weights are a mean over steps or runs.
    """
    _, header = read_tensors(folder / WEIGHTS)
    try:
        return Selection.model_validate(header).model_dump(exclude_none=True)
    except ValidationError as error:
        raise validation_error(f"{folder / WEIGHTS} is damaged", error) from error


def selected_steps(chosen: dict[str, Any]) -> str:
    """Returns a `selection` in words, e.g. "step 30", or "mean of steps 10 to 30"."""
    if "runs" in chosen:
        return f"mean of the weights of {chosen['runs']} run{'s' * (chosen['runs'] != 1)}"
    if "first_step" in chosen:
        return f"mean of steps {chosen['first_step']} to {chosen['step']}"
    return f"step {chosen['step']}"
