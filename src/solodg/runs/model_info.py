"""The description of a trained model: the same in a run folder and in an ONNX file."""

from typing import Any

from pydantic import BaseModel, ConfigDict

MODEL_FORMAT = "solodg-model-3"
READABLE_FORMATS = ("solodg-model-2", MODEL_FORMAT)  # 2 names only the arguments that were given


class ModelInfo(BaseModel):
    """Everything that is needed to rebuild a trained model, except for its weights."""

    model_config = ConfigDict(extra="forbid")

    format: str = MODEL_FORMAT
    algorithm: str
    variant: str
    arguments: dict[str, Any]  # all those of the algorithm
    backbone: str
    channels: int
    image_norm: float | tuple[float, ...] | None = None  # see image_norm.py
    image_size: int  # images are resized to this square without cropping, and scaled to [0, 1]
    classes: list[str]
    source_domains: list[str]
    dataset: str
