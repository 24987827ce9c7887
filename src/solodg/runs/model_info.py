"""What a trained model is, but for its weights: the same in a run folder and in an ONNX file."""

from typing import Any

from pydantic import BaseModel, ConfigDict

FORMAT = "solodg-model-2"


class ModelInfo(BaseModel):
    """All about a model but its weights."""

    model_config = ConfigDict(extra="forbid")

    format: str = FORMAT
    algorithm: str
    variant: str
    arguments: dict[str, Any]  # of the algorithm
    backbone: str
    channels: int
    image_norm: float | tuple[float, ...] | None = None  # see image_norm.py
    image_size: int  # images are resized to this square without cropping, and scaled to [0, 1]
    classes: list[str]
    source_domains: list[str]
    dataset: str
