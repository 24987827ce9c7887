"""The server's JSON responses, as its OpenAPI describes them."""

from typing import Any

from pydantic import BaseModel, Field

from solodg.runs.predictions import Prediction
from solodg.runs.recorded_scores import RecordedScores
from solodg.serving.batching import DIGITS


class ImagePrediction(BaseModel):
    """The prediction for one image; numbers have three decimals."""

    image: str | None = Field(description="The file's name, if the request gave one.")
    label: str = Field(alias="class")
    probability: float = Field(ge=0, le=1)
    uncertainty: float = Field(ge=0, le=1, description="0: certain; 1: a guess.")
    novelty: float | None = Field(
        ge=0,
        le=1,
        description="Share of held-out source images that are nearer to the other source "
        "domains than this image is to the sources, two decimals; null: there is no score.",
    )
    probabilities: dict[str, float] = Field(description="By class.")
    before: dict[str, float] | None = Field(
        description="By class, of the classifier written from the source domains alone, before the "
        "adaptation to this image; null for methods that do not adapt."
    )


class PredictResponse(BaseModel):
    """One prediction per image, in the order of the request."""

    predictions: list[ImagePrediction]


class ErrorResponse(BaseModel):
    """Why the request was rejected."""

    error: str


class HealthResponse(BaseModel):
    """Whether the server is up."""

    status: str


class ModelResponse(BaseModel):
    """The served model, and the limits of the server."""

    name: str
    runtime: str = Field(description="PyTorch or ONNX Runtime.")
    solodg: str = Field(description="Version.")
    explains: bool = Field(description="Whether /explain draws figures.")
    model: dict[str, Any]
    scores: list[RecordedScores] = Field(
        description="Scores that `solodg evaluate` recorded before the server started, or before "
        "the export of the file: the latest of each domain. Empty: there are none."
    )
    limits: dict[str, float]


def image_prediction(name: str | None, prediction: Prediction) -> ImagePrediction:
    """Returns the response for one image, rounded to the digits that no micro-batch changes."""
    return ImagePrediction.model_validate(prediction.rounded(DIGITS).to_json(name))
