"""The labelled images of a new site: scored by a trained model, without its training data."""

from pathlib import Path
from typing import Any

from solodg.data import DATASETS, DomainDataset, Loading, default_data_dir
from solodg.data.in_memory import load_in_memory
from solodg.data.site import load_site, numbered_by
from solodg.data.summary import summarise
from solodg.errors import UserError
from solodg.progress import Progress, Say
from solodg.runs.model_info import ModelInfo
from solodg.runs.opened_data import readable_images
from solodg.runs.scored_data import ScoredPart

PROTOCOL = "new site"
ROLE = "new-site"


def site_loading(info: ModelInfo) -> Loading:
    """Returns the settings with which images are loaded as a model reads them."""
    return Loading(
        data_dir=default_data_dir(),
        image_size=info.image_size,
        channels=info.channels,
        window=info.window,
    )


def labelled_images(
    data: Any, info: ModelInfo, name: str, *, skip_bad_images: bool, progress: Progress
) -> Path | DomainDataset:
    """Returns what `open_site` opens: a path, or a dataset by its name or in memory, loaded.

    Images in memory without a domain are of one that is called `name`. A path that exists is not
    taken for the name of a dataset.
    """
    if isinstance(data, str | Path):
        is_name = str(data) in DATASETS and not Path(data).exists()
        return DATASETS[str(data)].load(site_loading(info)) if is_name else Path(data)
    return load_in_memory(
        data,
        site_loading(info),
        name=name,
        default_domain=name,
        skip_bad_images=skip_bad_images,
        progress=progress,
    )


def open_site(
    on: Path | DomainDataset,
    info: ModelInfo,
    *,
    skip_bad_images: bool,
    progress: Progress,
    say: Say,
) -> tuple[DomainDataset, list[ScoredPart]]:
    """Opens labelled images as a model reads them, and their domains.

    They are a folder, a CSV, or a dataset that was loaded by `site_loading`. If images of a domain
    are marked with split test, only those are scored.
    """
    if isinstance(on, DomainDataset):
        dataset = numbered_by(info.classes, on, on.name)
    else:
        with progress.stage("Opening the images"):
            dataset = load_site(on, site_loading(info), info.classes)
    for line in summarise(dataset).remarks():
        say(line)
    parts = []
    for name, images in dataset.targets(dataset.domain_names).items():
        rest = int((dataset.domains == dataset.domain_index(name)).sum()) - len(images)
        if rest:
            say(f"{name}: only images with split test are scored; {rest} others are not.")
        if name in info.source_domains:
            say(f"{name!r} is also the name of a source domain: were its images trained on?")
        images = readable_images(images, skip_bad_images, progress, say)
        if len(images) == 0:
            say(f"{name}: no image can be read.")
            continue
        parts.append(ScoredPart(ROLE, images, images))
    if not parts:
        raise UserError(f"no image of {dataset.name} can be read: there is nothing to score.")
    return dataset, parts
