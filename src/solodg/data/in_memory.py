"""Labelled images that a Python program holds, as a `DomainDataset`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from solodg.data.decode import BadImageError, decode, guessed_note
from solodg.data.domains import DomainDataset
from solodg.data.held_rows import TEXTS, HeldRows, held_rows, is_missing
from solodg.data.image_table import ImageTable, Row, dataset_of_paths, dataset_of_table
from solodg.data.images import ImageArray
from solodg.data.loading import DatasetSpec, Loading
from solodg.errors import UserError
from solodg.pixels import Pixels, pixels_of
from solodg.progress import NoProgress, Progress

_BLOCK = 256  # images of a stream for which memory is taken at once
IN_MEMORY = "in-memory:"  # in a configuration, followed by the name of the data


def load_in_memory(
    data: Any,
    loading: Loading,
    *,
    name: str,
    default_domain: str | None = None,
    skip_bad_images: bool = False,
    progress: Progress | None = None,
) -> DomainDataset:
    """Reads labelled images of a Python program; `name` is the name of the dataset.

    Images are read once, in order, and kept as pixels; a column of paths is read as a CSV manifest
    is, with paths relative to the working folder. Images without a domain are of `default_domain`;
    without it, they are an error. So is an image that cannot be read, unless `skip_bad_images`.
    """
    held = held_rows(data)
    if loading.columns or loading.split_values:
        raise UserError(
            f"columns and split_values are for files: rename the columns of {held.title} instead."
        )
    table = ImageTable(
        held.title, held.header, (), held.image_column, default_domain=default_domain
    )
    table.check_header()
    texts = [column for column in TEXTS if column in held.header]
    if held.has_paths:
        rows = [
            _row(held, i, values, [held.image_column, *texts])
            for i, values in enumerate(held.read())
        ]
        return dataset_of_paths(replace(table, rows=rows), name, Path.cwd(), loading)
    read = _read_images(held, texts, loading, skip_bad_images, progress or NoProgress())
    dataset = dataset_of_table(replace(table, rows=read.rows), name, read.images)
    return replace(dataset, notes=(*dataset.notes, *read.notes()))


def gone_from_memory(dataset: str) -> DatasetSpec:
    """Returns the entry of a run's data that was in memory: it cannot be loaded again."""
    name = dataset.removeprefix(IN_MEMORY)

    def refuse(loading: Loading) -> DomainDataset:
        raise UserError(
            f"the run was trained on images in the memory of a program, named {name!r}: they "
            "cannot be opened again. Resume the run in Python, with the same data, or score it on "
            "labelled images with `--on` or `Model.evaluate(data)`. Images that were saved since "
            f"can take their place with `--dataset`: a folder {name} or a file {name}.csv."
        )

    title = f"images in memory, named {name}"
    return DatasetSpec(dataset, title, (), refuse, lambda _: None, how_to_get="")


def _row(held: HeldRows, number: int, values: dict[str, Any], columns: Sequence[str]) -> Row:
    texts = {column: _text(values[column]) for column in columns}
    return Row(f"{held.row_title} {number}", texts)


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 0:
        value = value.item()
    return "" if is_missing(value) else str(value).strip()


class _ReadImages(NamedTuple):
    images: ImageArray
    rows: list[Row]  # of the images
    guessed: int  # images whose range of values was guessed
    skipped: list[UserError]  # of images that cannot be read

    def notes(self) -> list[str]:
        """Returns remarks for the user on how the images were read."""
        notes = [guessed_note(self.guessed)] if self.guessed else []
        if self.skipped:
            count = len(self.skipped)
            notes.append(f"Skipped {count} unreadable image(s), the first: {self.skipped[0]}")
        return notes


class _Pixels:
    """Images in memory, as many as the budget of memory allows; blocks of a stream are joined."""

    def __init__(self, held: HeldRows, loading: Loading) -> None:
        self._held, self._loading = held, loading
        self._shape = (loading.channels, loading.image_size, loading.image_size)
        self._blocks: list[Pixels] = []
        self._count = self._left = 0
        if held.count is not None:
            self._add_block(held.count)

    def append(self, image: Pixels) -> None:
        """Keeps one image; raises `UserError` if a stream has more than fit into memory."""
        if not self._left:
            self._add_block(_BLOCK)
        block = self._blocks[-1]
        block[len(block) - self._left] = image
        self._left -= 1
        self._count += 1

    def array(self) -> Pixels:
        """Returns all images, (N, channels, size, size), and frees each block once it is copied."""
        if self._held.count is not None:
            return self._blocks[0][: self._count]
        joined, start = np.empty((self._count, *self._shape), np.uint8), 0
        while self._blocks:
            block = self._blocks.pop(0)[: self._count - start]
            joined[start : start + len(block)] = block
            start += len(block)
        return joined

    def _add_block(self, count: int) -> None:
        if not self._loading.budget.reserve(count * math.prod(self._shape)):
            title, size = self._held.title, self._loading.image_size
            gigabytes = (self._count + count) * math.prod(self._shape) / 1024**3
            has = (
                f"{count} images"
                if self._held.count is not None
                else (f"more than {self._count} images")
            )
            stream = (
                "" if self._held.count is not None else (" or shorten the stream with take(n),")
            )
            raise UserError(
                f"{title} has {has}, which take {gigabytes:.1f} GB at {size} pixels: give more "
                f"memory_gb or a smaller image_size,{stream} or save the images as files."
            )
        self._blocks.append(np.empty((count, *self._shape), np.uint8))
        self._left = count


def _read_images(
    held: HeldRows,
    texts: Sequence[str],
    loading: Loading,
    skip_bad_images: bool,
    progress: Progress,
) -> _ReadImages:
    pixels, rows, skipped = _Pixels(held, loading), list[Row](), list[UserError]()
    guessed: set[int] = set()
    with progress.bar("Reading images", held.count or 0) as advance:
        for i, values in enumerate(held.read()):
            row = _row(held, i, values, texts)
            try:
                image = _pixels(values[held.image_column], loading, lambda: guessed.add(len(rows)))
            except UserError as error:
                told = UserError(f"{row.place}: {error}")
                if not (skip_bad_images and isinstance(error, BadImageError)):
                    raise told from error
                skipped.append(told)
            else:
                pixels.append(image)
                rows.append(row)
            advance(1)
    return _ReadImages(ImageArray(torch.from_numpy(pixels.array())), rows, len(guessed), skipped)


def _pixels(image: Any, loading: Loading, on_guess: Callable[[], None]) -> Pixels:
    """Returns an image as (channels, size, size) pixels, as a file and `predict` read it."""
    channels, size, window = loading.channels, loading.image_size, loading.window
    if isinstance(image, np.ndarray | torch.Tensor):
        return pixels_of(image, channels=channels, size=size, window=window)
    if is_missing(image):
        raise UserError("image is empty.")
    if not isinstance(image, str | Path | bytes | Image.Image):
        raise UserError(
            f"an image of type {type(image).__name__}: expected a PIL image, an array, a tensor, "
            "bytes or a path."
        )
    decoded = decode(image, channels=channels, size=size, window=window, on_guess=on_guess)
    pixels: Pixels = decoded.numpy()
    return pixels
