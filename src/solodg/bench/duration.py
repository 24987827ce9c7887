"""Estimates how long a plan takes on this machine: from records, or from a few timed steps."""

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from solodg.bench.cell import Cell
from solodg.bench.records import Results
from solodg.data import SourceData
from solodg.data.episodes import EpisodeLoader
from solodg.data.pseudo_domains import random_domains
from solodg.data.transforms import unaugmented
from solodg.errors import UserError
from solodg.models.backbones import Backbone
from solodg.models.extractor import Extractor, ReadyFeatures
from solodg.models.map_backbone import MapBackbone
from solodg.progress import Progress
from solodg.runs.build import make_algorithm, make_backbone, make_sampler, make_schedule
from solodg.runs.config import Machine, ResolvedConfig
from solodg.runs.devices import launch
from solodg.runs.evidence import EVIDENCE_BUDGET
from solodg.runs.fit import fit, start
from solodg.runs.folder import portable
from solodg.runs.open_parts import candidates
from solodg.runs.opened_data import input_batches, open_source
from solodg.runs.stored_arguments import complete_config
from solodg.seeding import unchanged_generators
from solodg.types import Batch, Episode

_STEPS = 3  # timed, after one to warm up
_OVERHEAD = 1.15  # of loading, validation and scoring, as measured on digits


def estimate_training_seconds(
    cells: Sequence[Cell], machine: Machine, results: Results, progress: Progress
) -> dict[str, float]:
    """Returns the expected seconds of training by run key.

    Runs that differ only in seed or target take the same time. A run that cannot be timed, for
    example because its dataset is missing, has no entry.
    """
    seconds = _recorded_seconds(results)
    open_kinds = {_kind(portable(c.config)): c for c in cells if c.key not in results.done}
    missing = {kind: cell for kind, cell in open_kinds.items() if kind not in seconds}
    if missing:
        with progress.bar("Measuring a few steps of each method", len(missing)) as advance:
            for kind, cell in missing.items():
                # No data here, for example: the plan is shown all the same.
                with suppress(UserError), unchanged_generators():
                    seconds[kind] = _measured_seconds(cell.config, machine)
                advance(1)
    return {
        cell.run_key: seconds[kind]
        for cell in cells
        if (kind := _kind(portable(cell.config))) in seconds
    }


def _kind(config: dict[str, object]) -> str:
    """Returns what the time of a run depends on: its configuration without seed and targets."""
    return repr(
        sorted((k, v) for k, v in config.items() if v is not None and k not in ("seed", "targets"))
    )


def _recorded_seconds(results: Results) -> dict[str, float]:
    """Returns the median time of the recorded runs of each kind."""
    by_kind: dict[str, list[float]] = {}
    for records in results.done.values():
        seconds = records[0].time.get("training_seconds")
        if seconds:
            by_kind.setdefault(_kind(complete_config(records[0].config)), []).append(seconds)
    return {kind: statistics.median(values) for kind, values in by_kind.items()}


def _measured_seconds(config: ResolvedConfig, machine: Machine) -> float:
    """Times a few training steps and, where features or maps are stored, those of a few images."""
    parts = config.open_parts
    config = candidates(config, None).all_parts(config) if parts else config
    source, config = open_source(config, machine)
    if config.pseudo_domains:  # steps take as long with clusters
        source = random_domains(source, config.num_pseudo_domains, seed=config.seed)
    fabric = launch(config, machine)
    backbone = make_backbone(config).to(fabric.device)
    algorithm = make_algorithm(config, backbone, source)
    loader = EpisodeLoader(source.train, make_sampler(config, source), workers=machine.workers)
    episode = loader.load(0)
    if config.reads_stored:
        episode = _with_random_rows(episode, algorithm.backbone)
    schedule = replace(make_schedule(config), stop=_STEPS + 1)
    state = start(fabric, algorithm, schedule)
    moments = [
        time.perf_counter() for _ in fit(fabric, state, _Repeated(episode), unaugmented, schedule)
    ]
    factor = _OVERHEAD + (EVIDENCE_BUDGET if parts else 0.0)
    training = factor * statistics.median(np.diff(moments)) * config.steps
    if not config.reads_stored:
        return training
    copies = (config.stored_views or 0) / len(backbone.readings)  # each in one reading
    return training + (1 + copies) * _feature_seconds(source, backbone)


class _Repeated(NamedTuple):
    """One episode for every step, so that reading images is not timed."""

    episode: Episode

    def episodes(self, start: int, stop: int, rank: int = 0) -> Iterator[Episode]:
        """Yields the episode for steps `start` to `stop`."""
        return itertools.repeat(self.episode, stop - start)


def _with_random_rows(episode: Episode, reader: Extractor) -> Episode:
    """Puts random features or maps in place of the images, which are read only once."""
    assert isinstance(reader, ReadyFeatures | MapBackbone)
    width = len(reader.readings) * reader.row_width

    def replaced(half: Batch) -> Batch:
        return half._replace(x=torch.randn(len(half.y), width))  # (B, readings * width)

    return episode._replace(source=replaced(episode.source), target=replaced(episode.target))


def _feature_seconds(source: SourceData, backbone: Backbone) -> float:
    """Returns the time to compute the features of all training and validation images."""
    device = next(backbone.parameters()).device
    few = source.train.subset(np.arange(min(32, len(source.train))))
    started = time.perf_counter()
    with torch.inference_mode():
        for batch in input_batches(few):
            backbone.eval()(batch.x.to(device))
    per_image = (time.perf_counter() - started) / len(few)
    return per_image * (len(source.train) + len(source.val))
