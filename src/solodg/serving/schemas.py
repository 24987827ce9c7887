"""What the server says, as its OpenAPI describes it."""

from typing import Any

from pydantic import BaseModel, Field

from solodg.predict.base import Prediction
from solodg.serving.batching import DIGITS


class ImageAnswer(BaseModel):
    """What the model says of one image; numbers to three decimals."""

    image: str | None = Field(description="The file's name, where it came with one.")
    label: str = Field(serialization_alias="class")
    probability: float = Field(ge=0, le=1)
    uncertainty: float = Field(ge=0, le=1, description="0: certain; 1: a guess.")
    probabilities: dict[str, float] = Field(description="By class.")
    before: dict[str, float] | None = Field(
        description="By class, of the classifier written from the source domains alone, before it "
        "was adapted to this image; null for methods that do not adapt."
    )


class Answer(BaseModel):
    """One prediction per image, in their order."""

    predictions: list[ImageAnswer]


class Problem(BaseModel):
    """Why there is no answer."""

    error: str


class Health(BaseModel):
    status: str


class Model(BaseModel):
    """What is served, and what the server allows."""

    name: str
    runtime: str = Field(description="PyTorch or ONNX Runtime.")
    solodg: str = Field(description="Version.")
    explains: bool = Field(description="Whether /explain draws figures.")
    model: dict[str, Any]
    limits: dict[str, float]


def report(name: str | None, prediction: Prediction) -> ImageAnswer:
    return ImageAnswer(
        image=name,
        label=prediction.label,
        probability=_rounded(prediction.probability),
        uncertainty=_rounded(prediction.uncertainty),
        probabilities={c: _rounded(p) for c, p in prediction.probabilities.items()},
        before=prediction.before and {c: _rounded(p) for c, p in prediction.before.items()},
    )


def _rounded(value: float) -> float:
    """To the digits that do not depend on company; sums of float32 may end a hair beyond [0, 1]."""
    return min(max(round(value, DIGITS), 0.0), 1.0)
