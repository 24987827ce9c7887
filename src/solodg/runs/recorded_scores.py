"""The recorded scores of a model, as the server and exported files hold them. No torch is needed.

`solodg evaluate` appends a record for each domain. The latest one of each domain counts, and only
those of the model itself: a test-time method around it is not part of what is served.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from solodg.progress import Say
from solodg.storage.json_lines import Line, read_lines

MOST_DOMAINS = 50  # of those scored last
MOST_CLASSES = 50  # with more, there are no scores of each class
_MOST_METRICS = 20
_Name = Annotated[str, Field(max_length=1000)]


class RecordedMetric(BaseModel):
    """A metric as a fraction, with its 95% interval; null where there is none."""

    model_config = ConfigDict(extra="forbid")

    value: FiniteFloat
    low: FiniteFloat | None = None
    high: FiniteFloat | None = None


_Metrics = Annotated[dict[_Name, RecordedMetric], Field(max_length=_MOST_METRICS)]


class RecordedClass(BaseModel):
    """The scores of one class against all others."""

    model_config = ConfigDict(extra="forbid")

    images: int = Field(ge=0)
    metrics: _Metrics


class RecordedScores(BaseModel):
    """The recorded scores of a model on one domain."""

    model_config = ConfigDict(extra="forbid")

    dataset: _Name
    domain: _Name
    role: _Name = Field(
        description="target or new-site: training did not see the domain. in-distribution or "
        "source-validation: it did, but not these images."
    )
    protocol: _Name = Field(description="How the data was split.")
    images: int = Field(ge=0)
    at: _Name | None = Field(description="When it was scored, in UTC.")
    resampled: _Name | None = Field(
        description="What the intervals are over: images, or groups of them; null: no intervals."
    )
    units: int | None = Field(description="How many of these there are.")
    overall: _Metrics
    classes: Annotated[dict[_Name, RecordedClass], Field(max_length=MOST_CLASSES)] = Field(
        description=f"By name; empty for more than {MOST_CLASSES} classes and in older records."
    )


Several = Annotated[list[RecordedScores], Field(max_length=MOST_DOMAINS)]


def recordable(scores: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON values of `Scores` as a record holds them: of each class only if few."""
    return scores if len(scores["classes"]) <= MOST_CLASSES else scores | {"classes": {}}


def read_recorded(results: Path, say: Say = lambda text: None) -> list[RecordedScores]:
    """Reads the latest scores of each domain from the file of a run's records.

    A missing file has none. Damaged lines are left out, and `say` gets their number.
    """
    found: dict[tuple[str, str, str], RecordedScores] = {}
    for line in read_lines(results, say):
        scores = _of_model(line)
        if scores is not None:
            key = (scores.dataset, scores.domain, scores.role)
            found.pop(key, None)  # so that the order is that of the latest scores
            found[key] = scores
    return list(found.values())[-MOST_DOMAINS:]


def _of_model(line: Line) -> RecordedScores | None:
    """Returns the scores on a line; None for one of a stream or of a test-time method."""
    stream = line.get("stream") or {}
    if line.get("adapter") != "none" or "batch_size" in stream:
        return None
    try:
        scores: Mapping[str, Any] = line.get("scores") or {}
        metrics = dict(line["metrics"])
        images = int(metrics.pop("images"))
        metrics.pop("readings", None)  # not a score
        return RecordedScores(
            dataset=line["dataset"],
            domain=line["domain"],
            role=line["role"],
            protocol=line["protocol"],
            images=images,
            at=line.get("time", {}).get("at"),
            resampled=scores.get("resampled"),
            units=scores.get("units"),
            overall=scores.get("overall") or {n: {"value": v} for n, v in metrics.items()},
            classes={name: _of_class(each) for name, each in scores.get("classes", {}).items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, ValidationError):
        return None  # a line of something else


def _of_class(found: Mapping[str, Any]) -> RecordedClass:
    metrics = {name: value for name, value in found.items() if name != "images"}
    return RecordedClass(images=found["images"], metrics=metrics)
