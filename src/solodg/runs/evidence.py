"""Evidence for the adaptation: what each part of it does on source domains that are held out.

A part is image norm or pose. Where the configuration leaves a part open (`auto`), some source
domains are held out in turn. A small training on the others uses every part for some of the images,
at random, so that one network can then be scored on the held-out domain with and without each
part, on the same images. A part has earned its place in a combination if it gains there more than
one point, and more than twice the standard error of that gain. Of the combinations of parts that
have all earned their place, the one with the highest mean accuracy is taken; none is one of them.
One point, since networks that are trained this briefly favour image norm a little.

The folds use a linear classifier, and together cost about as much as the training itself. A
classifier in closed form is solved for every combination instead (`runs/closed_form.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from solodg.algorithms import Algorithm
from solodg.data import LabelledImages, SourceData
from solodg.data.pseudo_domains import random_domains
from solodg.runs.config import AUTO, ResolvedConfig
from solodg.runs.metrics import predict
from solodg.runs.open_parts import Candidates, Combination, PartDecision
from solodg.runs.opened_data import input_batches
from solodg.runs.statistics import mean_interval

MAX_FOLDS = 3
LEAST_IMAGES = 30  # of a held-out domain: a standard error of fewer means little
LEAST_GAIN = 1.0  # points of accuracy that a part must bring
# Training images of all folds together, as a share of those of the training itself. Where pose is
# tried, each fold trains a pose network too, so that fewer images cost as much time.
EVIDENCE_BUDGET = 0.8
EVIDENCE_BUDGET_WITH_POSE = 0.4
_MAX_IMAGES = 1000  # of a held-out domain that are scored


class Evidence(BaseModel):
    """What was measured on held-out source domains, and what was decided: `evidence.json`."""

    model_config = ConfigDict(extra="forbid")

    rests_on: str
    parts: list[PartDecision]
    accuracy: dict[str, dict[str, float]]  # held-out domain -> combination -> %
    image_norm: float | str | tuple[float | str, ...] | None  # what the training uses
    pose: bool
    seconds: float  # that it took

    def lines(self) -> list[str]:
        """Returns the decisions as sentences for the log."""
        return [f"{p.part}: {'on' if p.on else 'off'}, {p.why}" for p in self.parts]

    def decided(self, config: ResolvedConfig) -> ResolvedConfig:
        """Returns the configuration of the training, with nothing open."""
        values: dict[str, Any] = {}
        if config.image_norm == AUTO:
            values["image_norm"] = self.image_norm or 0
        if config.pose == AUTO:
            values["pose"] = "on" if self.pose else "off"
        return config.model_copy(update=values)


def fold_domains(source: SourceData) -> list[int]:
    """Returns the domains to hold out: all of up to three, else three spread over their order."""
    count = len(source.domain_names)
    spread = np.linspace(0, count - 1, min(count, MAX_FOLDS)).round()
    return [int(number) for number in spread]


def without_domain(source: SourceData, domain: int, seed: int) -> SourceData:
    """Returns the data that a fold trains on; a single domain that is left is divided in two."""
    rest = source.holding_out(domain)
    return rest if len(rest.domain_names) > 1 else random_domains(rest, 2, seed=seed)


def held_out_images(source: SourceData, domain: int, seed: int) -> LabelledImages:
    """Returns the images of a domain that score a fold, which trains on none of them.

    These are its training images, of groups that no other domain trains on; its validation images
    where there are none. Classes that no other domain has are left out.
    """
    own = source.train.domains == domain
    chosen = own.copy()
    if source.train.groups is not None:
        chosen &= ~np.isin(source.train.groups, source.train.groups[~own])
    chosen &= np.isin(source.train.labels, source.train.labels[~own])
    held = source.train.subset(np.flatnonzero(chosen)) if chosen.any() else source.held_out(domain)
    per_class = math.ceil(_MAX_IMAGES / max(1, len(np.unique(held.labels))))
    return held.balanced(per_class, seed)


def fold_steps(
    steps: int, images_a_step: int, images_a_fold_step: int, folds: int, *, pose: bool
) -> int:
    """Returns the steps of each fold, so that all of them together stay within the budget.

    `pose` says whether the folds train a pose network as well.
    """
    budget = EVIDENCE_BUDGET_WITH_POSE if pose else EVIDENCE_BUDGET
    return max(1, int(budget * steps * images_a_step / (folds * images_a_fold_step)))


def score_combinations(
    algorithm: Algorithm,
    held: LabelledImages,
    combinations: Sequence[Combination],
    device: torch.device,
) -> dict[str, list[bool]]:
    """Returns for each combination which of the held-out images the algorithm classifies right."""
    found = {}
    for tried in combinations:
        with algorithm.backbone.reading_as(tried.readings, upright=tried.pose):
            chosen = predict(algorithm.probabilities, input_batches(held), device=device).chosen
        found[str(tried)] = [bool(right) for right in chosen == held.labels]
    return found


def decide(
    options: Candidates, right: dict[str, dict[str, list[bool]]], rests_on: str, seconds: float
) -> Evidence:
    """Decides about the open parts from which images each combination gets right in each fold."""
    decisions: dict[Combination, list[PartDecision]] = {
        tried: [
            weigh(part, right, str(with_part), str(without))
            for part, with_part, without in _open_parts(tried, options.combinations)
        ]
        for tried in options.combinations
        if right
    }
    earned = [
        tried
        for tried in options.combinations
        if all(d.on or d.part not in str(tried) for d in decisions.get(tried, []))
    ]
    best = max(earned, key=lambda tried: _mean_accuracy(right, tried))  # the first of equals
    parts = [
        decision.model_copy(update={"on": decision.part in str(best)})
        for decision in decisions.get(best, [])
    ]
    accuracy = {
        fold: {name: round(100 * float(np.mean(rows)), 2) for name, rows in found.items()}
        for fold, found in right.items()
    }
    return Evidence(
        rests_on=rests_on,
        parts=[*options.refused, *parts],
        accuracy=accuracy,
        image_norm=best.image_norm,
        pose=best.pose,
        seconds=seconds,
    )


def _open_parts(
    tried: Combination, combinations: Sequence[Combination]
) -> list[tuple[str, Combination, Combination]]:
    """Returns each open part with the combinations that have it and have it not, else as this one.

    Where image norm is off in this one, its last setting stands for it.
    """
    first, last = combinations[0], combinations[-1]
    found = []
    if first.image_norm != last.image_norm:
        with_norm = replace(tried, image_norm=tried.image_norm or last.image_norm)
        found.append(("image norm", with_norm, replace(tried, image_norm=first.image_norm)))
    if first.pose != last.pose:
        found.append(("pose", replace(tried, pose=True), replace(tried, pose=False)))
    return found


def _mean_accuracy(right: dict[str, dict[str, list[bool]]], tried: Combination) -> float:
    """Returns the accuracy of a combination, mean over the held-out domains."""
    return float(np.mean([np.mean(fold[str(tried)]) for fold in right.values()])) if right else 0


def weigh(
    part: str, right: dict[str, dict[str, list[bool]]], with_part: str, without: str
) -> PartDecision:
    """Compares two combinations on the same images of every fold."""
    gains, variances = [], []
    for fold in right.values():
        difference = 100 * (np.array(fold[with_part], float) - np.array(fold[without], float))
        gains.append(float(difference.mean()))
        variances.append(float(difference.var(ddof=1)) / len(difference))
    gain, error = float(np.mean(gains)), math.sqrt(sum(variances)) / len(variances)
    interval = mean_interval(gains)
    assert interval is not None
    on = gain > max(2 * error, LEAST_GAIN)
    spread = f" ± {interval.half:.1f}" if interval.half is not None else ""
    why = (
        f"{gain:+.1f}{spread} points on {len(gains)} held-out source "
        f"domain{'s' * (len(gains) > 1)} (standard error over images {error:.1f})"
    )
    return PartDecision(
        part=part, on=on, why=why, gain=round(gain, 2), error=round(error, 2),
        half_interval=None if interval.half is None else round(interval.half, 2),
    )  # fmt: skip


def describe_basis(source: SourceData, folds: Sequence[int], how: str, pseudo: bool) -> str:
    """Says what the evidence rests on; `how` the folds were trained."""
    kind = "pseudo-domain" if pseudo else "source domain"
    count = len(source.domain_names)
    text = f"{len(folds)} of {count} {kind}s held out in turn, {how}"
    if count == 2:
        text += "; with two domains, each fold trains on one domain alone"
    if pseudo:
        text += "; pseudo-domains may differ less than the domains to come"
    return text
