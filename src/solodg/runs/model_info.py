"""The description of a trained model: the same in a run folder and in an ONNX file."""

from typing import Any

from pydantic import BaseModel, ConfigDict

MODEL_FORMAT = "solodg-model-2"


class ModelInfo(BaseModel):
    """Everything that is needed to rebuild a trained model, except for its weights."""

    model_config = ConfigDict(extra="forbid")

    format: str = MODEL_FORMAT
    algorithm: str
    variant: str
    arguments: dict[str, Any]  # of the algorithm
    backbone: str
    channels: int
    image_norm: float | tuple[float, ...] | None = None  # see image_norm.py
    image_size: int  # images are resized to this square without cropping, and scaled to [0, 1]
    window: tuple[float, float] | None = None  # pixel values that become black and white
    classes: list[str]
    source_domains: list[str]
    dataset: str
