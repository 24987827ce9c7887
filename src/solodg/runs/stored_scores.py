"""The latest scores of a run on each domain, with intervals: `scores.json`, for its model card."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from solodg.runs.folder import SCORES
from solodg.runs.scores import Scores
from solodg.storage import read_json, write_json
from solodg.types import Record


class Interval(BaseModel):
    """A metric with its 95% interval; None where there is none."""

    model_config = ConfigDict(extra="forbid")

    value: float
    low: float | None = None
    high: float | None = None


class DomainScores(BaseModel):
    """The scores of the model on one domain, without an adapter."""

    model_config = ConfigDict(extra="forbid")

    dataset: str
    domain: str
    role: str
    protocol: str
    images: int
    resampled: str  # what the intervals are drawn over: images or groups
    units: int  # how many of them there are
    fingerprint: str  # of the data
    metrics: dict[str, Interval]


class StoredScores(BaseModel):
    """The scores of a run on all domains on which it was scored."""

    model_config = ConfigDict(extra="forbid")

    domains: list[DomainScores]


def read_scores(folder: Path) -> list[DomainScores]:
    """Reads the scores of a run; an empty list where it was not scored."""
    path = folder / SCORES
    return read_json(path, StoredScores).domains if path.is_file() else []


def store_scores(folder: Path, records: Sequence[Record], found: Sequence[Scores]) -> None:
    """Adds scores to those of a run; they replace earlier ones of the same domain and role."""
    new = [_domain_scores(*pair) for pair in zip(records, found, strict=True)]
    places = {(each.dataset, each.domain, each.role) for each in new}
    kept = [e for e in read_scores(folder) if (e.dataset, e.domain, e.role) not in places]
    write_json(folder / SCORES, StoredScores(domains=[*kept, *new]).model_dump())


def _domain_scores(record: Record, found: Scores) -> DomainScores:
    return DomainScores(
        dataset=record.dataset,
        domain=record.domain,
        role=record.role,
        protocol=record.protocol,
        images=found.images,
        resampled="groups" if found.grouped else "images",
        units=found.units,
        fingerprint=record.data["fingerprint"],
        metrics={n: Interval(**each._asdict()) for n, each in found.overall.items()},
    )
