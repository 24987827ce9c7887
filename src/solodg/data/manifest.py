"""CSV manifests of the user's own images: path, label, domain, and optionally group and split."""

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from os.path import normpath
from pathlib import Path

import numpy as np

from solodg.data.domains import DomainDataset, normalise_name
from solodg.data.folder import check_spelling, dataset_of_files
from solodg.data.listing import ListedImage
from solodg.data.loading import Loading
from solodg.data.splits import SPLIT_NAMES
from solodg.errors import UserError, unknown_name
from solodg.storage import read_text

ENDINGS = (".csv", ".tsv")
_NEEDED, _OPTIONAL = ("path", "label", "domain"), ("group", "split")
_SEPARATORS = (",", ";", "\t")
# Beginnings of the names of columns whose values are groups.
_LIKE_GROUPS = ("patient", "subject", "participant", "person", "individual", "case", "study",
                "donor", "animal", "burst", "sequence")  # fmt: skip


def load_manifest(
    path: Path, loading: Loading, *, default_domain: str | None = None
) -> DomainDataset:
    """Reads a CSV with columns path, label, domain, and optionally group and split.

    Columns are separated by commas, semicolons or tabs. Other columns are ignored, which
    `DomainDataset.notes` says. Paths are relative to the file. A split is train, val, test or
    empty. Images without a domain are of `default_domain`; without it, they are an error.
    """
    text = read_text(path)
    if "\0" in text:
        raise UserError(f"{path} holds a null character: is this a CSV?")
    images, splits, groups = [], [], []
    seen: dict[str, int] = {}  # path -> line
    header, lines = _read_table(path, text, _NEEDED if default_domain is None else _NEEDED[:2])
    for line, values in lines:
        row = dict(zip(header, values, strict=True))
        row["domain"] = row.get("domain") or default_domain or ""
        for column in _NEEDED:
            if not row[column]:
                raise UserError(f"{path}, line {line}: {column} is empty.")
        split = row.get("split", "")
        if split.lower() not in SPLIT_NAMES:
            raise UserError(
                f"{path}, line {line}: split {split!r} is not train, val, test or empty."
            )
        before = seen.setdefault(normpath(row["path"]), line)
        if before != line:
            raise UserError(f"{path}, line {line}: {row['path']} is in line {before} too.")
        images.append(ListedImage(row["path"], row["label"], row["domain"]))
        splits.append(SPLIT_NAMES[split.lower()])
        groups.append(row.get("group", ""))
    if not images:
        raise UserError(f"{path} lists no images.")
    dataset = dataset_of_files(path.stem, path.parent, images, loading, splits=splits)
    dataset = replace(dataset, notes=_notes(path, header))
    return _with_groups(dataset, groups) if any(groups) else dataset


def _read_table(
    path: Path, text: str, needed: Sequence[str]
) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Returns the names of the columns, and each line by number with a value for every column."""
    with io.StringIO(text, newline="") as file:
        reader = csv.reader(file, delimiter=_separator(text))
        try:
            header = [name.strip() for name in next(reader, [])]
            _check_header(path, header, needed)
            lines = [(reader.line_num, [v.strip() for v in row]) for row in reader if any(row)]
        except csv.Error as error:
            raise UserError(f"{path}, line {reader.line_num}: {error}.") from error
    for line, values in lines:
        if len(values) > len(header):
            raise UserError(
                f"{path}, line {line}: {len(values)} values for {len(header)} columns. Put values "
                "that contain the separator into double quotes."
            )
        values += [""] * (len(header) - len(values))
    return header, lines


def _separator(text: str) -> str:
    """Returns the separator with which the first line has the most of the known columns."""
    first = io.StringIO(text, newline="").readline()

    def known(separator: str) -> int:
        try:
            names = next(csv.reader([first], delimiter=separator), [])
        except csv.Error:  # reading the table reports it
            return 0
        return len({name.strip() for name in names} & {*_NEEDED, *_OPTIONAL})

    return max(_SEPARATORS, key=known)  # the comma, where none has any


def _check_header(path: Path, header: Sequence[str], needed: Sequence[str]) -> None:
    optional = [column for column in (*_NEEDED, *_OPTIONAL) if column not in needed]
    for column in needed:
        if column not in header:
            raise UserError(
                f"{path} has no column {column!r}; it has {', '.join(header) or 'none'}. "
                f"Needed: {', '.join(needed)}; optional: {', '.join(optional)}."
            )
    for column in (*_NEEDED, *_OPTIONAL):
        if header.count(column) > 1:
            raise UserError(f"{path} has several columns {column!r}: keep one.")
    missing = [column for column in optional if column not in header]
    for column in _further(header):  # a misspelt group column must not be ignored
        if get_close_matches(column.lower(), missing, cutoff=0.75):
            raise unknown_name(
                f"column of {path}", column, missing, "Rename it, or remove it to go without."
            )


def _further(header: Sequence[str]) -> list[str]:
    return [name for name in header if name not in (*_NEEDED, *_OPTIONAL)]


def _notes(path: Path, header: Sequence[str]) -> tuple[str, ...]:
    """Names the columns that are ignored, and says which of them may be meant as groups."""
    further = _further(header)
    if not further:
        return ()
    note = f"{path.name}: ignored the column(s) {', '.join(further)}."
    alike = [name for name in further if normalise_name(name).startswith(_LIKE_GROUPS)]
    if alike and "group" not in header:
        note += (
            f" If images with the same {alike[0]!r} belong together, name that column 'group': "
            "then they are never on both sides of a split."
        )
    return (note,)


def _with_groups(dataset: DomainDataset, groups: Sequence[str]) -> DomainDataset:
    """Returns the dataset with groups; an image without one is a group of its own."""
    check_spelling("groups", sorted({*groups} - {""}))
    keys = [group or f"\0{i}" for i, group in enumerate(groups)]
    _, numbers = np.unique(keys, return_inverse=True)
    given = dataset.protocol == "given-split"
    return replace(
        dataset,
        groups=numbers.astype(np.int64),
        protocol="given-split" if given else "grouped-split",
    )
