"""The cache folder: stored features and maps, which can be computed again at any time."""

import os
import shutil
from pathlib import Path
from typing import NamedTuple

FEATURES, MAPS = "features", "maps"  # its folders


class Holding(NamedTuple):
    """What one folder of the cache holds."""

    name: str
    files: int
    num_bytes: int

    @property
    def gigabytes(self) -> float:
        """Returns the size of all files in GB."""
        return self.num_bytes / 1e9


def default_cache_dir() -> Path:
    """Returns the cache folder of the user: $SOLODG_CACHE, or the usual place."""
    root = os.environ.get("SOLODG_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "solodg"


def holding(cache_dir: Path, name: str) -> Holding:
    """Returns how much the folder `name` of the cache holds."""
    sizes = [path.stat().st_size for path in (cache_dir / name).glob("*.npy") if path.is_file()]
    return Holding(name, len(sizes), sum(sizes))


def clear(cache_dir: Path, name: str) -> Holding:
    """Deletes the files in the folder `name` of the cache; returns what it held."""
    held = holding(cache_dir, name)
    for path in (cache_dir / name).glob("*.npy"):
        path.unlink(missing_ok=True)
    return held


def free_bytes(folder: Path) -> int:
    """Returns how much can be written to the disk of a folder, which need not exist yet."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free
