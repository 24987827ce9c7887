"""How long a plan may take here: from records of like runs, or else from a few steps, measured."""

import statistics
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from solodg.bench.plan import Cell
from solodg.bench.records import Results
from solodg.data.episodes import EpisodeLoader
from solodg.data.pseudo_domains import random_domains
from solodg.data.transforms import to_unit
from solodg.errors import UserError
from solodg.models.backbones import Backbone
from solodg.progress import Progress
from solodg.runs.build import (
    input_batches,
    make_algorithm,
    make_backbone,
    make_sampler,
    make_schedule,
    open_source,
)
from solodg.runs.config import Machine, RunConfig, portable
from solodg.runs.devices import single_device
from solodg.runs.fit import build_optimizer
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
                with suppress(UserError):  # no data here, say: the plan is shown all the same
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
    if config.pseudo_domains:  # clusters cost the same steps
        source = random_domains(source, config.num_pseudo_domains, seed=config.seed)
    backbone = make_backbone(config)
    algorithm = make_algorithm(config, backbone, source).train()
    optimizer = build_optimizer(algorithm, make_schedule(config))
    loader = EpisodeLoader(source.train, make_sampler(config, source), workers=machine.workers)
    device = single_device(machine.accelerator)
    algorithm.to(device)
    backbone.to(device)
    episode = _ready(loader.load(0), config, backbone, device)
    seconds = []
    for _ in range(_STEPS + 1):
        started = time.perf_counter()
        loss = algorithm.losses(episode)["loss"]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    assert config.steps is not None
    whole = _OVERHEAD * statistics.median(seconds[1:]) * config.steps
    if config.freeze_backbone:
        few = source.train.subset(np.arange(min(32, len(source.train))))
        started = time.perf_counter()
        with torch.inference_mode():
            for batch in input_batches(few):
                backbone.eval()(batch.x.to(device))
        per_image = (time.perf_counter() - started) / len(few)
        whole += per_image * (len(source.train) + len(source.val))
    return whole


def _ready(
    episode: Episode, config: RunConfig, backbone: Backbone, device: torch.device
) -> Episode:
    """On the device, as a step sees it; features of a frozen backbone are computed beforehand."""

    def moved(half: Batch) -> Batch:
        x = to_unit(half.x)
        if config.freeze_backbone:
            width = len(backbone.readings) * (backbone.embedding_dim + backbone.style_dim)
            x = torch.randn(len(half.y), width)
        return Batch(x.to(device), half.y.to(device), half.domain.to(device))

    return Episode(moved(episode.source), moved(episode.target), episode.num_context)
