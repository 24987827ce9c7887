"""Gathers the evidence for the adaptation: trains on some source domains, scores on another."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from solodg.algorithms import Algorithm
from solodg.data import SourceData
from solodg.data.episodes import EpisodeLoader
from solodg.data.pseudo_domains import random_domains
from solodg.data.transforms import AUGMENTATIONS, unaugmented
from solodg.models.backbones import Backbone
from solodg.runs.build import make_algorithm, make_backbone, make_sampler, make_schedule
from solodg.runs.config import AUTO, ResolvedConfig
from solodg.runs.devices import on_first
from solodg.runs.domain_rotations import domain_rotations
from solodg.runs.evidence import (
    Candidates,
    Evidence,
    candidates,
    decide,
    describe_basis,
    fold_domains,
    fold_steps,
    held_out_images,
    score_readings,
)
from solodg.runs.fit import fit, start
from solodg.runs.folder import EVIDENCE
from solodg.runs.pose_training import train_pose
from solodg.runs.workplace import Workplace
from solodg.seeding import derive
from solodg.storage import read_json, write_json

FOLDS = "evidence"  # folder of the folds that are done, until all are


class _Fold(BaseModel):
    """A fold that is done: which images each reading gets right."""

    model_config = ConfigDict(extra="forbid")

    right: dict[str, list[bool]]
    seconds: float


def gather_evidence(
    work: Workplace, config: ResolvedConfig, source: SourceData, backbone: Backbone, folder: Path
) -> Evidence:
    """Decides about all that the configuration leaves open, and writes `evidence.json`.

    `backbone` is one that can read images in every way that is open; with a frozen backbone,
    `source` holds its features. Folds that an interrupted run has done are not done again.
    """
    fabric = work.fabric
    if on_first(fabric, (folder / EVIDENCE).is_file):
        return on_first(fabric, lambda: read_json(folder / EVIDENCE, Evidence))
    rotations = domain_rotations(source.train, config.seed) if config.pose == AUTO else None
    options = candidates(config, rotations)
    numbers = fold_domains(source) if len(options.readings) > 1 else []
    steps = _steps(config, source, numbers)
    right, seconds = {}, 0.0
    for number in numbers:
        path = folder / FOLDS / f"{number}.json"
        if not on_first(fabric, path.is_file):
            work.say(f"Holding source domain {source.domain_names[number]} out: {steps} steps")
            found = _run_fold(work, config, source, backbone, options, number, steps)
            on_first(fabric, partial(write_json, path, found.model_dump()))
        fold = on_first(fabric, partial(_read_fold, path))
        right[source.domain_names[number]] = fold.right
        seconds += fold.seconds
    basis = "no open part needs a held-out domain"
    if numbers:
        basis = describe_basis(source, numbers, steps, pseudo=config.pseudo_domains is not None)
    evidence = decide(options, right, basis, round(seconds, 1))

    def finish() -> None:
        write_json(folder / EVIDENCE, evidence.model_dump(mode="json"))
        for path in (folder / FOLDS).glob("*.json"):
            path.unlink()
        if (folder / FOLDS).is_dir():
            (folder / FOLDS).rmdir()

    on_first(fabric, finish)
    return evidence


def _steps(config: ResolvedConfig, source: SourceData, numbers: list[int]) -> int:
    """Returns the steps of each fold."""
    if not numbers:
        return 0
    whole = make_sampler(config, source)(0)
    part = make_sampler(config, _training_part(config, source, numbers[0]))(0)
    images, fold_images = (len(drawn.source) + len(drawn.target) for drawn in (whole, part))
    return fold_steps(config.steps, images, fold_images, len(numbers))


def _read_fold(path: Path) -> _Fold:
    return read_json(path, _Fold)


def _training_part(config: ResolvedConfig, source: SourceData, number: int) -> SourceData:
    """Returns the source data without one domain; a single one that is left is divided in two."""
    rest = source.holding_out(number)
    if len(rest.domain_names) > 1:
        return rest
    return random_domains(rest, 2, seed=config.seed)


def _run_fold(
    work: Workplace,
    config: ResolvedConfig,
    source: SourceData,
    backbone: Backbone,
    options: Candidates,
    number: int,
    steps: int,
) -> _Fold:
    """Trains a network that reads images in all ways, and scores each on the held-out domain."""
    started = work.clock.seconds
    linear: dict[str, Any] = {"algorithm": "erm", "variant": "default", "arguments": {}}
    config = options.all_parts(config).model_copy(
        update=linear | {"steps": steps, "validate_every": steps, "weight_average": None}
    )
    held = held_out_images(source, number, config.seed)
    rest = _training_part(config, source, number)
    if not config.freeze_backbone:
        torch.manual_seed(derive(config.seed, "weights"))
        backbone = make_backbone(config)
    algorithm = make_algorithm(config, backbone, rest)
    sampler = make_sampler(config, rest)
    transform = AUGMENTATIONS[source.kind] if config.augment else unaugmented
    schedule = make_schedule(config)
    state = start(work.fabric, algorithm, schedule)
    loader = EpisodeLoader(rest.train, sampler, workers=work.machine.workers)
    title = f"Evidence without {source.domain_names[number]}"
    with work.progress.bar(title, steps) as advance:
        if backbone.pose is not None:
            train_pose(
                work.fabric, backbone, rest, domain_rotations(rest.train, config.seed), sampler,
                transform, steps=steps, seed=config.seed, workers=work.machine.workers,
            )  # fmt: skip
            backbone.upright = 0.5
        for _ in fit(work.fabric, state, loader, transform, schedule):
            advance(1)
    scored: Algorithm = state.validated.eval()

    def score() -> _Fold:
        right = score_readings(scored, held, options.readings, work.fabric.device)
        work.clock.save()
        return _Fold(right=right, seconds=work.clock.seconds - started)

    return on_first(work.fabric, score)
