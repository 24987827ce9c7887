"""How a dataset is asked for, and what the registry knows of each."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from solodg.data.domains import DomainDataset
from solodg.data.images import MemoryBudget

DEFAULT_MEMORY_GB = 4.0


@dataclass(frozen=True)
class Loading:
    """What the reader needs to know besides the dataset's name."""

    data_dir: Path
    image_size: int
    channels: int
    seed: int = 0
    train_images: int | None = None  # for datasets that take a subset; None: the paper's number
    download: bool = False
    budget: MemoryBudget = field(
        default_factory=lambda: MemoryBudget(int(DEFAULT_MEMORY_GB * 1024**3))
    )


@dataclass(frozen=True)
class DatasetSpec:
    """An entry of the registry."""

    name: str
    title: str
    domains: tuple[str, ...]
    load: Callable[[Loading], DomainDataset]
    find: Callable[[Path], str | None]  # where it lies, or None
    how_to_get: str
    channels: int = 3
    image_size: int = 224
    default_targets: tuple[str, ...] = ()
    takes_train_images: bool = False


def default_data_dir() -> Path:
    return Path(os.environ.get("SOLODG_DATA", "data"))
