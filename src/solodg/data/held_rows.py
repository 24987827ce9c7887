"""The rows of labelled images that a Python program holds, read one at a time.

They are a pandas DataFrame, a Hugging Face `datasets.Dataset` or `IterableDataset`, or a dataset of
torch. Neither pandas nor datasets is imported: their objects are known by the modules of their
classes.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from solodg.data.image_table import DOMAIN, GROUP, IMAGE, LABEL, PATH, SPLIT
from solodg.errors import UserError

FORMS = (
    "a pandas DataFrame, a Hugging Face datasets.Dataset or IterableDataset, or a dataset of torch "
    "whose items are (image, label, domain)"
)
TEXTS = (LABEL, DOMAIN, GROUP, SPLIT)


def is_missing(value: Any) -> bool:
    """Returns whether a value stands for none: None, NaN, or NA and NaT of pandas."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating) and math.isnan(value)


@dataclass(frozen=True)
class HeldRows:
    """Rows of a program's data, which are read one at a time."""

    title: str  # what errors call the data
    row_title: str  # what errors call a row
    header: Sequence[str]
    count: int | None  # None: of a stream, whose end is not known
    read: Callable[[], Iterator[dict[str, Any]]]  # the values of each row by column
    image_column: str = IMAGE
    has_paths: bool = False


def held_rows(data: Any) -> HeldRows:
    """Returns the rows of data in one of the `FORMS`; raises `UserError` for any other."""
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(data).__mro__}
    if kinds & {"pandas.DataFrame", "pandas.core.frame.DataFrame"}:
        return _frame(data)
    if "datasets.arrow_dataset.Dataset" in kinds:
        return _hugging_face(data)
    if "datasets.iterable_dataset.IterableDataset" in kinds:
        return _hugging_face_stream(data)
    if kinds & {"datasets.dataset_dict.DatasetDict", "datasets.dataset_dict.IterableDatasetDict"}:
        raise UserError(
            f"a {type(data).__name__} with the parts {', '.join(map(str, data))}: give one of "
            f"them, e.g. data[{next(iter(data), 'train')!r}], or all, joined by "
            "datasets.concatenate_datasets."
        )
    if isinstance(data, torch.utils.data.IterableDataset):
        return _item_stream(data)
    plain = isinstance(data, str | bytes | dict | set | np.ndarray | torch.Tensor)
    if plain or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UserError(f"data of type {type(data).__name__}: expected a path, or {FORMS}.")
    return _items(data)


def _frame(frame: Any) -> HeldRows:
    title, header = "the DataFrame", [str(column) for column in frame.columns]
    if PATH in header and IMAGE in header:
        raise UserError(f"{title} has both a column 'path' and a column 'image': keep one.")
    column = IMAGE if IMAGE in header else PATH
    used = [name for name in (column, *TEXTS) if name in header]

    def read() -> Iterator[dict[str, Any]]:
        for values in zip(*(frame[name].tolist() for name in used), strict=True):
            yield dict(zip(used, values, strict=True))

    has_paths = column == PATH
    if header.count(IMAGE) == 1 and len(frame):
        has_paths = all(isinstance(value, str | Path) for value in frame[IMAGE])
    return HeldRows(title, f"{title}, row", header, len(frame), read, column, has_paths)


def _hugging_face(data: Any) -> HeldRows:
    datasets: Any = sys.modules["datasets"]  # whoever made the data has imported it
    title, header = "the Dataset", list(data.column_names)
    column = PATH if PATH in header and IMAGE not in header else IMAGE
    used = [name for name in (column, *TEXTS) if name in header]
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
    return HeldRows(title, f"{title}, row", header, len(data), read, column, has_paths)


def _class_name(value: Any, names: Sequence[str] | None) -> Any:
    """Returns the name that a ClassLabel gives to a number; None for -1, an image without one."""
    if names is None or not isinstance(value, int):
        return value
    return names[value] if value >= 0 else None


def _hugging_face_stream(data: Any) -> HeldRows:
    """Returns the rows of a stream; its columns are those of its features or of its first row."""
    datasets: Any = sys.modules["datasets"]
    title = "the IterableDataset"
    rows: Iterator[dict[str, Any]] = iter(())
    features = data.features
    if features is None:
        rows = iter(data)
        first: dict[str, Any] = next(rows, {})
        header, rows = list(first), chain([first] if first else [], rows)
        features = {}
    else:
        header = list(features)
        data = data.with_format(None)
        for name, feature in features.items():
            if isinstance(feature, datasets.Image):  # decoded here, as files are
                data = data.cast_column(name, datasets.Image(decode=False))
    column = PATH if PATH in header and IMAGE not in header else IMAGE
    names = {name: getattr(features.get(name), "names", None) for name in header}

    def read() -> Iterator[dict[str, Any]]:
        for row in data if features else rows:
            values = {name: _class_name(value, names.get(name)) for name, value in row.items()}
            image = values.get(column)
            if isinstance(image, dict):
                values[column] = image.get("bytes") or image.get("path")
            yield values

    has_paths = getattr(features.get(column), "dtype", None) == "string"
    return HeldRows(title, f"{title}, row", header, None, read, column, has_paths or column == PATH)


def _item_stream(data: Any) -> HeldRows:
    """Returns the rows of an iterable dataset of torch, which is read once."""

    def read() -> Iterator[dict[str, Any]]:
        for i, item in enumerate(data):
            yield _as_row(item, i, (IMAGE, LABEL, DOMAIN))

    title = "the iterable dataset"
    return HeldRows(title, f"{title}, item", (IMAGE, LABEL, DOMAIN), None, read)


def _as_row(item: Any, number: int, header: Sequence[str]) -> dict[str, Any]:
    if not isinstance(item, tuple | list) or len(item) != len(header):
        found = type(item).__name__
        found += f" of {len(item)}" if isinstance(item, tuple | list) else ""
        raise UserError(
            f"item {number} of the dataset is a {found}: expected a tuple (image, label, domain)"
            + (", as item 0 is." if number else ".")
        )
    return dict(zip(header, item, strict=True))


def _items(data: Any) -> HeldRows:
    first = data[0] if len(data) else (None, None, None)
    width = len(first) if isinstance(first, tuple | list) else 0
    header = (IMAGE, LABEL, DOMAIN)[: 2 if width == 2 else 3]

    def read() -> Iterator[dict[str, Any]]:
        for i in range(len(data)):
            yield _as_row(data[i] if i else first, i, header)

    return HeldRows("the dataset", "the dataset, item", header, len(data), read)
