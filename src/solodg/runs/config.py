"""What defines a run, and where it runs: validated once, at the edge."""

import inspect
from pathlib import Path
from typing import Any, Literal, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    field_validator,
)

from solodg.algorithms import ALGORITHMS
from solodg.data import DatasetSpec, dataset_spec, default_data_dir
from solodg.data.loading import DEFAULT_MEMORY_GB
from solodg.errors import UserError, unknown
from solodg.models.image_norm import ImageNorm

# Values that turn off what a recipe would turn on, and mean the same as nothing without one.
SAYS_NO: dict[str, Any] = {"image_norm": 0, "label_smoothing": 0, "decay": "constant"}
PRESETS: dict[str, dict[str, Any]] = {
    # The paper's recipe taken at its word. It starts from pretrained weights only: see
    # docs/method.md for what the defaults do differently, and why.
    "literal": {
        "variant": "literal",
        "steps": 10_000,
        "batch_size": 128,
        "context_images": 10,
        "learning_rate": 1e-4,
        "backbone_learning_rate": 5e-5,
        "weight_decay": 5e-4,
        **SAYS_NO,
    },
}


class RunConfig(BaseModel):
    """What defines the result of a run. `None` means: chosen by `resolve`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: str
    targets: tuple[str, ...] = ()
    exclude: tuple[str, ...] | None = None  # domains that are neither trained on nor scored
    algorithm: str = "solo"
    variant: str = "default"
    arguments: dict[str, Any] = Field(default_factory=dict)  # of the algorithm, over the variant's

    backbone: str = "resnet18"
    pretrained: bool = False
    weights: str | None = None
    freeze_backbone: bool = False
    train_stages: PositiveInt | None = None  # the last ones of the backbone; None: all
    freeze_norm: bool | None = None
    image_norm: ImageNorm = None  # source pixels, one number or several, 0: off; image_norm.py
    image_size: PositiveInt | None = None
    channels: Literal[1, 3] | None = None

    steps: PositiveInt | None = None
    batch_size: PositiveInt = 32
    context_images: PositiveInt = 4
    learning_rate: float | None = Field(default=None, gt=0)
    backbone_learning_rate: float | None = Field(default=None, gt=0)
    weight_decay: float = Field(default=5e-4, ge=0)
    label_smoothing: float | None = Field(default=None, ge=0, lt=1)
    weight_average: float | None = Field(default=None, gt=0, lt=1)  # decay of the moving average
    decay: Literal["cosine", "constant"] | None = None  # of the learning rates; cosine: to zero
    score_on: Literal["validation"] | None = None  # images of the target; None: test images
    select: Literal["leave-one-out"] | None = None  # of the step; None: by source validation
    validate_every: PositiveInt | None = None
    centre_images: PositiveInt = 50
    augment: bool = True

    val_fraction: float = Field(default=0.2, gt=0, lt=1)
    train_images: PositiveInt | None = None
    pseudo_domains: Literal["random", "clusters"] | None = None
    num_pseudo_domains: int = Field(default=3, ge=2)
    skip_bad_images: bool = False
    seed: int = Field(default=0, ge=0)

    devices: str = "1"  # each draws its own episodes, so their number is part of the result
    num_nodes: PositiveInt = 1
    precision: Literal["32-true", "16-mixed", "bf16-mixed"] = "32-true"

    @field_validator("image_norm", mode="before")
    @classmethod
    def _as_numbers(cls, value: Any) -> Any:
        """`300`, or several as a list or as "0,3000,300"."""
        several = value.split(",") if isinstance(value, str) else value
        if not isinstance(several, list | tuple):
            return value
        return several[0] if len(several) == 1 else tuple(several)

    @field_validator("image_norm")
    @classmethod
    def _as_readings(cls, value: ImageNorm) -> ImageNorm:
        several = value if isinstance(value, tuple) else (value or 0.0,)
        if not several or min(several) < 0 or len(set(several)) < len(several):
            raise ValueError("source pixels are 0 or more, each number once")
        return value

    @property
    def left_out(self) -> tuple[str, ...]:
        """Domains that training does not see."""
        return self.targets + (self.exclude or ())

    @property
    def starts_from_weights(self) -> bool:
        return self.pretrained or self.weights is not None


class Machine(BaseModel):
    """Where a run happens; none of it changes what the run is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data_dir: Path = Field(default_factory=default_data_dir)
    cache_dir: Path | None = None
    download: bool = False
    workers: PositiveInt = 2
    memory_gb: float = Field(default=DEFAULT_MEMORY_GB, gt=0)
    accelerator: str = "auto"
    strategy: str = "auto"


