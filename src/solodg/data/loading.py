"""The entry of a dataset in the registry, and the settings with which it is loaded."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from solodg.data.domains import DomainDataset
from solodg.data.images import MemoryBudget
from solodg.pixels import Window

DEFAULT_MEMORY_GB = 4.0


@dataclass(frozen=True)
class Loading:
    """The settings with which a dataset is loaded: folder, image size, seed, memory."""

    data_dir: Path
    image_size: int
    channels: int
    seed: int = 0
    train_images: int | None = None  # for datasets that take a subset; None: the paper's number
    download: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)  # of files; see columns.py
    split_values: Mapping[str, str] = field(default_factory=dict)  # in files -> train, val, test
    window: Window | None = None  # of image files of more than 8 bits; see `solodg.pixels`
    budget: MemoryBudget = field(
        default_factory=lambda: MemoryBudget(int(DEFAULT_MEMORY_GB * 1024**3))
    )


@dataclass(frozen=True)
class DatasetSpec:
    """A dataset in the registry: its domains, how it is loaded, found and obtained."""

    name: str
    title: str
    domains: tuple[str, ...]
    load: Callable[[Loading], DomainDataset]
    find: Callable[[Path], str | None]  # data folder -> where the dataset is, or None
    how_to_get: str
    channels: int = 3
    image_size: int = 224
    default_targets: tuple[str, ...] = ()
    takes_train_images: bool = False


def default_data_dir() -> Path:
    """Returns the folder of the datasets: $SOLODG_DATA, or `data` in the working folder."""
    return Path(os.environ.get("SOLODG_DATA", "data"))
