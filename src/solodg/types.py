"""Data types that all packages share: batches, episodes, features, records."""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

# A width or a number of samples among the arguments of a method. It is bounded, so that a mistyped
# or damaged number is refused before memory for it is allocated.
Size = Annotated[int, Field(ge=1, le=16_384)]

Transform = Callable[[Tensor, torch.Generator], Tensor]  # pixels -> model inputs, at random


class Batch(NamedTuple):
    """Labelled images of one or several domains; row i of each tensor belongs to image i."""

    x: Tensor  # (B, C, H, W) images, or (B, D + S) ready features
    y: Tensor  # (B,) class
    domain: Tensor  # (B,) source domain


class Episode(NamedTuple):
    """The images of one training step: a meta-target domain and meta-source domains."""

    source: Batch  # S': context of the meta-source domains
    target: Batch  # T': context of the meta-target domain, then its queries
    num_context: int | None = None  # context images of `target`; None: all are context and query

    @property
    def merged(self) -> Batch:
        """Returns all images as one batch, context of the meta-source first."""
        return Batch(*(torch.cat(halves) for halves in zip(self.source, self.target, strict=True)))


class Features(NamedTuple):
    """The features that an extractor computes for each image."""

    embedding: Tensor  # (B, D) what is classified
    style: Tensor  # (B, S) channel means of every stage


class Record(BaseModel):
    """The score of one model on one domain, with all that is needed to repeat it."""

    model_config = ConfigDict(extra="forbid")

    dataset: str
    algorithm: str
    variant: str
    adapter: str
    target: list[str]  # the domains that training never saw
    domain: str  # the domain scored here
    role: str  # "target", "in-distribution", "source-validation" or "new-site"
    seed: int  # -1: unknown, of an exported file
    protocol: str
    metrics: dict[str, float]
    config: dict[str, Any]
    versions: dict[str, str]
    data: dict[str, Any]
    # What held-out source domains decided about the adaptation; empty where nothing was open.
    evidence: dict[str, Any] = Field(default_factory=dict)
    # Intervals and scores of each class (`Scores.to_json`); empty where they were not computed.
    scores: dict[str, Any] = Field(default_factory=dict)
    # The runs whose weights were averaged; empty for a model that was trained.
    averaged: dict[str, Any] = Field(default_factory=dict)
    time: dict[str, Any] = Field(default_factory=dict)
    stream: dict[str, Any] = Field(
        default_factory=dict
    )  # order, batches and resets of the test images
    machine: dict[str, Any] = Field(default_factory=dict)  # its kind, never its name
    cell: dict[str, Any] = Field(default_factory=dict)  # place in a plan: key, part, parts
