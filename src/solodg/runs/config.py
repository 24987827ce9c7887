"""The configuration of a run, and of the machine: every option is declared once, with its help.

The command line (`solodg.cli.config_options`) and the validation of plans are derived from these
classes. This module needs no torch, so that `solodg --help` is quick. `solodg.runs.defaults` turns
a `RunConfig`, whose choices may be open, into a `ResolvedConfig`.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator

from solodg.inference import MAX_IMAGE_SIZE
from solodg.readings import as_image_norm
from solodg.runs.machine import Machine as Machine
from solodg.runs.option import option, ordered_window, pairs_of, weight_average_of

Decay = Literal["cosine", "constant", "step"]
SWAD: Literal["swad"] = "swad"  # dense average of the weights: runs/dense_average.py
WeightAverage = float | Literal["swad"] | None

# Values that turn off what the recipe of an algorithm would turn on (`Algorithm.recipes`). Without
# a recipe they mean the same as None.
OFF_VALUES: dict[str, Any] = {
    "image_norm": 0,
    "pose": "off",
    "label_smoothing": 0,
    "decay": "constant",
    "linear_steps": 0,
}
AUTO: Literal["auto"] = "auto"  # for image norm and pose: as held-out source domains decide


class RunConfig(BaseModel):
    """All settings that the result of a run depends on, as given. None: `resolve` chooses."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    dataset: str = option(
        ...,
        "A name from [bold]solodg datasets[/bold], a folder domain/class/image, or a CSV, Parquet "
        "or Arrow file with columns path or image, label, domain (and group, split).",
    )
    columns: dict[str, str] | None = option(
        None,
        "NAME=COLUMN: read label, domain, group, split or path from this column of a file, e.g. "
        "label=tumor; a path may be put together: path=patches/{patient}/{id}.png.",
        flag="--column",
    )
    split_values: dict[str, str] | None = option(
        None,
        "VALUE=PART: what a value of the split stands for, e.g. 0=train 1=val.",
        flag="--split-value",
    )
    targets: tuple[str, ...] = option(
        (),
        "Domain to leave out; repeat for several. Training never sees it.",
        flag="--target",
    )
    exclude: tuple[str, ...] | None = option(
        None, "Domain that is neither trained on nor scored; repeat for several."
    )
    algorithm: str = option(
        "solo_plus",
        "solo_plus, solo (the paper's method), erm, or another one of docs/algorithms.md.",
        shown_default="solo_plus; solo with its presets and variants",
    )
    variant: str = option(
        "default",
        "Of solo: invariant, no-hierarchy, no-prior-supervision, no-meta-learning, literal. Of "
        "solo_code: no-frame, no-film, no-swap, no-domain-supervision. Of mldg: first-order.",
        shown_default="the full method",
    )
    arguments: dict[str, Any] = option(
        {}, "Argument of the algorithm, NAME=VALUE; repeat for several.", flag="--set"
    )

    backbone: str = option("resnet18", "Any timm model, alexnet, or small_cnn.")
    pretrained: bool = option(False, "Fetch the backbone's published weights.")
    weights: str | None = option(None, "Backbone weights from a safetensors file.", metavar="FILE")
    freeze_backbone: bool = option(
        False, "Compute features once (no augmentation) and train the rest on them."
    )
    train_stages: PositiveInt | None = option(
        None, "Fine-tune only the last N stages of the backbone.", shown_default="all"
    )
    stored_views: int | None = option(
        None,
        "Compute the frozen first stages once, for each training image and this many augmented "
        "copies of it, and train the last stages on the stored maps; needs --train-stages.",
        ge=0,
        le=1000,
    )
    freeze_norm: bool | None = option(
        None,
        "Keep the BatchNorm statistics of the weights, or update them in training.",
        flag="--freeze-norm/--train-norm",
        shown_default="frozen when weights are given",
    )
    image_norm: float | str | tuple[float | str, ...] | None = option(
        None,
        "Mix the image's own statistics into every BatchNorm; those of the sources count as this "
        "many pixels, e.g. 300; 0: do not mix. With several readings, e.g. 0,300,line:300, the "
        "backbone reads each image once for each, and the features are averaged; a reading may "
        "have a view of the image: line (a line drawing), zoom, flip or grey. auto: 100, or on "
        "given weights 1000,0,line:300,100, if that helps on source domains that are held out; "
        "else 0.",
        shown_default="0; with solo_plus auto",
    )
    pose: Literal["auto", "on", "off"] | None = option(
        None,
        "Undo the rotation of each image before the backbone reads it: on or off. auto: on if the "
        "source domains differ by rotation and it helps on source domains that are held out.",
        shown_default="off; with solo_plus auto, but off on given weights",
    )
    image_size: PositiveInt | None = option(
        None,
        "Images are resized to a square of this many pixels a side.",
        shown_default="that of the dataset",
        le=MAX_IMAGE_SIZE,
    )
    window: tuple[float, float] | None = option(
        None,
        "Pixel values that become black and white, for grey images of more than 8 bits, e.g. "
        "-1000 400 for CT; values beyond are clipped, and 8-bit images are refused.",
        shown_default="guessed for each image; negative values are refused",
        metavar="LOW HIGH",
    )
    channels: Literal[1, 3] | None = option(
        None,
        "1 (grey) or 3 (colour).",
        shown_default="3 when weights are given, else that of the dataset",
    )

    steps: PositiveInt | None = option(
        None, "Training steps.", shown_default="2000; 600 with a frozen backbone; none for ridge"
    )
    linear_steps: int | None = option(
        None,
        "Train all but the backbone for the first N of the steps, at a constant learning rate, "
        "then everything (LP-FT).",
        shown_default="0",
        metavar="N",
        ge=0,
    )
    batch_size: PositiveInt = option(
        32, "Images that a step classifies (queries of the meta-target domain)."
    )
    context_images: PositiveInt = option(
        4, "Images per class and domain from which a step computes class centres."
    )
    learning_rate: float | None = option(
        None,
        "Learning rate of all but the backbone.",
        shown_default="0.0001 when fine-tuning given weights, else 0.001",
        gt=0,
    )
    backbone_learning_rate: float | None = option(
        None,
        "Learning rate of the backbone.",
        shown_default="0.00005 when weights are given, else 0.001",
        gt=0,
    )
    weight_decay: float = option(5e-4, "Weight decay of Adam.", ge=0)
    label_smoothing: float | None = option(
        None,
        "Label smoothing: share of every label that is spread over all classes; 0: none.",
        shown_default="0.1 from random weights",
        ge=0,
        lt=1,
    )
    weight_average: WeightAverage = option(
        None,
        "Validate and save a moving average of the weights, with this decay, e.g. 0.99. swad: save "
        "the mean of the weights of all steps while the source validation loss is low.",
        metavar="DECAY|swad",
    )
    decay: Decay | None = option(
        None,
        "How the learning rates fall: cosine (to zero), step (to a tenth after 60% of the steps, "
        "as in the authors' code), or constant.",
        shown_default="cosine from random weights",
    )
    # Images of the target that are scored; None: test images. Only plans set it, to use none.
    score_on: Literal["validation"] | None = None
    select: Literal["leave-one-out"] | None = option(
        None,
        "leave-one-out: choose the number of steps by leaving each source domain out in "
        "turn, which takes one more training for each of them.",
        shown_default="by source validation",
    )
    validate_every: PositiveInt | None = option(
        None, "Steps between validations.", shown_default="a fifth of the steps, at most 200"
    )
    centre_images: PositiveInt = option(
        50, "Training images per class and domain for the stored class centres."
    )
    augment: bool = option(
        True, "Augment training images at random.", flag="--augment/--no-augment"
    )

    val_fraction: float = option(
        0.2,
        "Share of source images held out for validation where the dataset gives no split.",
        gt=0,
        lt=1,
    )
    train_images: PositiveInt | None = option(
        None, "Training images of rotated datasets, per angle.", shown_default="the paper's number"
    )
    pseudo_domains: Literal["random", "clusters"] | None = option(
        None, "Make source domains where none are annotated: random, or clusters (of features)."
    )
    # None, not False, is the default: a key of a cell leaves out what is None.
    allow_shared_groups: bool | None = option(
        None,
        "Train although groups (such as patients) have images both in the source domains and "
        "among the target images to score; every record then says so.",
    )
    num_pseudo_domains: int = option(
        3, "Number of source domains that --pseudo-domains makes.", ge=2, le=1000
    )
    skip_bad_images: bool = option(False, "Leave out images that cannot be read, and say how many.")
    seed: int = option(0, "The same seed gives the same numbers.", ge=0)

    # Each device draws its own episodes, so their number is part of the result.
    devices: str = option("1", "How many devices (2), which ones (0,1), or auto.")
    num_nodes: PositiveInt = option(1, "How many machines.")
    precision: Literal["32-true", "16-mixed", "bf16-mixed"] = option(
        "32-true", "32-true, 16-mixed or bf16-mixed."
    )

    @model_validator(mode="before")
    @classmethod
    def _default_algorithm(cls, values: Any) -> Any:
        """Chooses the algorithm that has the variant, where a variant but no algorithm is given."""
        if not isinstance(values, dict) or "algorithm" in values or "variant" not in values:
            return values
        from solodg.algorithms import ALGORITHMS  # late: it imports torch

        have = [n for n, kind in ALGORITHMS.items() if str(values["variant"]) in kind.variants]
        return values if "solo_plus" in have else values | {"algorithm": (have or ["solo"])[0]}

    @field_validator("image_norm", mode="before")
    @classmethod
    def _as_readings(cls, value: Any) -> Any:
        """Reads `auto`, one reading, or several in a list or in one text: "0,300,line:300"."""
        return value if value is None or value == AUTO else as_image_norm(value)

    @field_validator("pose", mode="before")
    @classmethod
    def _as_word(cls, value: Any) -> Any:
        """Reads YAML's `on` and `off`, which are true and false to it, as words."""
        return ("on" if value else "off") if isinstance(value, bool) else value

    _read_pairs = field_validator("columns", "split_values", mode="before")(pairs_of)
    _read_average = field_validator("weight_average", mode="before")(weight_average_of)
    _check_window = field_validator("window")(ordered_window)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Returns the domains that training does not see."""
        return self.targets + (self.exclude or ())

    @property
    def open_parts(self) -> tuple[str, ...]:
        """Returns the parts of the adaptation that held-out source domains decide about."""
        return tuple(name for name in ("image_norm", "pose") if getattr(self, name) == AUTO)

    @property
    def starts_from_weights(self) -> bool:
        """Returns whether the backbone starts from given or published weights."""
        return self.pretrained or self.weights is not None

    @property
    def reads_stored(self) -> bool:
        """Returns whether training reads stored features or maps in place of pixels."""
        return self.freeze_backbone or self.stored_views is not None


class ResolvedConfig(RunConfig):
    """All settings that the result of a run depends on, with every open choice made.

    `solodg.runs.defaults.resolve` makes it, and a run folder holds it as `config.json`.
    """

    freeze_norm: bool
    image_size: PositiveInt = Field(le=MAX_IMAGE_SIZE)
    channels: Literal[1, 3]
    steps: PositiveInt
    learning_rate: float = Field(gt=0)
    backbone_learning_rate: float = Field(gt=0)
    validate_every: PositiveInt
