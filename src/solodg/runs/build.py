"""Builds the parts of a run from its configuration: backbone, features, algorithm, schedule."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from solodg.algorithms import Algorithm, build_algorithm
from solodg.data import SourceData
from solodg.data.domains import Kind
from solodg.data.episodes import EpisodeSampler
from solodg.data.pseudo_domains import cluster_domains, random_domains
from solodg.errors import UserError
from solodg.models.backbones import Backbone, build_backbone
from solodg.models.cut import Cut
from solodg.models.extractor import Extractor, ReadyFeatures
from solodg.models.map_backbone import MapBackbone
from solodg.progress import Progress, Say
from solodg.readings import ImageNorm, Reading, readings_of
from solodg.runs.cache_folder import FEATURES, MAPS, default_cache_dir
from solodg.runs.config import Machine, ResolvedConfig
from solodg.runs.defaults import algorithm_arguments
from solodg.runs.feature_cache import FeatureStore
from solodg.runs.fit import Schedule
from solodg.runs.map_cache import MapStore
from solodg.runs.model_info import ModelInfo
from solodg.seeding import derive


def make_backbone(config: ResolvedConfig) -> Backbone:
    """Builds the backbone with its initial weights, and freezes what the configuration names."""
    backbone = build_backbone(
        config.backbone,
        channels=config.channels,
        image_size=config.image_size,
        pretrained=config.pretrained,
        weights=config.weights,
        image_norm=_decided(config),
        pose=config.pose == "on",
    )
    if config.freeze_backbone:
        backbone.freeze()
    elif config.freeze_norm:
        backbone.freeze_norm()
    if config.train_stages:
        backbone.train_last(config.train_stages)
    return backbone


def _decided(config: ResolvedConfig) -> ImageNorm:
    """Returns the source pixels of image norm, which are decided when a backbone is built."""
    assert not config.open_parts, "held-out domains decide about these first: runs.evidence"
    return config.image_norm or None


def make_algorithm(config: ResolvedConfig, backbone: Backbone, source: SourceData) -> Algorithm:
    """Builds the algorithm with its initial weights; a frozen backbone gives it features."""
    torch.manual_seed(derive(config.seed, "generators"))
    extractor: Extractor = backbone
    if config.stored_views is not None:
        extractor = map_backbone(config, backbone)
    if config.freeze_backbone:
        ready = ready_features(backbone)
        ready.use(readings_of(_decided(config)) or (Reading(),))
        extractor = ready
    try:
        algorithm = build_algorithm(
            config.algorithm,
            extractor,
            num_classes=len(source.classes),
            num_domains=len(source.domain_names),
            **algorithm_arguments(config),
        )
    except (RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"algorithm {config.algorithm}: {error}") from error
    algorithm.label_smoothing = config.label_smoothing or 0.0
    algorithm.domain_images = source.train.domain_sizes
    return algorithm


def ready_features(backbone: Backbone) -> ReadyFeatures:
    """Returns an extractor for stored features of a backbone, to use in place of the backbone."""
    return ReadyFeatures(backbone.embedding_dim, backbone.style_dim, backbone.readings)


def map_backbone(config: ResolvedConfig, backbone: Backbone) -> MapBackbone:
    """Returns an extractor for stored maps, whose modules are the last stages of a backbone."""
    assert config.train_stages is not None
    return MapBackbone(Cut(backbone, config.train_stages))


def make_sampler(config: ResolvedConfig, source: SourceData) -> EpisodeSampler:
    """Returns the sampler that draws training episodes from the source domains."""
    return EpisodeSampler(
        source.train,
        context=config.context_images,
        queries=config.batch_size,
        seed=config.seed,
        classes=source.classes,
    )


def feature_store(
    config: ResolvedConfig,
    machine: Machine,
    backbone: Backbone,
    device: torch.device,
    progress: Progress,
) -> FeatureStore:
    """Opens the store of a backbone's features in the cache folder of the machine."""
    folder = (machine.cache_dir or default_cache_dir()) / FEATURES
    return FeatureStore(backbone, config.backbone, folder, device, progress, window=config.window)


def row_store(
    config: ResolvedConfig,
    machine: Machine,
    backbone: Backbone,
    device: torch.device,
    progress: Progress,
    say: Say = lambda text: None,
    kind: Kind | None = None,
) -> FeatureStore | None:
    """Opens the store that takes the place of images: of maps, of features; None: of neither.

    Augmented copies are stored if the `kind` of the training data is given.
    """
    if config.freeze_backbone:
        return feature_store(config, machine, backbone, device, progress)
    if config.stored_views is None:
        return None
    assert config.train_stages is not None
    return MapStore(
        Cut(backbone, config.train_stages),
        config.backbone,
        (machine.cache_dir or default_cache_dir()) / MAPS,
        device,
        progress,
        window=config.window,
        copies=config.stored_views if kind else 0,
        kind=kind or "photo",
        disk_gb=machine.map_disk_gb,
        say=say,
    )


def with_features(source: SourceData, store: FeatureStore) -> SourceData:
    """Returns the source data with stored features in place of its images."""
    parts = iter(store.replace_images([source.train, source.val, source.test]))
    return source.mapped(lambda _: next(parts))


def with_rows(source: SourceData, images: SourceData, store: FeatureStore | None) -> SourceData:
    """Returns the source data with what a store holds of `images` in place of its own images.

    `images` is the same data as pixels, possibly with other domains.
    """
    if store is None:
        return source
    stored = with_features(images, store)
    rows = iter([stored.train.images, stored.val.images, stored.test.images])
    return source.mapped(lambda part: replace(part, images=next(rows)))


def with_pseudo_domains(
    source: SourceData, images: SourceData, config: ResolvedConfig, store: FeatureStore
) -> SourceData:
    """Returns the source data with pseudo-domains: random ones, or clusters of backbone features.

    `images` is the same data as pixels, which clustering reads unless `source` holds features.
    """
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


def make_schedule(config: ResolvedConfig) -> Schedule:
    """Returns the training schedule of a configuration."""
    return Schedule(
        steps=config.steps,
        validate_every=config.validate_every,
        learning_rate=config.learning_rate,
        backbone_learning_rate=config.backbone_learning_rate,
        weight_decay=config.weight_decay,
        seed=config.seed,
        decay=config.decay or "constant",
        average=config.weight_average,
        linear_steps=config.linear_steps or 0,
    )


def describe_model(config: ResolvedConfig, source: SourceData) -> ModelInfo:
    """Returns the description of the model that a configuration trains, for `model.json`."""
    return ModelInfo(
        algorithm=config.algorithm,
        variant=config.variant,
        arguments=algorithm_arguments(config),
        backbone=config.backbone,
        channels=config.channels,
        image_size=config.image_size,
        image_norm=_decided(config),
        pose=config.pose == "on",
        window=config.window,
        classes=list(source.classes),
        source_domains=list(source.domain_names),
        left_out_domains=list(config.left_out),
        dataset=Path(config.dataset).name,
    )
