"""The user's own images: folders `domain/class/*.jpg`, or a CSV manifest with path, label, domain.

The folder reader also reads every published dataset that comes in this layout.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from solodg.data.decode import EXTENSIONS
from solodg.data.domains import SPLIT_NAMES, UNASSIGNED, DomainDataset, Ints, normalise_name
from solodg.data.images import ImageFiles
from solodg.data.loading import DatasetSpec, Loading
from solodg.errors import UserError, unknown_name

_COLUMNS = ("path", "label", "domain", "group", "split")


def load_folder(
    root: Path, loading: Loading, *, name: str | None = None, domains: Sequence[str] | None = None
) -> DomainDataset:
    """Reads a folder `domain/class/image`. The classes are those of all domains, sorted.

    `domains` are the names of a published dataset; other folders are then ignored.
    """
    found = sorted(d.name for d in root.iterdir() if d.is_dir() and not d.name.startswith("."))
    if domains is not None:
        found = _published_domains(root, found, domains)
    spelling = {
        normalise_name(d): d for d in domains or ()
    }  # names as published, whatever the folders' spelling
    rows: list[tuple[str, str, str]] = []  # path, class, domain
    for domain in found:
        images = [
            path
            for path in sorted((root / domain).rglob("*"))
            if path.suffix.lower() in EXTENSIONS and not path.name.startswith(".")
        ]
        for path in images:
            parts = path.relative_to(root / domain).parts
            if len(parts) < 2:
                raise UserError(
                    f"{path} lies directly in the domain folder: expected domain/class/image."
                )
            rows.append(
                (
                    str(path.relative_to(root)),
                    parts[0],
                    spelling.get(normalise_name(domain), domain),
                )
            )
        if not images:
            raise UserError(
                f"no images in {root / domain}: expected {domain}/<class>/<image> with endings "
                f"{' '.join(sorted(EXTENSIONS))}."
            )
    if not rows:
        raise UserError(f"no images below {root}: expected domain/class/image folders.")
    order = list(domains) if domains is not None else None
    return _from_rows(name or root.name, root, rows, loading, domain_order=order)


def load_manifest(path: Path, loading: Loading) -> DomainDataset:
    """Reads a CSV with columns path, label, domain, and optionally group and split.

    Paths are relative to the file. A split is train, val, test or empty.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}): save it as UTF-8.") from error
    _check_csv(path, text)
    with io.StringIO(text, newline="") as file:
        reader = csv.DictReader(file)
        header = reader.fieldnames or []
        for column in ("path", "label", "domain"):
            if column not in header:
                raise UserError(
                    f"{path} has no column {column!r}; it has {', '.join(header) or 'none'}. "
                    f"Needed: path, label, domain; optional: group, split."
                )
        for column in header:
            if column not in _COLUMNS:
                raise unknown_name(f"column of {path}", column, _COLUMNS)
        table = list(reader)
    if not table:
        raise UserError(f"{path} lists no images.")
    rows, splits, groups = [], [], []
    seen: dict[str, int] = {}  # path -> line
    for line, row in enumerate(table, start=2):
        values = {column: (row.get(column) or "").strip() for column in _COLUMNS}
        for column in ("path", "label", "domain"):
            if not values[column]:
                raise UserError(f"{path}, line {line}: {column} is empty.")
        if values["split"].lower() not in SPLIT_NAMES:
            raise UserError(
                f"{path}, line {line}: split {values['split']!r} is not train, val, test or empty."
            )
        if values["path"] in seen:
            raise UserError(
                f"{path}, line {line}: {values['path']} is in line {seen[values['path']]} too."
            )
        seen[values["path"]] = line
        rows.append((values["path"], values["label"], values["domain"]))
        splits.append(SPLIT_NAMES[values["split"].lower()])
        groups.append(values["group"])
    dataset = _from_rows(path.stem, path.parent, rows, loading, splits=splits)
    if any(groups):
        # An image without a group is a group of its own.
        keys = [group or f"\0{i}" for i, group in enumerate(groups)]
        _, numbers = np.unique(keys, return_inverse=True)
        dataset = replace(dataset, groups=numbers.astype(np.int64))
        if dataset.protocol != "given-split":
            dataset = replace(dataset, protocol="grouped-split")
    return dataset


def _check_csv(path: Path, text: str) -> None:
    """Raises `UserError` for a text that is no CSV: null characters, or a field without end."""
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        if any("\0" in field for row in reader for field in row):
            raise UserError(f"{path}, line {reader.line_num}: a null character. Is this a CSV?")
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}. Is this a CSV?") from error


def published(
    name: str,
    title: str,
    folders: Sequence[str],
    domains: Sequence[str],
    how_to_get: str,
) -> DatasetSpec:
    """Returns a registry entry for a published dataset in the folder layout.

    `folders` are the names that its folder may have below the data folder.
    """

    def find(data_dir: Path) -> str | None:
        return _find_folder(data_dir, folders, domains)

    def load(loading: Loading) -> DomainDataset:
        root = require_folder(title, loading.data_dir, folders, domains, how_to_get)
        return load_folder(root, loading, name=name, domains=domains)

    return DatasetSpec(name, title, tuple(domains), load, find, how_to_get)


def require_folder(
    title: str, data_dir: Path, folders: Sequence[str], domains: Sequence[str], how_to_get: str
) -> Path:
    """Returns the folder of a published dataset; the error for a missing one says how to get it."""
    found = _find_folder(data_dir, folders, domains)
    if found is None:
        raise UserError(
            f"{title} not found: looked for {' or '.join(folders)} in {data_dir}. {how_to_get} "
            "Point to the folder that holds it with --data-dir."
        )
    return Path(found)


def _find_folder(data_dir: Path, folders: Sequence[str], domains: Sequence[str]) -> str | None:
    wanted = {normalise_name(d) for d in domains}
    for candidate in (*(data_dir / folder for folder in folders), data_dir):
        if candidate.is_dir() and wanted <= {normalise_name(d.name) for d in candidate.iterdir()}:
            return str(candidate)
    return None


def _published_domains(root: Path, found: list[str], domains: Sequence[str]) -> list[str]:
    by_spelling = {normalise_name(d): d for d in found}
    missing = [d for d in domains if normalise_name(d) not in by_spelling]
    if missing:
        raise UserError(f"{root} lacks the domain folder(s) {', '.join(missing)}.")
    return [by_spelling[normalise_name(d)] for d in domains]


def _from_rows(
    name: str,
    root: Path,
    rows: list[tuple[str, str, str]],
    loading: Loading,
    *,
    splits: list[int] | None = None,
    domain_order: list[str] | None = None,
) -> DomainDataset:
    paths, labels, domains = zip(*rows, strict=True)
    classes = sorted(set(labels))
    domain_names = domain_order or sorted(set(domains))
    class_index = {c: i for i, c in enumerate(classes)}
    domain_index = {d: i for i, d in enumerate(domain_names)}
    split = np.array(splits or [UNASSIGNED] * len(rows), dtype=np.int64)
    return DomainDataset(
        name=name,
        images=ImageFiles(
            root, paths, channels=loading.channels, size=loading.image_size, budget=loading.budget
        ),
        labels=np.array([class_index[c] for c in labels], dtype=np.int64),
        domains=np.array([domain_index[d] for d in domains], dtype=np.int64),
        classes=tuple(classes),
        domain_names=tuple(domain_names),
        split=split,
        protocol=_protocol(split),
    )


def _protocol(split: Ints) -> str:
    if (split != UNASSIGNED).all():
        return "given-split"
    return "given-and-random-split" if (split != UNASSIGNED).any() else "random-split"
