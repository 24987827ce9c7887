"""Tables of labelled images in Parquet and Arrow files, as Hugging Face datasets are stored.

The column `image` holds the contents of image files, or structures of `bytes` and `path`; the
column `path` holds paths. The contents are read one batch of rows after another and kept in memory
as they are, compressed.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from solodg.data.columns import named_columns
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
from solodg.data.loading import Loading
from solodg.data.stored_images import StoredImages
from solodg.errors import UserError, missing_extra

ARROW_ENDINGS = (".parquet", ".arrow")
_TEXTS = (LABEL, DOMAIN, GROUP, SPLIT)
_BATCH = 256  # rows that are read at once


def arrow_files(path: Path) -> list[Path]:
    """Returns the files of a table: the path itself, or the parts of one table in a folder.

    A folder with other folders than hidden ones is none: it is one of domains.
    """
    if path.is_file():
        return [path] if path.suffix.lower() in ARROW_ENDINGS else []
    entries = [e for e in sorted(path.iterdir()) if not e.name.startswith(".")]
    if any(entry.is_dir() for entry in entries):
        return []
    return [entry for entry in entries if entry.suffix.lower() in ARROW_ENDINGS]


def load_arrow(path: Path, loading: Loading, *, default_domain: str | None = None) -> DomainDataset:
    """Reads the files of a table with columns image or path, label, domain, group and split.

    `loading.columns` may name other columns. Names of a `ClassLabel` of Hugging Face are the names
    of classes and domains. Paths are relative to the file. Images without a domain are of
    `default_domain`; without it, they are an error.
    """
    files = arrow_files(path)
    rows: list[Row] = []
    contents: list[bytes] = []
    table = None
    for file in files:
        header, class_names, values = _open(file)
        column = IMAGE if IMAGE in header or IMAGE in loading.columns else PATH
        named = named_columns(header, loading, column, str(file))
        found = ImageTable(str(file), named.header, [], column, default_domain)
        found.check_header()
        if table is not None and found.header != table.header:
            raise UserError(f"{file} has other columns than {files[0]}: give tables of one kind.")
        table = found
        used = _used(header, loading, (column, *_TEXTS))
        for number, row in enumerate(values(used)):
            place = f"{file}, row {number}"
            texts = {name: _text(row[name], class_names.get(name)) for name in row}
            image = row.get(loading.columns.get(column, column))
            if isinstance(image, dict):
                image = image.get("bytes") or image.get("path")
            if isinstance(image, bytes):
                if not loading.budget.reserve(len(image)):
                    raise UserError(
                        f"{place}: the images so far, as they are stored, take more memory than "
                        "--memory-gb. Give more, or save the images as files."
                    )
                contents.append(image)
            texts[loading.columns.get(column, column)] = image if isinstance(image, str) else ""
            rows.append(Row(place, named.values(texts)))
    assert table is not None
    name = path.stem
    if not contents:
        root = path.parent if path.is_file() else path
        return dataset_of_paths(replace(table, rows=rows), name, root, loading)
    if len(contents) < len(rows):
        raise UserError(f"{path}: some rows hold an image and others a path or nothing: use one.")
    images = StoredImages(contents, [row.place for row in rows], loading, loading.budget)
    return dataset_of_table(replace(table, rows=rows), name, images)


def _used(header: Sequence[str], loading: Loading, names: Sequence[str]) -> list[str]:
    """Returns the columns of a file that are read, those within templates among them."""
    wanted = [loading.columns.get(name, name) for name in names]
    return [c for c in header if c in wanted or any("{" + c + "}" in text for text in wanted)]


def _open(file: Path) -> tuple[list[str], dict[str, Sequence[str]], Any]:
    """Opens a file: its columns, the names of class labels, and a function that reads columns."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise missing_extra("parquet", "Reading Parquet and Arrow files", error) from error
    try:
        if file.suffix.lower() == ".parquet":
            parquet = pq.ParquetFile(file)
            schema = parquet.schema_arrow

            def batches(columns: list[str]) -> Iterator[Any]:
                yield from parquet.iter_batches(batch_size=_BATCH, columns=columns)
        else:
            source = pa.memory_map(str(file))
            try:
                reader = pa.ipc.open_stream(source)
                chunks: Any = reader
            except pa.ArrowInvalid:
                reader = pa.ipc.open_file(source)
                chunks = (reader.get_batch(i) for i in range(reader.num_record_batches))
            schema = reader.schema

            def batches(columns: list[str]) -> Iterator[Any]:
                for chunk in chunks:
                    part = chunk.select(columns)
                    for start in range(0, part.num_rows, _BATCH):
                        yield part.slice(start, _BATCH)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"cannot read {file}: {str(error).splitlines()[0]}") from error

    def values(columns: list[str]) -> Iterator[dict[str, Any]]:
        try:
            for batch in batches(columns):
                yield from batch.to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{file} is damaged: {str(error).splitlines()[0]}") from error

    return list(schema.names), _class_names(schema.metadata), values


def _class_names(metadata: dict[bytes, bytes] | None) -> dict[str, Sequence[str]]:
    """Returns the names of class labels by column, which Hugging Face stores with the table."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        return {
            name: list(map(str, feature["names"]))
            for name, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _text(value: Any, names: Sequence[str] | None) -> str:
    if names is not None and isinstance(value, int):
        return names[value] if 0 <= value < len(names) else ""
    missing = value is None or value != value  # NaN differs from itself
    return "" if missing or isinstance(value, bytes | dict) else str(value).strip()