def build(kind: type[BaseModel], values: dict[str, Any]) -> Any:
    """A validated model, or one clear line on the first value that does not fit."""
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]).replace("_", "-")
        raise UserError(f"--{name} {first['input']!r}: {first['msg'].lower()}.") from error


def resolve(config: RunConfig) -> RunConfig:
    """The configuration with every open choice made, checked against the registries."""
    spec = dataset_spec(config.dataset)
    config = _with_recipe(config)
    given = set(config.arguments)
    arguments = {k: v for k, v in algorithm_arguments(config).items() if k in given}
    # A head on fixed features has learned what it can long before a whole network has.
    steps = config.steps or (600 if config.freeze_backbone else 2_000)
    values = {
        "arguments": arguments,
        "steps": steps,
        "image_size": config.image_size or spec.image_size,
        "channels": config.channels or _channels(config, spec),
        "freeze_norm": config.starts_from_weights
        if config.freeze_norm is None
        else config.freeze_norm,
        "learning_rate": config.learning_rate or _learning_rate(config),
        "backbone_learning_rate": config.backbone_learning_rate
        or (5e-5 if config.starts_from_weights else 1e-3),
        "validate_every": config.validate_every or max(1, min(200, steps // 5)),
        "targets": config.targets or spec.default_targets,
    }
    if config.train_images and not spec.takes_train_images:
        raise UserError(f"--train-images is for rotated datasets; {spec.name} is used whole.")
    if config.pretrained and config.weights:
        raise UserError("--pretrained and --weights exclude each other: give one of them.")
    if config.freeze_backbone and config.train_stages:
        raise UserError("--freeze-backbone and --train-stages exclude each other: give one.")
    asked = config.freeze_norm is False and _recipe(config).get("freeze_norm") is not False
    if config.train_stages and (not config.starts_from_weights or asked):
        raise UserError(
            "--train-stages keeps the other stages as they are: it needs --pretrained or --weights "
            "FILE, and no --train-norm."
        )
    if config.freeze_backbone and not config.starts_from_weights:
        raise UserError(
            "--freeze-backbone needs weights worth freezing: add --pretrained or --weights FILE."
        )
    return config.model_copy(update=values)


def algorithm_arguments(config: RunConfig) -> dict[str, Any]:
    """The variant's arguments with those given by hand over them, checked by name."""
    if config.algorithm not in ALGORITHMS:
        raise unknown("algorithm", config.algorithm, ALGORITHMS)
    kind = ALGORITHMS[config.algorithm]
    if config.variant not in kind.variants:
        raise unknown(f"variant of {config.algorithm}", config.variant, kind.variants)
    known = get_type_hints(kind.__init__, include_extras=True)
    names = set(inspect.signature(kind).parameters) - {"backbone", "num_classes", "num_domains"}
    checked = {}
    for name, value in config.arguments.items():
        if name not in names:
            raise unknown(f"argument of {config.algorithm}", name, names)
        try:
            checked[name] = TypeAdapter(known[name]).validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].lower()
            raise UserError(f"--set {name}={value}: {reason}.") from error
    return kind.variants[config.variant] | checked


def portable(config: RunConfig) -> dict[str, Any]:
    """The configuration without paths of a machine."""
    values = config.model_dump(mode="json")
    for name in ("dataset", "weights"):
        values[name] = Path(values[name]).name if values[name] else values[name]
    return values


def _channels(config: RunConfig, spec: DatasetSpec) -> int:
    """Published weights are for three channels; otherwise what the images have."""
    return 3 if config.starts_from_weights else spec.channels


def _recipe(config: RunConfig) -> dict[str, Any]:
    if config.algorithm not in ALGORITHMS:
        raise unknown("algorithm", config.algorithm, ALGORITHMS)
    start = "pretrained" if config.starts_from_weights else "random"
    return ALGORITHMS[config.algorithm].recipes[start]


def _with_recipe(config: RunConfig) -> RunConfig:
    """Where the user said nothing, what the algorithm wants; a variant may say otherwise."""
    from solodg.models.networks import has_batch_norm  # late: it imports all of timm

    recipe = _recipe(config)
    said = ALGORITHMS[config.algorithm].variants.get(config.variant, {})
    arguments = {k: v for k, v in recipe.get("arguments", {}).items() if k not in said}
    values = {k: v for k, v in recipe.items() if getattr(config, k, None) is None}
    if "image_norm" in values and not has_batch_norm(config.backbone):
        del values["image_norm"]  # other norms are the image's own already
    return config.model_copy(update=values | {"arguments": arguments | config.arguments})


def _learning_rate(config: RunConfig) -> float:
    """Fine-tuning is gentle; what starts from nothing, or sits on fixed features, is not."""
    return 1e-4 if config.starts_from_weights and not config.freeze_backbone else 1e-3
