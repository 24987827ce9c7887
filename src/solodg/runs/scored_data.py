"""The images that a run is scored on: the only place where its target domains are read."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from solodg.algorithms import Algorithm
from solodg.data import DomainDataset, LabelledImages, SourceData
from solodg.errors import UserError
from solodg.models.backbones import Backbone
from solodg.models.extractor import Extractor
from solodg.models.map_backbone import MapBackbone
from solodg.progress import Progress, Say
from solodg.runs.build import ready_features, row_store, with_features
from solodg.runs.config import Machine, ResolvedConfig
from solodg.runs.feature_cache import FeatureStore
from solodg.runs.folder import read_config, read_origin
from solodg.runs.map_cache import MapStore
from solodg.runs.model_info import ModelInfo
from solodg.runs.opened_data import (
    load_dataset,
    read_source,
    scored_part,
    source_domains,
    with_shared_groups,
    without_bad_images,
)


class ScoredPart(NamedTuple):
    """The images of one domain: as the algorithm reads them, and as pixels to show."""

    role: str  # as in a record
    images: LabelledImages  # stored features or maps of frozen stages
    pixels: LabelledImages  # of the same images in the same order


class ScoredData(NamedTuple):
    """What a run is scored on, with the algorithm that reads it."""

    config: ResolvedConfig
    dataset: DomainDataset
    parts: list[ScoredPart]
    algorithm: Algorithm  # of the loaded model, or a copy of it that reads what is stored


def open_scored(
    folder: Path,
    algorithm: Algorithm,
    info: ModelInfo,
    machine: Machine,
    device: torch.device,
    *,
    dataset: str | None = None,
    needs_images: bool = False,
    skip_bad_images: bool = False,
    same_sources: bool = False,
    progress: Progress,
    say: Say,
) -> ScoredData:
    """Opens the images that a run is scored on, with an algorithm that reads them.

    The features of a frozen backbone, or the maps of frozen stages (`stored_views`), are computed
    once and stored. Then the algorithm is a copy that reads these, unless `needs_images`; the given
    one stays as it is. `dataset` says where the data lies if it has moved since training. With
    `same_sources`, source images that are not those of the training are an error; else only the
    target domains are scored then.
    """
    config = _with_overrides(read_config(folder), dataset, skip_bad_images)
    with progress.stage("Opening the data"):
        data = load_dataset(config, machine)
    check_classes(data.classes, info)
    store = None
    if config.reads_stored and not needs_images:
        assert isinstance(algorithm.backbone, Backbone)
        store = row_store(config, machine, algorithm.backbone, device, progress, say)
        algorithm = reading_features(algorithm, store)
    source = source_domains(data, with_shared_groups(config))
    if source.shared_groups:
        data = replace(data, facts=data.facts | {"shared_groups": source.shared_groups})
    parts = _scored_parts(data, source, config, folder, store, same_sources, progress, say)
    return ScoredData(config, data, parts, algorithm)


def reading_features(algorithm: Algorithm, store: FeatureStore | None = None) -> Algorithm:
    """Returns a copy of an algorithm that reads stored features, or the maps of a `store` of maps.

    Of the backbone, only the stages that maps go through are copied; all other weights are.
    """
    backbone = algorithm.backbone
    assert isinstance(backbone, Backbone)
    extractor: Extractor = ready_features(backbone).train(backbone.training)
    if isinstance(store, MapStore):
        extractor = copy.deepcopy(MapBackbone(store.cut))
    return copy.deepcopy(algorithm, memo={id(backbone): extractor})


def _scored_parts(
    dataset: DomainDataset,
    source: SourceData,
    config: ResolvedConfig,
    folder: Path,
    store: FeatureStore | None,
    same_sources: bool,
    progress: Progress,
    say: Say,
) -> list[ScoredPart]:
    """Returns the target domains, then the held-out images of each source domain."""

    def read(part: LabelledImages) -> LabelledImages:
        if store is not None and store.holds([part]):
            return part
        return without_bad_images(part, config, progress, say)

    found = dataset.targets(
        config.targets, scored_part(config), seed=config.seed, val_fraction=config.val_fraction
    )
    pixels = [read(images) for images in found.values()]
    targets = pixels
    if store is not None:
        targets = [store.replace_images([images])[0] for images in pixels]
    if store is not None or config.skip_bad_images:  # all of it, as training did
        source = read_source(source, config, progress, say, store)
    held_out = _held_out(source, config, folder, store, same_sources, read, say)
    domains = held_out.images.domains
    members = [np.flatnonzero(domains == d) for d in np.unique(domains)]
    return [ScoredPart("target", *pair) for pair in zip(targets, pixels, strict=True)] + [
        ScoredPart(held_out.role, held_out.images.subset(chosen), held_out.pixels.subset(chosen))
        for chosen in members
    ]


def _held_out(
    source: SourceData,
    config: ResolvedConfig,
    folder: Path,
    store: FeatureStore | None,
    same_sources: bool,
    read: Callable[[LabelledImages], LabelledImages],
    say: Say,
) -> ScoredPart:
    """Returns the source images that were not trained on: test images, or validation images."""
    if source.fingerprint() != read_origin(folder).fingerprint:
        if same_sources:
            raise UserError(
                f"{folder} was trained on other source images than those of now. Restore them, or "
                "remove the folder to train it again."
            )
        if not config.targets:
            raise UserError(
                f"{folder} was trained on all domains, with other images than those of now: images "
                "that were trained on could be among the held-out ones. Restore them, or score "
                "other images with --on FOLDER or --on FILE.csv."
            )
        say(
            "The source images are not those of the training: only the target is scored. Images "
            "that were trained on could be among the held-out ones."
        )
        return ScoredPart("source-validation", source.val.subset([]), source.val.subset([]))
    test = len(source.test) > 0 and config.score_on is None
    role = "in-distribution" if test else "source-validation"
    if store is None:
        held = read(source.test if test else source.val)
        return ScoredPart(role, held, held)
    featured = with_features(source, store)
    if test:
        return ScoredPart(role, featured.test, source.test)
    return ScoredPart(role, featured.val, source.val)


def check_classes(classes: Sequence[str], info: ModelInfo) -> None:
    """Raises `UserError` unless the data has the classes of the model, in the same order."""
    if list(classes) != info.classes:
        raise UserError(
            f"the classes of the data ({_shortened(classes)}) are not those of the model "
            f"({_shortened(info.classes)}): has a folder been renamed, added or removed?"
        )


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _with_overrides(
    config: ResolvedConfig, dataset: str | None, skip_bad_images: bool
) -> ResolvedConfig:
    values: dict[str, Any] = {"dataset": dataset} if dataset else {}
    if skip_bad_images:
        values["skip_bad_images"] = True
    return config.model_copy(update=values)
