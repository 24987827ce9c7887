"""How long a plan may take here: from records of like runs, or else from a few steps, measured."""

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from solodg.assembly import (
    inputs,
    make_algorithm,
    make_backbone,
    make_schedule,
    open_source,
    single_device,
)
from solodg.backbones import Backbone
from solodg.config import Machine, RunConfig, portable
from solodg.data.episodes import EpisodeLoader, EpisodeSampler
from solodg.data.transforms import to_unit
from solodg.plan import Cell
from solodg.progress import Progress
from solodg.results import Results
from solodg.training import build_optimizer
from solodg.types import Batch, Episode

_STEPS = 3  # measured, after one to warm up
_OVERHEAD = 1.15  # loading, validation, scoring; as seen on digits


def estimate_seconds(
    cells: Sequence[Cell], machine: Machine, results: Results, progress: Progress
) -> dict[str, float]:
    """Seconds of training by run key. What the seed and the target change is left out."""
    known = _history(results)
    open_kinds = {_kind(portable(c.config)): c for c in cells if c.key not in results.done}
    missing = {kind: cell for kind, cell in open_kinds.items() if kind not in known}
    if missing:
        with progress.bar("Measuring a few steps of each method", len(missing)) as advance:
            for kind, cell in missing.items():
                known[kind] = _measured(cell.config, machine)
                advance(1)
    return {
        cell.run_key: known[kind]
        for cell in cells
        if (kind := _kind(portable(cell.config))) in known
    }


def _kind(config: dict[str, object]) -> str:
    return repr(
        sorted((k, v) for k, v in config.items() if v is not None and k not in ("seed", "targets"))
    )


def _history(results: Results) -> dict[str, float]:
    seen: dict[str, list[float]] = {}
    for records in results.done.values():
        seconds = records[0].time.get("training_seconds")
        if seconds:
            seen.setdefault(_kind(records[0].config), []).append(seconds)
    return {kind: statistics.median(values) for kind, values in seen.items()}


def _measured(config: RunConfig, machine: Machine) -> float:
    source, config = open_source(config, machine)
    backbone = make_backbone(config)
    algorithm = make_algorithm(config, backbone, len(source.classes)).train()
    optimizer = build_optimizer(algorithm, make_schedule(config))
    sampler = EpisodeSampler(
        source.train,
        context=config.context_images,
        queries=config.batch_size,
        seed=config.seed,
        classes=source.classes,
    )
    loader = EpisodeLoader(source.train, sampler, workers=machine.workers)
    device = single_device(machine.accelerator)
    algorithm.to(device)
    backbone.to(device)
    features = 0.0
    marks = []
    for step in range(_STEPS + 1):
        marks.append(time.perf_counter())
        episode = loader.load(step)
        loss = algorithm.losses(
            Episode(
                _ready(episode.source, config, backbone, device),
                _ready(episode.target, config, backbone, device),
                episode.num_context,
            )
        )["loss"]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    marks.append(time.perf_counter())
    if config.freeze_backbone:
        few = source.train.subset(np.arange(min(32, len(source.train))))
        started = time.perf_counter()
        with torch.inference_mode():
            for batch in inputs(few):
                backbone.eval()(batch.x.to(device))
        features = (
            (time.perf_counter() - started) / len(few) * (len(source.train) + len(source.val))
        )
    per_step = statistics.median(b - a for a, b in pairwise(marks[1:]))
    assert config.steps is not None
    return _OVERHEAD * per_step * config.steps + features


def _ready(half: Batch, config: RunConfig, backbone: Backbone, device: torch.device) -> Batch:
    """On the device, as a step sees it; features of a frozen backbone are computed beforehand."""
    x = to_unit(half.x)
    if config.freeze_backbone:
        x = torch.randn(len(half.y), backbone.embedding_dim + backbone.style_dim)
    return Batch(x.to(device), half.y.to(device), half.domain.to(device))
