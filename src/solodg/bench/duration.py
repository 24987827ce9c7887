"""Estimates how long a plan takes on this machine: from records, or from a few timed steps."""

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from solodg.bench.cell import Cell
from solodg.bench.records import Results
from solodg.data import DomainDataset, SourceData
from solodg.data.episodes import EpisodeLoader
from solodg.data.pseudo_domains import random_domains
from solodg.data.transforms import unaugmented
from solodg.errors import UserError
from solodg.models.extractor import Extractor, ReadyFeatures
from solodg.models.map_backbone import MapBackbone
from solodg.progress import NoProgress, Progress
from solodg.runs.build import (
    make_algorithm,
    make_backbone,
    make_sampler,
    make_schedule,
    row_store,
)
from solodg.runs.config import Machine, ResolvedConfig
from solodg.runs.devices import launch
from solodg.runs.evidence import EVIDENCE_BUDGET
from solodg.runs.feature_cache import FeatureStore
from solodg.runs.fit import fit, start
from solodg.runs.folder import portable
from solodg.runs.open_parts import candidates
from solodg.runs.opened_data import load_dataset, open_source, source_domains
from solodg.runs.row_files import RowFiles
from solodg.runs.stored_arguments import complete_config
from solodg.seeding import unchanged_generators
from solodg.types import Batch, Episode

_STEPS = 3  # timed, after one to warm up
_IMAGES = 32  # timed, in every way in which they are stored
_OVERHEAD = 1.15  # of loading, validation and scoring, as measured on digits


def estimate_training_seconds(
    cells: Sequence[Cell], machine: Machine, results: Results, progress: Progress
) -> dict[str, float]:
    """Returns the expected seconds of training by run key.

    Runs that differ only in seed or target take the same time, except that the first run which
    needs features or maps that are not stored yet computes them. A run that cannot be timed, for
    example because its dataset is missing, has no entry.
    """
    seconds = _recorded_seconds(results)
    storing: dict[str, float] = {}  # by run key
    counted, files = set[Path](), RowFiles()  # of features and maps
    open_kinds: dict[str, Cell] = {}  # the first run of each kind
    for cell in cells:
        if cell.key not in results.done:
            open_kinds.setdefault(_kind(portable(cell.config)), cell)
    missing = {kind: cell for kind, cell in open_kinds.items() if kind not in seconds}
    if missing:
        with progress.bar("Measuring a few steps of each method", len(missing)) as advance:
            for kind, cell in missing.items():
                # No data here, for example: the plan is shown all the same.
                with suppress(UserError), unchanged_generators():
                    seconds[kind], store = _measured_seconds(cell.config, machine, counted, files)
                    storing[cell.run_key] = store
                advance(1)
    return {
        cell.run_key: seconds[kind] + storing.get(cell.run_key, 0.0)
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


def _measured_seconds(
    config: ResolvedConfig, machine: Machine, counted: set[Path], files: RowFiles
) -> tuple[float, float]:
    """Returns the seconds of training, and those of computing features or maps for this plan.

    A few steps are timed, and a few images. Files that are in `counted`, or stored already, take no
    time; those that the plan needs are added to it.
    """
    parts = config.open_parts
    config = candidates(config, None).all_parts(config) if parts else config
    dataset = load_dataset(config, machine)
    source, config = open_source(config, machine, data=dataset)
    if config.pseudo_domains:  # steps take as long with clusters
        source = random_domains(source, config.num_pseudo_domains, seed=config.seed)
    fabric = launch(config, machine)
    backbone = make_backbone(config).to(fabric.device)
    storing = 0.0
    if config.reads_stored:
        store = row_store(config, machine, backbone, fabric.device, NoProgress(), kind=source.kind)
        assert store is not None
        store.files = files  # each file's checksum is verified once
        storing = _storing_seconds(store, dataset, source, config, counted)
    algorithm = make_algorithm(config, backbone, source)
    loader = EpisodeLoader(source.train, make_sampler(config, source), workers=machine.workers)
    episode = loader.load(0)
    if config.reads_stored:
        episode = _with_random_rows(episode, algorithm.backbone, config)
    schedule = replace(make_schedule(config), stop=_STEPS + 1)
    state = start(fabric, algorithm, schedule)
    moments = [
        time.perf_counter() for _ in fit(fabric, state, _Repeated(episode), unaugmented, schedule)
    ]
    factor = _OVERHEAD + (EVIDENCE_BUDGET if parts else 0.0)
    return factor * statistics.median(np.diff(moments)) * config.steps, storing


def _storing_seconds(
    store: FeatureStore,
    dataset: DomainDataset,
    source: SourceData,
    config: ResolvedConfig,
    counted: set[Path],
) -> float:
    """Returns the time to compute the rows of all domains that are neither stored nor counted.

    The plan leaves out one domain after another, and scores it, so that all are computed.
    """
    everything = source_domains(dataset, config.model_copy(update={"targets": ()}))
    missing = store.missing([everything.train, everything.val, everything.test])
    rows = sum(count for path, count in missing.items() if path not in counted)
    counted.update(missing)
    if not rows:
        return 0.0
    few = source.train.subset(np.arange(min(_IMAGES, len(source.train))))
    store.compute(few.subset([0]))  # to warm up
    started = time.perf_counter()
    computed = store.compute(few)
    return (time.perf_counter() - started) / computed * rows


class _Repeated(NamedTuple):
    """One episode for every step, so that reading images is not timed."""

    episode: Episode

    def episodes(self, start: int, stop: int, rank: int = 0) -> Iterator[Episode]:
        """Yields the episode for steps `start` to `stop`."""
        return itertools.repeat(self.episode, stop - start)


def _with_random_rows(episode: Episode, reader: Extractor, config: ResolvedConfig) -> Episode:
    """Puts random features or maps in place of the images, which are read only once."""
    assert isinstance(reader, ReadyFeatures | MapBackbone)
    # Where copies are stored, a step draws one reading of each image (`StoredMaps.draw`).
    width = reader.row_width * (1 if config.stored_views else len(reader.readings))

    def replaced(half: Batch) -> Batch:
        return half._replace(x=torch.randn(len(half.y), width))  # (B, width)

    return episode._replace(source=replaced(episode.source), target=replaced(episode.target))
