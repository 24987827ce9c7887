"""The parts of the adaptation that a configuration leaves open, and the choices for each.

A part is image norm, in one of several sets of readings, or pose. runs/evidence.py decides between
the combinations of parts on source domains that are held out.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from solodg.readings import ImageNorm, Reading, readings_of
from solodg.runs.config import AUTO, ResolvedConfig
from solodg.runs.defaults import is_closed_form
from solodg.runs.domain_rotations import DomainRotations

# What `auto` tries: source pixels, or several readings.
NORM_FROM_RANDOM: ImageNorm = 100.0
NORM_FROM_WEIGHTS: ImageNorm = (1000.0, 0.0, "line:300", 100.0)  # the best alone is first
NORMS_OF_RIDGE: tuple[ImageNorm, ...] = ((300.0, 0.0), NORM_FROM_WEIGHTS)


@dataclass(frozen=True)
class Combination:
    """One combination of parts: with or without image norm, with or without pose."""

    image_norm: ImageNorm  # None: off
    pose: bool

    def __str__(self) -> str:
        readings = readings_of(self.image_norm)
        words = [
            f"image norm {', '.join(map(str, readings))}" if readings else "",
            "pose" if self.pose else "",
        ]
        return " and ".join(filter(None, words)) or "plain"

    @property
    def readings(self) -> tuple[Reading, ...]:
        """Returns the readings of the backbone."""
        return readings_of(self.image_norm) or (Reading(),)


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
    """What the folds decide between; the first combination is used if there is no gain."""

    combinations: list[Combination]
    refused: list[PartDecision]  # parts that need no folds to be off

    def all_refused(self, why: str) -> "Candidates":
        """Returns what is left if nothing can be tried: every open part is off, and why."""
        first, last = self.combinations[0], self.combinations[-1]
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
        """Returns whether some combination undoes the rotation of images."""
        return any(combination.pose for combination in self.combinations)

    def all_parts(self, config: ResolvedConfig) -> ResolvedConfig:
        """Returns the configuration of a network that can read images in all these ways."""
        union = tuple(dict.fromkeys(r for tried in self.combinations for r in tried.readings))
        values = {
            "image_norm": tuple(r.value for r in union) if union != (Reading(),) else 0,
            "pose": "on" if self.with_pose else "off",
        }
        return config.model_copy(update=values)


def candidates(config: ResolvedConfig, rotations: DomainRotations | None) -> Candidates:
    """Returns the combinations of open parts.

    Where pose is open, the `rotations` of the source domains decide whether it is tried; without
    them (None) it is.
    """
    refused: list[PartDecision] = []
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
    tried = itertools.product(_norms(config), poses)
    return Candidates([Combination(norm, pose) for norm, pose in tried], refused)


def _norms(config: ResolvedConfig) -> list[ImageNorm]:
    """Returns the settings of image norm to decide between, or the one that is given."""
    if config.image_norm != AUTO:
        return [config.image_norm or None]
    if is_closed_form(config):
        return [None, *NORMS_OF_RIDGE]
    return [None, NORM_FROM_WEIGHTS if config.starts_from_weights else NORM_FROM_RANDOM]
