"""What flows through the house: batches, episodes, features, records."""

from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor


class Batch(NamedTuple):
    """Labelled images of one or several domains."""

    x: Tensor  # (B, C, H, W) images, or (B, D + S) ready features
    y: Tensor  # (B,) class
    domain: Tensor  # (B,) source domain


class Episode(NamedTuple):
    """One training step: a domain shift in miniature."""

    source: Batch  # S': context of the meta-source domains
    target: Batch  # T': context of the meta-target domain, then its queries
    num_context: int | None = None  # how many images of `target` are context; None: all are both

    @property
    def merged(self) -> Batch:
        """All images, context of the meta-source first."""
        return Batch(*(torch.cat(halves) for halves in zip(self.source, self.target, strict=True)))


class Features(NamedTuple):
    """What a backbone says of an image."""

    embedding: Tensor  # (B, D) what is classified
    style: Tensor  # (B, S) channel means of every stage


class Record(BaseModel):
    """One score of one model on one domain, with all that is needed to trust and repeat it."""

    model_config = ConfigDict(extra="forbid")

    dataset: str
    algorithm: str
    variant: str
    adapter: str
    target: list[str]  # the domains that training never saw
    domain: str  # the domain scored here
    role: str  # "target", "in-distribution" or "source-validation"
    seed: int
    protocol: str
    metrics: dict[str, float]
    config: dict[str, Any]
    versions: dict[str, str]
    data: dict[str, Any]
    time: dict[str, Any] = Field(default_factory=dict)
    stream: dict[str, Any] = Field(default_factory=dict)  # how test images came to an adapter
    machine: dict[str, Any] = Field(default_factory=dict)  # its kind, never its name
    cell: dict[str, Any] = Field(default_factory=dict)  # of a plan: key, part, parts
