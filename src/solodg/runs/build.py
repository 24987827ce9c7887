"""Builds the parts of a run from its configuration: data, backbone, algorithm, schedule."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from solodg.algorithms import Algorithm, build_algorithm
from solodg.data import DomainDataset, LabelledImages, Loading, SourceData, dataset_spec
from solodg.data.episodes import EpisodeSampler
from solodg.data.images import ImageFiles, MemoryBudget
from solodg.data.pseudo_domains import cluster_domains, random_domains
from solodg.data.splits import TEST, VAL
from solodg.data.summary import DataSummary, summarise
from solodg.data.transforms import to_unit
from solodg.errors import UserError
from solodg.inference import inference_batch_size
from solodg.models.backbones import Backbone, build_backbone
from solodg.models.extractor import Extractor, ReadyFeatures
from solodg.progress import Progress, Say
from solodg.runs.config import Machine, ResolvedConfig
from solodg.runs.defaults import algorithm_arguments
from solodg.runs.feature_cache import FeatureStore, default_cache_dir
from solodg.runs.fit import Schedule
from solodg.runs.model_info import ModelInfo
from solodg.seeding import derive
from solodg.types import Batch

ShowData = Callable[[DataSummary], None]  # a callback that shows the user what a dataset holds


def open_source(
    config: ResolvedConfig, machine: Machine, show: ShowData = lambda summary: None
) -> tuple[SourceData, ResolvedConfig]:
    """Returns the source domains of a run, and its configuration with the data's domain names.

    `show` is called with a summary of all domains.
    """
    dataset = load_dataset(config, machine)
    targets = dataset.canonical(config.targets)
    exclude = dataset.canonical(config.exclude) if config.exclude else None
    config = config.model_copy(update={"targets": targets, "exclude": exclude})
    show(summarise(dataset, targets, exclude or ()))
    source = source_domains(dataset, config)
    if len(source.domain_names) < 2 and not config.pseudo_domains:
        raise UserError(
            f"training needs at least two source domains, and without "
            f"{', '.join(config.left_out)} there is only {source.domain_names[0]!r}. "
            "Make domains of it with --pseudo-domains random or --pseudo-domains clusters."
        )
    return source, config


def remarks_to(say: Say) -> ShowData:
    """Returns a callback that says what was left out of the data, line by line."""

    def show(summary: DataSummary) -> None:
        for line in summary.remarks():
            say(line)

    return show


def check_folds(source: SourceData) -> None:
    """Raises `UserError` if leave-one-out selection cannot hold out every source domain."""
    if len(source.domain_names) < 3:
        raise UserError(
            "--select leave-one-out needs three source domains: one to hold out, two to train."
        )
    for number in range(len(source.domain_names)):
        source.held_out(number)


def source_domains(dataset: DomainDataset, config: ResolvedConfig) -> SourceData:
    """Returns the domains that a run trains on, split as its configuration says."""
    return dataset.leave_out(
        config.targets,
        exclude=config.exclude or (),
        part=scored_part(config),
        seed=config.seed,
        val_fraction=config.val_fraction,
        allow_shared_groups=bool(config.allow_shared_groups),
    )


def scored_part(config: ResolvedConfig) -> int:
    """Returns the part of the target domains that is scored."""
    return VAL if config.score_on == "validation" else TEST


def read_source(
    source: SourceData,
    config: ResolvedConfig,
    progress: Progress,
    say: Say,
    store: FeatureStore | None = None,
) -> SourceData:
    """Returns the source data without unreadable images, checked to be enough for training.

    Images whose features are all in `store` were readable before and are not decoded again.
    """
    if store is None or not store.holds([source.train, source.val, source.test]):
        source = source.mapped(lambda part: without_bad_images(part, config, progress, say))
    source.check()
    return source


def load_dataset(config: ResolvedConfig, machine: Machine) -> DomainDataset:
    """Loads the dataset that a configuration names, with all its domains."""
    spec = dataset_spec(config.dataset)
    return spec.load(
        Loading(
            data_dir=machine.data_dir,
            image_size=config.image_size,
            channels=config.channels,
            seed=config.seed,
            train_images=config.train_images,
            download=machine.download,
            budget=MemoryBudget(int(machine.memory_gb * 1024**3)),
        )
    )


def without_bad_images(
    part: LabelledImages, config: ResolvedConfig, progress: Progress, say: Say
) -> LabelledImages:
    """Decodes every image once and returns those that can be read.

    An unreadable image is an error unless the configuration has `skip_bad_images`.
    """
    if not isinstance(part.images, ImageFiles) or len(part) == 0:
        return part
    with progress.bar("Reading images", len(part)) as advance:
        bad = part.images.bad_images(lambda count: advance(count))
    if not bad:
        return part
    first = bad[min(bad)]
    if not config.skip_bad_images:
        more = f" ({len(bad) - 1} more like it)" if len(bad) > 1 else ""
        raise UserError(f"{first}{more}. Repair or remove it, or add --skip-bad-images.")
    say(f"Skipped {len(bad)} unreadable image(s), the first: {first.name}")
    return part.subset(np.setdiff1d(np.arange(len(part)), list(bad)))


def input_batches(part: LabelledImages) -> Iterator[Batch]:
    """Yields all images once, in order, as batches of model inputs without augmentation."""
    if len(part) == 0:
        return
    for batch in part.batches(inference_batch_size(part.images.take([0]).numel())):
        yield batch._replace(x=to_unit(batch.x))


def make_backbone(config: ResolvedConfig) -> Backbone:
    """Builds the backbone with its initial weights, and freezes what the configuration names."""
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


def make_algorithm(config: ResolvedConfig, backbone: Backbone, source: SourceData) -> Algorithm:
    """Builds the algorithm with its initial weights; a frozen backbone gives it features."""
    torch.manual_seed(derive(config.seed, "generators"))
    extractor: Extractor = backbone
    if config.freeze_backbone:
        extractor = ready_features(backbone)
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
    return ReadyFeatures(backbone.embedding_dim, backbone.style_dim, len(backbone.readings))


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
    return FeatureStore(backbone, config.backbone, folder, device, progress)


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
        image_norm=config.image_norm or None,
        classes=list(source.classes),
        source_domains=list(source.domain_names),
        dataset=Path(config.dataset).name,
    )
