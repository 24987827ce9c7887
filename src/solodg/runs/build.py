"""The pieces that a configuration names, put together: data, backbone, algorithm, devices."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric

from solodg.algorithms import Algorithm, build_algorithm
from solodg.models.backbones import Backbone, build_backbone
from solodg.models.extractor import Extractor, ReadyFeatures
from solodg.runs.config import Machine, RunConfig, algorithm_arguments
from solodg.data import DomainDataset, LabelledImages, Loading, SourceData, dataset_spec
from solodg.data.episodes import EpisodeSampler
from solodg.data.images import ImageFiles, MemoryBudget
from solodg.data.pseudo_domains import cluster_domains, random_domains
from solodg.data.transforms import to_unit
from solodg.errors import UserError
from solodg.runs.feature_cache import FeatureStore, default_cache_dir
from solodg.runs.model_info import ModelInfo
from solodg.progress import Progress
from solodg.seeding import derive
from solodg.runs.fit import Schedule
from solodg.types import Batch

_EVAL_NUMBERS = 32 * 3 * 224 * 224  # in a batch; measured, see docs/performance.md

Say = Callable[[str], None]


def open_source(config: RunConfig, machine: Machine) -> tuple[SourceData, RunConfig]:
    """The source domains of a run, and its configuration with targets as the data spells them."""
    dataset = load_dataset(config, machine)
    targets = dataset.canonical(config.targets)
    exclude = dataset.canonical(config.exclude) if config.exclude else None
    config = config.model_copy(update={"targets": targets, "exclude": exclude})
    source = dataset.leave_out(config.left_out, seed=config.seed, val_fraction=config.val_fraction)
    if len(source.domain_names) < 2 and not config.pseudo_domains:
        raise UserError(
            f"training needs at least two source domains, and without "
            f"{', '.join(config.left_out)} there is only {source.domain_names[0]!r}. "
            "Make domains of it with --pseudo-domains random or --pseudo-domains clusters."
        )
    return source, config


def read_source(
    source: SourceData,
    config: RunConfig,
    progress: Progress,
    say: Say,
    store: FeatureStore | None = None,
) -> SourceData:
    """The same with every image readable, or left out; those with stored features are."""
    if store is None or not store.holds([source.train, source.val, source.test]):
        source = source.mapped(lambda part: readable(part, config, progress, say))
    source.check()
    return source


def load_dataset(config: RunConfig, machine: Machine) -> DomainDataset:
    spec = dataset_spec(config.dataset)
    return spec.load(
        Loading(
            data_dir=machine.data_dir,
            image_size=config.image_size or spec.image_size,
            channels=config.channels or spec.channels,
            seed=config.seed,
            train_images=config.train_images,
            download=machine.download,
            budget=MemoryBudget(int(machine.memory_gb * 1024**3)),
        )
    )


def readable(
    part: LabelledImages, config: RunConfig, progress: Progress, say: Say
) -> LabelledImages:
    """Decode every image once; a bad one ends the run, or is left out if the user said so."""
    if not isinstance(part.images, ImageFiles) or len(part) == 0:
        return part
    with progress.bar("Reading images", len(part)) as advance:
        bad = part.images.bad_images(lambda count: advance(count))
    if not bad:
        return part
    first = bad[min(bad)]
    if not config.skip_bad_images:
        more = f" ({len(bad) - 1} more like it)" if len(bad) > 1 else ""
        raise UserError(f"{first}{more}. Mend or remove it, or add --skip-bad-images.")
    say(f"Skipped {len(bad)} unreadable image(s), the first: {first.name}")
    return part.subset(np.setdiff1d(np.arange(len(part)), list(bad)))


def inputs(part: LabelledImages) -> Iterator[Batch]:
    """Batches as a model takes them, plainly transformed."""
    for batch in part.batches(_batch_size(part)):
        yield batch._replace(x=to_unit(batch.x))


def _batch_size(part: LabelledImages) -> int:
    """As many images as stay quick: 32 of 224 pixels, more of smaller ones, many features."""
    if len(part) == 0:
        return 1
    numbers = part.images.take([0]).numel()
    return max(8, min(512, _EVAL_NUMBERS // numbers))


def make_backbone(config: RunConfig) -> Backbone:
    assert config.image_size is not None
    assert config.channels is not None
    backbone = build_backbone(
        config.backbone,
        channels=config.channels,
        image_size=config.image_size,
        pretrained=config.pretrained,
        weights=config.weights,
        image_norm=config.image_norm or None,
    )
    if config.freeze_backbone:
        backbone.freeze()
    elif config.freeze_norm:
        backbone.freeze_norm()
    if config.train_stages:
        backbone.train_last(config.train_stages)
    return backbone


def make_algorithm(config: RunConfig, backbone: Backbone, source: SourceData) -> Algorithm:
    torch.manual_seed(derive(config.seed, "generators"))
    extractor: Extractor = backbone
    if config.freeze_backbone:
        extractor = ReadyFeatures(
            backbone.embedding_dim, backbone.style_dim, len(backbone.readings)
        )
    try:
        algorithm = build_algorithm(
            config.algorithm,
            extractor,
            num_classes=len(source.classes),
            num_domains=len(source.domain_names),
            **algorithm_arguments(config),
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"algorithm {config.algorithm}: {error}") from error
    algorithm.label_smoothing = config.label_smoothing or 0.0
    return algorithm


def make_sampler(config: RunConfig, source: SourceData) -> EpisodeSampler:
    return EpisodeSampler(
        source.train,
        context=config.context_images,
        queries=config.batch_size,
        seed=config.seed,
        classes=source.classes,
    )


def feature_store(
    config: RunConfig,
    machine: Machine,
    backbone: Backbone,
    device: torch.device,
    progress: Progress,
) -> FeatureStore:
    folder = (machine.cache_dir or default_cache_dir()) / "features"
    return FeatureStore(backbone, config.backbone, folder, device, progress)


def with_features(source: SourceData, store: FeatureStore) -> SourceData:
    parts = iter(store.replace_images([source.train, source.val, source.test]))
    return source.mapped(lambda _: next(parts))


def with_pseudo_domains(
    source: SourceData, images: SourceData, config: RunConfig, store: FeatureStore
) -> SourceData:
    count = config.num_pseudo_domains
    if config.pseudo_domains == "random":
        return random_domains(source, count, seed=config.seed)
    featured = source if config.freeze_backbone else with_features(images, store)
    train, val = (
        part.images.take(np.arange(len(part))).numpy() for part in (featured.train, featured.val)
    )
    return cluster_domains(
        source, train, val, count, seed=config.seed, min_images=config.context_images
    )


def make_schedule(config: RunConfig) -> Schedule:
    assert config.steps is not None
    assert config.learning_rate is not None
    assert config.backbone_learning_rate is not None
    assert config.validate_every is not None
    return Schedule(
        steps=config.steps,
        validate_every=config.validate_every,
        learning_rate=config.learning_rate,
        backbone_learning_rate=config.backbone_learning_rate,
        weight_decay=config.weight_decay,
        seed=config.seed,
        cosine=config.decay == "cosine",
        average=config.weight_average,
    )


def model_info(config: RunConfig, source: SourceData) -> ModelInfo:
    assert config.image_size is not None
    assert config.channels is not None
    return ModelInfo(
        algorithm=config.algorithm,
        variant=config.variant,
        arguments=algorithm_arguments(config),
        backbone=config.backbone,
        channels=config.channels,
        image_size=config.image_size,
        image_norm=config.image_norm or None,
        classes=list(source.classes),
        source_domains=list(source.domain_names),
        dataset=Path(config.dataset).name,
    )


def launch(config: RunConfig, machine: Machine) -> Fabric:
    number = config.devices.lstrip("-").isdigit()
    devices: Any = int(config.devices) if number else config.devices
    try:
        fabric = Fabric(
            accelerator=machine.accelerator,
            devices=devices,
            num_nodes=config.num_nodes,
            strategy=machine.strategy,
            precision=config.precision,
        )
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"cannot set up the devices: {error}") from error
    fabric.launch()
    return fabric


def single_device(accelerator: str) -> torch.device:
    """One device of the kind asked for: evaluation is not distributed."""
    try:
        device: torch.device = Fabric(accelerator=accelerator, devices=1).device
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"cannot set up the device: {error}") from error
    return device
