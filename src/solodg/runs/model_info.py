"""The description of a trained model: the same in a run folder and in an ONNX file."""

from collections import Counter
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, field_validator

from solodg.inference import MAX_IMAGE_SIZE, MAX_READINGS
from solodg.readings import Reading
from solodg.runs.option import ordered_window

# That this version reads. The second names only the arguments that were given; in the second and
# the third, `solo_plus` is what is called `solo_code` now.
ModelFormat = Literal["solodg-model-2", "solodg-model-3", "solodg-model-4"]
READABLE_FORMATS: tuple[ModelFormat, ...] = get_args(ModelFormat)
MODEL_FORMAT: ModelFormat = "solodg-model-4"  # that this version writes
SourcePixels = Annotated[float, Field(ge=0, allow_inf_nan=False)]
View = Annotated[str, AfterValidator(lambda text: str(Reading.parse(text)))]
Readings = Annotated[tuple[SourcePixels | View, ...], Field(max_length=MAX_READINGS)]


class ModelInfo(BaseModel):
    """Everything that is needed to rebuild a trained model, except for its weights."""

    model_config = ConfigDict(extra="forbid")

    format: ModelFormat = MODEL_FORMAT
    algorithm: str
    variant: str
    arguments: dict[str, Any]  # all those of the algorithm
    backbone: str
    channels: Literal[1, 3]
    image_norm: SourcePixels | View | Readings | None = None  # see readings.py
    pose: bool = False  # see pose.py
    # Images are resized to this square without cropping, and scaled to [0, 1].
    image_size: int = Field(ge=1, le=MAX_IMAGE_SIZE)
    window: tuple[FiniteFloat, FiniteFloat] | None = None  # pixel values: black and white
    classes: list[str] = Field(min_length=1, max_length=100_000)
    source_domains: list[str] = Field(min_length=1, max_length=100_000)
    # Domains that training did not see; empty: it was trained on all; None: of before, not known.
    left_out_domains: list[str] | None = Field(default=None, max_length=100_000)
    dataset: str

    @property
    def has_checksum(self) -> bool:
        """Returns whether the files of this model hold checksums: from the third format on."""
        return self.format != "solodg-model-2"

    _check_window = field_validator("window")(ordered_window)

    @field_validator("classes", "source_domains", "left_out_domains")
    @classmethod
    def _once_each(cls, value: list[str] | None) -> list[str] | None:
        name, count = Counter(value or [""]).most_common(1)[0]
        if count > 1:
            raise ValueError(f"{name!r} is there {count} times")
        return value
