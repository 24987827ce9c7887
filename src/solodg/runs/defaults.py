"""Completes a configuration: chooses the settings that the user left open."""

import inspect
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from solodg.algorithms import ALGORITHMS
from solodg.data import DatasetSpec, dataset_spec
from solodg.errors import UserError, unknown_name, validation_error
from solodg.runs.config import ResolvedConfig, RunConfig

_ADAPTATION = "What adapts to an image has options of its own: --image-norm and --pose."


# Options of training by steps, which a classifier in closed form has not.
OF_STEPS = ("steps", "linear_steps", "learning_rate", "backbone_learning_rate", "validate_every",
            "weight_average")  # fmt: skip


def resolve(config: RunConfig) -> ResolvedConfig:
    """Returns the configuration with every open choice made, checked against the registries."""
    if isinstance(config, ResolvedConfig):
        return config
    spec = dataset_spec(config.dataset)
    config = _with_recipe(config)
    closed_form = is_closed_form(config)
    if closed_form:
        _check_solved(config)
        config = config.model_copy(update={"freeze_backbone": True})
    _check(config, spec)
    # A classifier on fixed features converges in far fewer steps than a whole network.
    steps = 1 if closed_form else config.steps or (600 if config.freeze_backbone else 2_000)
    _check_linear_steps(config, steps)
    frozen_norm = config.starts_from_weights if config.freeze_norm is None else config.freeze_norm
    values = {
        "arguments": algorithm_arguments(config),
        "steps": steps,
        "image_size": config.image_size or spec.image_size,
        "channels": config.channels or _channels(config, spec),
        "freeze_norm": frozen_norm,
        "learning_rate": config.learning_rate or _learning_rate(config),
        "backbone_learning_rate": config.backbone_learning_rate
        or (5e-5 if config.starts_from_weights else 1e-3),
        "validate_every": config.validate_every or max(1, min(200, steps // 5)),
        "targets": config.targets or spec.default_targets,
    }
    # All values are valid already. Validating them again could turn an integer of a recipe into a
    # float, and so change the key of a run.
    return ResolvedConfig.model_construct(**dict(config) | values)


def algorithm_arguments(config: RunConfig) -> dict[str, Any]:
    """Returns all arguments: defaults, then those of the variant, then those given, checked."""
    if config.algorithm not in ALGORITHMS:
        raise unknown_name("algorithm", config.algorithm, ALGORITHMS)
    kind = ALGORITHMS[config.algorithm]
    if config.variant not in kind.variants:
        raise unknown_name(f"variant of {config.algorithm}", config.variant, kind.variants)
    checked = checked_arguments(config.algorithm, config.arguments)
    return default_arguments(config.algorithm, config.variant) | checked


def default_arguments(algorithm: str, variant: str) -> dict[str, Any]:
    """Returns all arguments of an algorithm as they are where none is given."""
    return _default_arguments(algorithm) | ALGORITHMS[algorithm].variants[variant]


def is_closed_form(config: RunConfig) -> bool:
    """Returns whether the classifier is solved in closed form, and not trained."""
    return ALGORITHMS[config.algorithm].is_closed_form(algorithm_arguments(config))


def checked_arguments(algorithm: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments of an algorithm as their types, within the limits of those types.

    Raises `UserError` for an argument that the algorithm does not have, or that does not fit.
    """
    types = get_type_hints(ALGORITHMS[algorithm].__init__, include_extras=True)
    names = _default_arguments(algorithm)
    checked = {}
    for name, value in arguments.items():
        if not names:
            raise UserError(f"--set {name}: {algorithm} has no arguments. {_ADAPTATION}")
        if name not in names:
            raise unknown_name(f"argument of {algorithm}", name, names, _ADAPTATION)
        try:
            checked[name] = TypeAdapter(types[name]).validate_python(value)
        except ValidationError as error:
            raise validation_error(f"--set {name}={value}", error, fields=False) from error
    return checked


def _default_arguments(algorithm: str) -> dict[str, Any]:
    return {
        name: parameter.default
        for name, parameter in inspect.signature(ALGORITHMS[algorithm]).parameters.items()
        if name not in ("backbone", "num_classes", "num_domains")
    }


def _check(config: RunConfig, spec: DatasetSpec) -> None:
    """Raises `UserError` for options that exclude each other or that need another one."""
    if config.train_images and not spec.takes_train_images:
        raise UserError(
            f"--train-images is for rotated datasets; {spec.name} always uses all of its images."
        )
    if config.pretrained and config.weights:
        raise UserError("--pretrained and --weights exclude each other: give one of them.")
    if config.freeze_backbone and config.train_stages:
        raise UserError("--freeze-backbone and --train-stages exclude each other: give one.")
    by_recipe = _recipe(config).get("freeze_norm") is False
    trains_norm = config.freeze_norm is False and not by_recipe
    if config.train_stages and (not config.starts_from_weights or trains_norm):
        raise UserError(
            "--train-stages keeps the other stages as they are: it needs --pretrained or --weights "
            "FILE, and no --train-norm."
        )
    if config.freeze_backbone and not config.starts_from_weights:
        raise UserError(
            "--freeze-backbone needs weights worth freezing: add --pretrained or --weights FILE."
        )
    if config.stored_views is not None:
        _check_stored_views(config)
    if config.pose in ("auto", "on") and config.freeze_backbone:
        raise UserError(
            "--pose rotates images, and --freeze-backbone trains on stored features: leave one of "
            "them out."
        )


def _check_linear_steps(config: RunConfig, steps: int) -> None:
    """Raises `UserError` where no steps would train the backbone after the linear ones."""
    if not config.linear_steps:
        return
    if config.freeze_backbone:
        raise UserError(
            "--linear-steps keeps the backbone as it is at first, --freeze-backbone to the end: "
            "leave one of them out."
        )
    if config.linear_steps >= steps:
        raise UserError(
            f"--linear-steps {config.linear_steps}: training has {steps} steps, and some must be "
            f"left to train the backbone. Give at most {steps - 1}, or --freeze-backbone."
        )


def _check_stored_views(config: RunConfig) -> None:
    """Raises `UserError` for options that do not go with stored maps."""
    given = f"--stored-views {config.stored_views}"
    if not config.train_stages:
        raise UserError(
            f"{given} stores what enters the stages that are trained: say how many these are, e.g. "
            "--train-stages 2. To store the features of a frozen backbone, use --freeze-backbone."
        )
    if config.pose in ("auto", "on"):
        raise UserError(
            f"{given} and --pose {config.pose} exclude each other, since stored maps cannot be "
            "rotated: leave one of them out, or give --pose off."
        )
    if config.stored_views and not config.augment:
        raise UserError(
            f"{given} stores augmented copies, and --no-augment wants none: use --stored-views 0."
        )


def _check_solved(config: RunConfig) -> None:
    """Raises `UserError` for options of a training that does not take place."""
    given = [f"--{name.replace('_', '-')}" for name in OF_STEPS if getattr(config, name)]
    if given:
        raise UserError(
            f"{', '.join(given)}: the ridge classifier is solved in closed form, without steps. "
            "Leave this out, or train a classifier: --algorithm solo_plus --set classifier=linear."
        )


def _channels(config: RunConfig, spec: DatasetSpec) -> int:
    """Returns 3 for given weights, which expect colour, else the channels of the dataset."""
    return 3 if config.starts_from_weights else spec.channels


def _recipe(config: RunConfig) -> dict[str, Any]:
    """Returns the settings that the algorithm prefers for this start of the backbone."""
    if config.algorithm not in ALGORITHMS:
        raise unknown_name("algorithm", config.algorithm, ALGORITHMS)
    recipes = ALGORITHMS[config.algorithm].recipes
    if config.freeze_backbone and "frozen" in recipes:
        return recipes["frozen"]
    return recipes["pretrained" if config.starts_from_weights else "random"]


def _with_recipe(config: RunConfig) -> RunConfig:
    """Fills open choices from the algorithm's recipe; the variant's arguments override it."""
    from solodg.models.networks import has_batch_norm  # late: it imports torch

    recipe = _recipe(config)
    of_variant = ALGORITHMS[config.algorithm].variants.get(config.variant, {})
    arguments = {k: v for k, v in recipe.get("arguments", {}).items() if k not in of_variant}
    if config.arguments.get("classifier") == "linear":
        arguments.pop("early_exit", None)  # which a trained classifier does not have
    values = {k: v for k, v in recipe.items() if getattr(config, k, None) is None}
    if "image_norm" in values and not has_batch_norm(config.backbone):
        del values["image_norm"]  # other norms use the image's own statistics already
    return config.model_copy(update=values | {"arguments": arguments | config.arguments})


def _learning_rate(config: RunConfig) -> float:
    """Returns a low rate for fine-tuning, a higher one for what starts from random weights."""
    return 1e-4 if config.starts_from_weights and not config.freeze_backbone else 1e-3
