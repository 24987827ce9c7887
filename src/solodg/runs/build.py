"""Builds the parts of a run from its configuration: backbone, features, algorithm, schedule."""

from pathlib import Path

import numpy as np
import torch

from solodg.algorithms import Algorithm, build_algorithm
from solodg.data import SourceData
from solodg.data.episodes import EpisodeSampler
from solodg.data.pseudo_domains import cluster_domains, random_domains
from solodg.errors import UserError
from solodg.models.backbones import Backbone, build_backbone
from solodg.models.extractor import Extractor, ReadyFeatures
from solodg.progress import Progress
from solodg.readings import ImageNorm, Reading, readings_of
from solodg.runs.config import Machine, ResolvedConfig
from solodg.runs.defaults import algorithm_arguments
from solodg.runs.feature_cache import FeatureStore, default_cache_dir
from solodg.runs.fit import Schedule
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
    return algorithm


def ready_features(backbone: Backbone) -> ReadyFeatures:
    """Returns an extractor for stored features of a backbone, to use in place of the backbone."""
    return ReadyFeatures(backbone.embedding_dim, backbone.style_dim, backbone.readings)


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
    folder = (machine.cache_dir or default_cache_dir()) / "features"
    return FeatureStore(backbone, config.backbone, folder, device, progress, window=config.window)


def with_features(source: SourceData, store: FeatureStore) -> SourceData:
    """Returns the source data with stored features in place of its images."""
    parts = iter(store.replace_images([source.train, source.val, source.test]))
    return source.mapped(lambda _: next(parts))


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
        dataset=Path(config.dataset).name,
    )
