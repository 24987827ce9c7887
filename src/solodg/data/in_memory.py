"""Labelled images that a Python program holds, as a `DomainDataset`.

They are a pandas DataFrame, a Hugging Face `datasets.Dataset`, or a map-style dataset of torch.
Neither pandas nor datasets is imported: their objects are known by the modules of their classes.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from solodg.data.decode import BadImageError, decode, guessed_note
from solodg.data.domains import DomainDataset
from solodg.data.image_table import (
    DOMAIN,
    GROUP,
    IMAGE,
    LABEL,
    PATH,
    SPLIT,
    ImageTable,
    Row,
    dataset_of_paths,
    dataset_of_table,
)
from solodg.data.images import ImageArray
from solodg.data.loading import DatasetSpec, Loading
from solodg.errors import UserError
from solodg.pixels import Pixels, pixels_of
from solodg.progress import NoProgress, Progress

IN_MEMORY = "in-memory:"  # in a configuration, followed by the name of the data
FORMS = (
    "a pandas DataFrame, a Hugging Face datasets.Dataset, or a dataset of torch whose items are "
    "(image, label, domain)"
)
_TEXTS = (LABEL, DOMAIN, GROUP, SPLIT)


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
    held = _held(data)
    table = ImageTable(
        held.title, held.header, (), held.image_column, default_domain=default_domain
    )
    table.check_header()
    texts = [column for column in _TEXTS if column in held.header]
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


def is_missing(value: Any) -> bool:
    """Returns whether a value stands for none: None, NaN, or NA and NaT of pandas."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating) and math.isnan(value)


@dataclass(frozen=True)
class _Held:
    """Rows in memory, which are read one at a time."""

    title: str  # what errors call the data
    row_title: str  # what errors call a row
    header: Sequence[str]
    count: int
    read: Callable[[], Iterator[dict[str, Any]]]  # the values of each row by column
    image_column: str = IMAGE
    has_paths: bool = False


def _held(data: Any) -> _Held:
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(data).__mro__}
    if kinds & {"pandas.DataFrame", "pandas.core.frame.DataFrame"}:
        return _frame(data)
    if "datasets.arrow_dataset.Dataset" in kinds:
        return _hugging_face(data)
    if "datasets.dataset_dict.DatasetDict" in kinds:
        raise UserError(
            f"a DatasetDict with the parts {', '.join(map(str, data))}: give one of them, e.g. "
            f"data[{next(iter(data), 'train')!r}], or all, joined by datasets.concatenate_datasets."
        )
    plain = isinstance(data, str | bytes | dict | set | np.ndarray | torch.Tensor)
    if plain or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UserError(f"data of type {type(data).__name__}: expected a path, or {FORMS}.")
    return _items(data)


def _frame(frame: Any) -> _Held:
    title, header = "the DataFrame", [str(column) for column in frame.columns]
    if PATH in header and IMAGE in header:
        raise UserError(f"{title} has both a column 'path' and a column 'image': keep one.")
    column = IMAGE if IMAGE in header else PATH
    used = [name for name in (column, *_TEXTS) if name in header]

    def read() -> Iterator[dict[str, Any]]:
        for values in zip(*(frame[name].tolist() for name in used), strict=True):
            yield dict(zip(used, values, strict=True))

    has_paths = column == PATH
    if header.count(IMAGE) == 1 and len(frame):
        has_paths = all(isinstance(value, str | Path) for value in frame[IMAGE])
    return _Held(title, f"{title}, row", header, len(frame), read, column, has_paths)


def _hugging_face(data: Any) -> _Held:
    datasets: Any = sys.modules["datasets"]  # whoever made the data has imported it
    title, header = "the Dataset", list(data.column_names)
    column = PATH if PATH in header and IMAGE not in header else IMAGE
    used = [name for name in (column, *_TEXTS) if name in header]
    feature = data.features.get(column)
    names = {name: getattr(data.features[name], "names", None) for name in used}
    is_image = isinstance(feature, datasets.Image)

    def read() -> Iterator[dict[str, Any]]:
        rows = data.with_format(None).select_columns(used)
        if is_image:  # decoded here, as files are
            rows = rows.cast_column(column, datasets.Image(decode=False))
        for row in rows:
            values = {name: _class_name(value, names[name]) for name, value in row.items()}
            if is_image and row[column]:
                values[column] = row[column]["bytes"] or row[column]["path"]
            yield values

    has_paths = feature is not None and getattr(feature, "dtype", None) == "string"
    return _Held(title, f"{title}, row", header, len(data), read, column, has_paths)


def _class_name(value: Any, names: Sequence[str] | None) -> Any:
    """Returns the name that a ClassLabel gives to a number; None for -1, an image without one."""
    if names is None or not isinstance(value, int):
        return value
    return names[value] if value >= 0 else None


def _items(data: Any) -> _Held:
    first = data[0] if len(data) else (None, None, None)
    width = len(first) if isinstance(first, tuple | list) else 0
    header = (IMAGE, LABEL, DOMAIN)[: 2 if width == 2 else 3]

    def read() -> Iterator[dict[str, Any]]:
        for i in range(len(data)):
            item = data[i] if i else first
            if not isinstance(item, tuple | list) or len(item) != len(header):
                found = type(item).__name__
                found += f" of {len(item)}" if isinstance(item, tuple | list) else ""
                raise UserError(
                    f"item {i} of the dataset is a {found}: expected a tuple (image, label, domain)"
                    + (", as item 0 is." if i else ".")
                )
            yield dict(zip(header, item, strict=True))

    return _Held("the dataset", "the dataset, item", header, len(data), read)


def _row(held: _Held, number: int, values: dict[str, Any], columns: Sequence[str]) -> Row:
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


def _read_images(
    held: _Held,
    texts: Sequence[str],
    loading: Loading,
    skip_bad_images: bool,
    progress: Progress,
) -> _ReadImages:
    shape = (held.count, loading.channels, loading.image_size, loading.image_size)
    if not loading.budget.reserve(math.prod(shape)):
        raise UserError(
            f"{held.title} has {held.count} images, which take {math.prod(shape) / 1024**3:.1f} GB "
            f"at {loading.image_size} pixels: give more memory_gb or a smaller image_size, or save "
            "the images as files."
        )
    pixels, rows, skipped = np.empty(shape, np.uint8), list[Row](), list[UserError]()
    guessed: set[int] = set()
    with progress.bar("Reading images", held.count) as advance:
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
                pixels[len(rows)] = image
                rows.append(row)
            advance(1)
    return _ReadImages(
        ImageArray(torch.from_numpy(pixels[: len(rows)])), rows, len(guessed), skipped
    )


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
