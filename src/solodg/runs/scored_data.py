"""What a run is scored on: the first and only place where its target domains are read."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from solodg.algorithms import Algorithm
from solodg.data import DomainDataset, LabelledImages, SourceData
from solodg.data.domains import TEST, VAL
from solodg.errors import UserError
from solodg.models.backbones import Backbone
from solodg.models.extractor import ReadyFeatures
from solodg.progress import Progress
from solodg.runs.build import (
    Say,
    feature_store,
    load_dataset,
    read_source,
    readable,
    with_features,
)
from solodg.runs.config import Machine, ResolvedConfig
from solodg.runs.feature_cache import FeatureStore
from solodg.runs.folder import SOURCE, read_config
from solodg.runs.model_info import ModelInfo
from solodg.storage import read_json


class ScoredPart(NamedTuple):
    """One domain's images to score: as the model reads them, and as a person sees them."""

    role: str
    images: LabelledImages  # ready features, where the backbone is frozen
    pixels: LabelledImages  # the same in the same order


class Opened(NamedTuple):
    """A run's data as it is scored."""

    config: ResolvedConfig
    data: DomainDataset
    parts: list[ScoredPart]


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
    progress: Progress,
    say: Say,
) -> Opened:
    """What a run is scored on; a frozen backbone gives way to its features, computed once."""
    config = _moved(read_config(folder), dataset, skip_bad_images)
    data = load_dataset(config, machine)
    check_classes(data.classes, info)
    store = None
    if config.freeze_backbone and not needs_images:
        backbone = algorithm.backbone
        assert isinstance(backbone, Backbone)
        store = feature_store(config, machine, backbone, device, progress)
        algorithm.backbone = ReadyFeatures(
            backbone.embedding_dim, backbone.style_dim, len(backbone.readings)
        ).eval()
    return Opened(config, data, _scored_parts(data, config, folder, store, progress, say))


def _scored_parts(
    dataset: DomainDataset,
    config: ResolvedConfig,
    folder: Path,
    store: FeatureStore | None,
    progress: Progress,
    say: Say,
) -> list[ScoredPart]:
    """Target domains, then each source domain's test images, or else its validation images."""

    def read(part: LabelledImages) -> LabelledImages:
        if store is not None and store.holds([part]):
            return part
        return readable(part, config, progress, say)

    part = VAL if config.score_on == "validation" else TEST
    pixels = [read(images) for images in dataset.targets(config.targets, part).values()]
    targets = pixels
    if store is not None:
        targets = [store.replace_images([images])[0] for images in pixels]
    source = dataset.leave_out(config.left_out, seed=config.seed, val_fraction=config.val_fraction)
    if store is not None or config.skip_bad_images:  # the whole of it, as training had it
        source = read_source(source, config, progress, say, store)
    own = _held_out(source, config, folder, store, read, say)
    members = [np.flatnonzero(own.images.domains == d) for d in np.unique(own.images.domains)]
    return [ScoredPart("target", *pair) for pair in zip(targets, pixels, strict=True)] + [
        ScoredPart(own.role, own.images.subset(chosen), own.pixels.subset(chosen))
        for chosen in members
    ]


def _held_out(
    source: SourceData,
    config: ResolvedConfig,
    folder: Path,
    store: FeatureStore | None,
    read: Callable[[LabelledImages], LabelledImages],
    say: Say,
) -> ScoredPart:
    """The source images that training did not see: test images, or else validation images."""
    if source.fingerprint() != read_json(folder / SOURCE)["fingerprint"]:
        say(
            "The source images are not those of the training: only the target is scored, since "
            "images that were trained on could stand among the held-out ones."
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


def check_classes(found: Sequence[str], info: ModelInfo) -> None:
    """The data must have the classes of the model, in their order."""
    if list(found) != info.classes:
        raise UserError(
            f"the classes of the data ({_shortened(found)}) are not those of the model "
            f"({_shortened(info.classes)}): has a folder been renamed, added or removed?"
        )


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _moved(config: ResolvedConfig, dataset: str | None, skip_bad_images: bool) -> ResolvedConfig:
    values: dict[str, Any] = {"dataset": dataset} if dataset else {}
    if skip_bad_images:
        values["skip_bad_images"] = True
    return config.model_copy(update=values)
