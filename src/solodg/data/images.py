"""Sources of pixels: arrays in memory, or files that are decoded once and kept if memory allows.

They copy pixels with NumPy, not with torch: episodes are read in threads, and a torch operation in
a second thread would start a second pool of workers that competes with the model for the cores.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from solodg.pixels import BadImageError, Pixels, Window, decode_pixels

Indices = Sequence[int] | np.ndarray
Item = TypeVar("Item")
Result = TypeVar("Result")
_AT_ONCE = 256  # files that wait for the threads: each waiting one takes more than a kilobyte


class Images(Protocol):
    """A fixed sequence of images."""

    def __len__(self) -> int: ...

    def take(self, indices: Indices) -> Tensor:
        """Returns the chosen images: (B, C, H, W) uint8 pixels, or (B, D + S) ready features."""

    def subset(self, indices: Indices) -> "Images":
        """Returns the chosen images as a sequence from which the others cannot be reached."""

    def keys(self) -> list[str]:
        """Returns a key for every image that changes when the image does."""


@runtime_checkable
class DrawnImages(Protocol):
    """Images that are stored in several augmented copies."""

    def draw(self, indices: Indices, generator: np.random.Generator) -> Tensor:
        """Returns the chosen images for training, each in one of its copies, drawn at random."""


def digest(content: bytes) -> str:
    """Returns a short hash of the content."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


class ImageArray:
    """Images or ready features in memory."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels  # (N, ...)

    def __len__(self) -> int:
        return len(self.pixels)

    def take(self, indices: Indices) -> Tensor:
        """Returns a copy of the chosen images, (B, ...)."""
        return torch.from_numpy(self.pixels.numpy()[np.asarray(indices, dtype=np.int64)])

    def subset(self, indices: Indices) -> "ImageArray":
        """Returns a copy of the chosen images as a sequence of their own."""
        return ImageArray(self.take(indices))

    def keys(self) -> list[str]:
        """Returns a hash of each image."""
        return [digest(row.tobytes()) for row in self.pixels.contiguous().numpy()]


class MemoryBudget:
    """A limit for the bytes of decoded images, over all sequences of images that share it."""

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes
        self._lock = threading.Lock()

    def reserve(self, num_bytes: int) -> bool:
        """Takes bytes from the budget and returns True, or False if too few are left."""
        with self._lock:
            granted = num_bytes <= self._left
            self._left -= num_bytes if granted else 0
            return granted


class ImageFiles:
    """Image files below `root`, decoded by threads and kept as far as the budget allows.

    `guessed` has the positions of those decoded so far whose range of values was guessed.
    """

    def __init__(
        self,
        root: Path,
        paths: Sequence[str],
        *,
        channels: int,
        size: int,
        budget: MemoryBudget,
        window: Window | None = None,
    ) -> None:
        self.root, self.paths = root, list(paths)
        self.channels, self.size, self.budget, self.window = channels, size, budget, window
        self.guessed: set[int] = set()
        self._kept: dict[int, Pixels] = {}  # arrays: a small tensor takes much more besides
        self._keys: list[str] | None = None  # once they are asked for: it reads all files

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, indices: Indices) -> Tensor:
        """Returns the chosen images, (B, channels, size, size) uint8; decodes those not kept."""
        wanted = [int(i) for i in indices]
        missing = [i for i in wanted if i not in self._kept]
        decoded = dict(zip(missing, _in_threads(self._decode, missing), strict=True))
        shape = (self.channels, self.size, self.size)
        if not wanted:
            return torch.empty(0, *shape, dtype=torch.uint8)
        pixels = (decoded[i] if i in decoded else self._kept[i] for i in wanted)
        return torch.from_numpy(np.stack(list(pixels)))

    def subset(self, indices: Indices) -> "ImageFiles":
        """Returns the chosen files, with those of their images that are decoded already."""
        chosen = [int(i) for i in indices]
        part = self._chosen(chosen)
        part.guessed = {new for new, i in enumerate(chosen) if i in self.guessed}
        part._kept = {new: self._kept[i] for new, i in enumerate(chosen) if i in self._kept}
        return part

    def keys(self) -> list[str]:
        """Returns for each file its path and a hash of its content."""
        if self._keys is None:
            self._keys = self._read_keys()
        return list(self._keys)

    def _read_keys(self) -> list[str]:
        contents = _in_threads(self._content, self.paths)
        return [f"{path}:{content}" for path, content in zip(self.paths, contents, strict=True)]

    def _chosen(self, chosen: Sequence[int]) -> "ImageFiles":
        return ImageFiles(
            self.root,
            [self.paths[i] for i in chosen],
            channels=self.channels,
            size=self.size,
            budget=self.budget,
            window=self.window,
        )

    def _content(self, path: str) -> str:
        file = self.root / path
        try:
            return digest(file.read_bytes()) if file.is_file() else "unreadable"
        except OSError:
            return "unreadable"

    def bad_images(self, count_done: Callable[[int], None]) -> dict[int, BadImageError]:
        """Decodes every image, keeps what fits the budget, and returns the errors by position.

        `count_done` is called with 1 after each image.
        """
        bad: dict[int, BadImageError] = {}

        def attempt(index: int) -> None:
            try:
                self._decode(index)
            except BadImageError as error:
                bad[index] = error
            count_done(1)

        for _ in _in_threads(attempt, range(len(self))):
            pass
        return bad

    def _source(self, index: int) -> Path | bytes:
        """Returns what is decoded: a path, or the content of a file."""
        return self.root / self.paths[index]

    def _decode(self, index: int) -> Pixels:
        pixels = decode_pixels(
            self._source(index),
            channels=self.channels,
            size=self.size,
            window=self.window,
            on_guess=lambda: self.guessed.add(index),
        )
        if index not in self._kept and self.budget.reserve(pixels.nbytes):
            self._kept[index] = pixels
        return pixels


def _in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Yields the results in order. Few items wait for the threads at a time."""
    for start in range(0, len(items), _AT_ONCE):
        yield from _decoders().map(work, items[start : start + _AT_ONCE])


@cache
def _decoders() -> ThreadPoolExecutor:
    """Returns the pool of the process. Threads suffice: decoding releases the interpreter lock."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="decode")
