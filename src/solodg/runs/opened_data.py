"""Opens the data of a run: its source domains, split, without images that cannot be read."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from solodg.data import DomainDataset, LabelledImages, Loading, SourceData, dataset_spec
from solodg.data.decode import guessed_note
from solodg.data.images import ImageFiles, MemoryBudget
from solodg.data.splits import TEST, VAL
from solodg.data.summary import DataSummary, summarise
from solodg.data.transforms import to_unit
from solodg.errors import UserError
from solodg.inference import inference_batch_size
from solodg.progress import Progress, Say
from solodg.runs.config import Machine, ResolvedConfig
from solodg.runs.feature_cache import FeatureStore
from solodg.types import Batch

ShowData = Callable[[DataSummary], None]  # a callback that shows the user what a dataset holds


def open_source(
    config: ResolvedConfig,
    machine: Machine,
    show: ShowData = lambda summary: None,
    data: DomainDataset | None = None,
) -> tuple[SourceData, ResolvedConfig]:
    """Returns the source domains of a run, and its configuration with the data's domain names.

    `show` is called with a summary of all domains. `data` is the dataset if it is loaded already.
    """
    dataset = load_dataset(config, machine) if data is None else data
    targets = dataset.canonical(config.targets)
    exclude = dataset.canonical(config.exclude) if config.exclude else None
    config = config.model_copy(update={"targets": targets, "exclude": exclude})
    show(summarise(dataset, targets, exclude or ()))
    source = source_domains(dataset, config)
    if len(source.domain_names) < 2 and not config.pseudo_domains:
        without = f"without {', '.join(config.left_out)} " if config.left_out else ""
        raise UserError(
            f"training needs at least two source domains, and {without}there is only "
            f"{source.domain_names[0]!r}. "
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


def with_shared_groups(config: ResolvedConfig) -> ResolvedConfig:
    """Returns the configuration of a finished run, for opening its data whatever groups it shares.

    Only training refuses shared groups. A run of before may have them; its records then say so.
    """
    return config.model_copy(update={"allow_shared_groups": True})


def scored_part(config: ResolvedConfig) -> int:
    """Returns the part of the target domains that is scored."""
    return VAL if config.score_on == "validation" else TEST


def reopen_source(
    config: ResolvedConfig, machine: Machine, progress: Progress, say: Say
) -> tuple[SourceData, ResolvedConfig]:
    """Returns what `open_source` does, with the training images as a finished run trained on them.

    A run with `skip_bad_images` left unreadable images out after the split. The same is done here,
    so that all other images stay in their parts.
    """
    source, config = open_source(with_shared_groups(config), machine)
    if config.skip_bad_images:
        train = without_bad_images(source.train, config, progress, say)
        source = replace(source, train=train)
    return source, config


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
    dataset = dataset_spec(config.dataset).load(loading_of(config, machine))
    if config.window and not isinstance(dataset.images, ImageFiles):
        raise UserError(
            f"--window is for image files of more than 8 bits; {config.dataset} has 8-bit images."
        )
    return dataset


def loading_of(config: ResolvedConfig, machine: Machine) -> Loading:
    """Returns the settings with which a run loads its dataset."""
    return Loading(
        data_dir=machine.data_dir,
        image_size=config.image_size,
        channels=config.channels,
        seed=config.seed,
        train_images=config.train_images,
        download=machine.download,
        budget=MemoryBudget(int(machine.memory_gb * 1024**3)),
        window=config.window,
        columns=config.columns or {},
        split_values=config.split_values or {},
    )


def say_guessed_ranges(source: SourceData, say: Say) -> None:
    """Says how many decoded source images have more than 8 bits and no window."""
    parts = (source.train.images, source.val.images, source.test.images)
    count = sum(len(images.guessed) for images in parts if isinstance(images, ImageFiles))
    if count:
        say(guessed_note(count))


def without_bad_images(
    part: LabelledImages, config: ResolvedConfig, progress: Progress, say: Say
) -> LabelledImages:
    """Decodes every image once and returns those that can be read.

    An unreadable image is an error unless the configuration has `skip_bad_images`.
    """
    return readable_images(part, bool(config.skip_bad_images), progress, say)


def readable_images(
    part: LabelledImages, skip_bad_images: bool, progress: Progress, say: Say
) -> LabelledImages:
    """Decodes every image once and returns those that can be read.

    An unreadable image is an error unless `skip_bad_images`.
    """
    if not isinstance(part.images, ImageFiles) or len(part) == 0:
        return part
    with progress.bar("Reading images", len(part)) as advance:
        bad = part.images.bad_images(lambda count: advance(count))
    if not bad:
        return part
    first = bad[min(bad)]
    if not skip_bad_images:
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
