"""Gathers the evidence for the adaptation: trains on some source domains, scores on another."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from solodg.algorithms import Algorithm
from solodg.data import SourceData
from solodg.data.episodes import EpisodeLoader
from solodg.data.transforms import AUGMENTATIONS, unaugmented
from solodg.errors import UserError
from solodg.models.backbones import Backbone
from solodg.runs.build import make_algorithm, make_backbone, make_sampler, make_schedule
from solodg.runs.closed_form import solve_folds
from solodg.runs.config import AUTO, ResolvedConfig
from solodg.runs.defaults import is_closed_form
from solodg.runs.devices import on_first
from solodg.runs.domain_rotations import domain_rotations
from solodg.runs.evidence import (
    LEAST_IMAGES,
    Evidence,
    decide,
    describe_basis,
    fold_domains,
    fold_steps,
    held_out_images,
    score_combinations,
    without_domain,
)
from solodg.runs.fit import fit, start
from solodg.runs.folder import EVIDENCE
from solodg.runs.open_parts import Candidates, candidates
from solodg.runs.pose_training import train_pose
from solodg.runs.workplace import Workplace
from solodg.seeding import derive
from solodg.storage import read_json, write_json

FOLDS = "evidence"  # folder of the folds that are done, until all are


class _Fold(BaseModel):
    """A fold that is done: which images each combination gets right."""

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
        on_first(fabric, partial(_remove_folds, folder))
        return on_first(fabric, lambda: read_json(folder / EVIDENCE, Evidence))
    rotations = None
    if config.pose == AUTO:
        with work.progress.stage("Comparing the source domains at all angles"):
            rotations = on_first(fabric, partial(domain_rotations, source.train, config.seed))
    options = candidates(config, rotations)
    numbers = fold_domains(source) if len(options.combinations) > 1 else []
    basis = "no open part needs a held-out domain"
    try:
        steps = _steps(config, source, numbers, pose=options.with_pose)
    except UserError as error:
        numbers, steps = [], 0
        basis = f"no source domain can be held out ({error})"
        options = options.all_refused(f"without evidence: {basis}")
    right, seconds = {}, 0.0
    if is_closed_form(config) and numbers:
        work.say(
            "Holding source domains out: " + ", ".join(source.domain_names[n] for n in numbers)
        )
        started = work.clock.seconds
        solve = partial(solve_folds, work, config, source, backbone, options, numbers)
        with work.progress.stage("Solving and scoring without each of them"):
            solved = on_first(fabric, solve)
        right = {source.domain_names[number]: found for number, found in solved.items()}
        seconds = work.clock.seconds - started
    for number in numbers if not right else []:
        path = folder / FOLDS / f"{number}.json"
        if not on_first(fabric, path.is_file):
            work.say(f"Holding source domain {source.domain_names[number]} out: {steps} steps")
            found = _run_fold(work, config, source, backbone, options, number, steps)
            on_first(fabric, partial(write_json, path, found.model_dump()))
        fold = on_first(fabric, partial(_read_fold, path))
        right[source.domain_names[number]] = fold.right
        seconds += fold.seconds
    if numbers:
        how = f"{steps} steps on the others, with a linear classifier"
        if is_closed_form(config):
            how = "with a ridge classifier on the others"
        basis = describe_basis(source, numbers, how, pseudo=config.pseudo_domains is not None)
    evidence = decide(options, right, basis, round(seconds, 1))

    def finish() -> None:
        write_json(folder / EVIDENCE, evidence.model_dump(mode="json"))
        _remove_folds(folder)

    on_first(fabric, finish)
    return evidence


def _steps(config: ResolvedConfig, source: SourceData, numbers: list[int], *, pose: bool) -> int:
    """Returns the steps of each fold; raises `UserError` where a domain cannot be held out."""
    if not numbers:
        return 0
    samplers = [make_sampler(config, without_domain(source, n, config.seed)) for n in numbers]
    for number in numbers:
        held = held_out_images(source, number, config.seed)
        if len(held) < LEAST_IMAGES:
            raise UserError(
                f"{len(held)} images of {source.domain_names[number]} can be scored, at least "
                f"{LEAST_IMAGES} are needed"
            )
    images, *fold_images = (
        len(drawn.source) + len(drawn.target)
        for drawn in (sampler(0) for sampler in (make_sampler(config, source), *samplers))
    )
    return fold_steps(config.steps, images, max(fold_images), len(numbers), pose=pose)


def _remove_folds(folder: Path) -> None:
    for path in (folder / FOLDS).glob("*.json"):
        path.unlink()
    if (folder / FOLDS).is_dir():
        (folder / FOLDS).rmdir()


def _read_fold(path: Path) -> _Fold:
    return read_json(path, _Fold)


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
    # The same share of the steps is linear. Nothing is averaged: a fold compares ways to read an
    # image by one and the same network, and validates once.
    shorter = {
        "steps": steps,
        "linear_steps": (config.linear_steps or 0) * steps // config.steps,
        "validate_every": steps,
        "weight_average": None,
    }
    config = options.all_parts(config).model_copy(update=linear | shorter)
    held = held_out_images(source, number, config.seed)
    rest = without_domain(source, number, config.seed)
    if not config.freeze_backbone:
        torch.manual_seed(derive(config.seed, "weights"))
        backbone = make_backbone(config)
    algorithm = make_algorithm(config, backbone, rest)
    sampler = make_sampler(config, rest)
    transform = AUGMENTATIONS[source.kind] if config.augment else unaugmented
    schedule = make_schedule(config)
    loader = EpisodeLoader(rest.train, sampler, workers=work.machine.workers)
    if backbone.pose is not None:
        train_pose(work, backbone, rest, sampler, transform, steps=steps, seed=config.seed)
        if {tried.pose for tried in options.combinations} == {False, True}:
            backbone.upright = 0.5
    state = start(work.fabric, algorithm, schedule)
    title = f"Evidence without {source.domain_names[number]}"
    with work.progress.bar(title, steps) as advance:
        for _ in fit(work.fabric, state, loader, transform, schedule):
            advance(1)
    scored: Algorithm = state.validated.eval()

    def score() -> _Fold:
        with work.progress.stage(f"Scoring {source.domain_names[number]} in every way"):
            right = score_combinations(scored, held, options.combinations, work.fabric.device)
        work.clock.save()
        return _Fold(right=right, seconds=work.clock.seconds - started)

    return on_first(work.fabric, score)
