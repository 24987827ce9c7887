"""The parts of the adaptation that a configuration leaves open, and the readings to decide between.

A part is image norm or pose. A reading is one combination of parts; runs/evidence.py decides
between the readings on source domains that are held out.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from solodg.models.image_norm import ImageNorm, readings_of
from solodg.runs.config import AUTO, ResolvedConfig
from solodg.runs.domain_rotations import DomainRotations

NORM_FROM_RANDOM: ImageNorm = 100.0  # source pixels that `auto` tries
NORM_FROM_WEIGHTS: ImageNorm = (0.0, 3000.0, 300.0)


@dataclass(frozen=True)
class Reading:
    """One way to read images: with or without image norm, with or without pose."""

    image_norm: ImageNorm  # None: off
    pose: bool

    def __str__(self) -> str:
        words = [
            "image norm" if self.image_norm is not None else "",
            "pose" if self.pose else "",
        ]
        return " and ".join(filter(None, words)) or "plain"

    @property
    def readings(self) -> tuple[float, ...]:
        """Returns the source pixels of the backbone's readings."""
        return readings_of(self.image_norm) or (0.0,)


class PartDecision(BaseModel):
    """What was decided about one part of the adaptation, and why."""

    model_config = ConfigDict(extra="forbid")

    part: str  # "image norm" or "pose"
    on: bool
    why: str
    gain: float | None = None  # points of accuracy on held-out domains, mean over them
    error: float | None = None  # standard error of the gain, over images
    half_interval: float | None = None  # of the 95% interval of the gain, over domains


class Candidates(NamedTuple):
    """The readings between which the folds decide; the first one is used if there is no gain."""

    readings: list[Reading]
    refused: list[PartDecision]  # parts that need no folds to be off

    def all_refused(self, why: str) -> "Candidates":
        """Returns what is left if nothing can be tried: every open part is off, and why."""
        first, last = self.readings[0], self.readings[-1]
        open_parts = [
            name
            for name, is_open in (
                ("image norm", first.image_norm != last.image_norm),
                ("pose", first.pose != last.pose),
            )
            if is_open
        ]
        off = [PartDecision(part=name, on=False, why=why) for name in open_parts]
        return Candidates([first], [*self.refused, *off])

    @property
    def with_pose(self) -> bool:
        """Returns whether some reading undoes the rotation of images."""
        return any(reading.pose for reading in self.readings)

    def all_parts(self, config: ResolvedConfig) -> ResolvedConfig:
        """Returns the configuration of a network that can read images in all these ways."""
        union = tuple(dict.fromkeys(number for r in self.readings for number in r.readings))
        values = {
            "image_norm": union if any(union) else 0,
            "pose": "on" if self.with_pose else "off",
        }
        return config.model_copy(update=values)


def candidates(config: ResolvedConfig, rotations: DomainRotations | None) -> Candidates:
    """Returns the readings that are open.

    Where pose is open, the `rotations` of the source domains decide whether it is tried; without
    them (None) it is.
    """
    refused: list[PartDecision] = []
    norms: list[ImageNorm] = [config.image_norm or None]  # type: ignore[list-item]
    if config.image_norm == AUTO:
        norms = [None, NORM_FROM_WEIGHTS if config.starts_from_weights else NORM_FROM_RANDOM]
    poses = [config.pose == "on"]
    if config.pose == AUTO:
        why = ""
        if rotations is not None and len(rotations.angles) < 3:
            why = "of two source domains one cannot be held out to see whether it helps"
        elif rotations is not None and not rotations.explain:
            why = (
                "the source domains do not differ by rotation: the mean images of two domains "
                f"correlate by {rotations.alike:.2f}, and by {rotations.alike_rotated:.2f} after "
                "the best rotation"
            )
        poses = [False] if why else [False, True]
        refused = [PartDecision(part="pose", on=False, why=why)] if why else []
    return Candidates([Reading(n, p) for n, p in itertools.product(norms, poses)], refused)
