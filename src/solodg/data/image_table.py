"""Tables of labelled images: the rows of a CSV manifest, of a data frame or of data in memory.

Columns are path or image, label, domain, and optionally group and split.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from os.path import normpath
from pathlib import Path
from typing import NamedTuple

import numpy as np

from solodg.data.domains import DomainDataset, normalise_name
from solodg.data.folder import build_dataset, check_spelling, image_files
from solodg.data.images import Images
from solodg.data.loading import Loading
from solodg.data.splits import SPLIT_NAMES
from solodg.errors import UserError, unknown_name

PATH, IMAGE = "path", "image"  # columns that hold the images
LABEL, DOMAIN, GROUP, SPLIT = "label", "domain", "group", "split"
COLUMNS = (PATH, LABEL, DOMAIN, GROUP, SPLIT)  # of a manifest
# Beginnings of the names of columns whose values are groups.
_LIKE_GROUPS = ("patient", "subject", "participant", "person", "individual", "case", "study",
                "donor", "animal", "burst", "sequence")  # fmt: skip


class Row(NamedTuple):
    """One row: its place, as errors name it, and its values by column as text."""

    place: str
    values: dict[str, str]


@dataclass(frozen=True)
class ImageTable:
    """Rows that list labelled images; an image without a domain is of `default_domain`."""

    name: str  # of the data in errors: the path of a file, or "the DataFrame"
    header: Sequence[str]
    rows: Sequence[Row]
    image_column: str = PATH
    default_domain: str | None = None

    def check_header(self) -> None:
        """Raises `UserError` if a column is missing, is there twice, or has a misspelt name."""
        needed = [self.image_column, LABEL] + ([DOMAIN] if self.default_domain is None else [])
        known = self._known()
        optional = [column for column in known if column not in needed]
        for column in needed:
            if column not in self.header:
                raise UserError(
                    f"{self.name} has no column {column!r}; it has "
                    f"{', '.join(self.header) or 'none'}. "
                    f"Needed: {', '.join(needed)}; optional: {', '.join(optional)}."
                )
        for column in known:
            if self.header.count(column) > 1:
                raise UserError(f"{self.name} has several columns {column!r}: keep one.")
        missing = [column for column in optional if column not in self.header]
        for column in self._further():  # a misspelt group column must not be ignored
            if get_close_matches(column.lower(), missing, cutoff=0.75):
                raise unknown_name(
                    f"column of {self.name}", column, missing, "Rename it, or remove it to go "
                    "without."
                )  # fmt: skip

    def notes(self) -> tuple[str, ...]:
        """Names the columns that are ignored, and says which of them may be meant as groups."""
        further = self._further()
        if not further:
            return ()
        note = f"{Path(self.name).name}: ignored the column(s) {', '.join(further)}."
        alike = [name for name in further if normalise_name(name).startswith(_LIKE_GROUPS)]
        if alike and GROUP not in self.header:
            note += (
                f" If images with the same {alike[0]!r} belong together, name that column 'group': "
                "then they are never on both sides of a split."
            )
        return (note,)

    def _known(self) -> tuple[str, ...]:
        return (self.image_column, *COLUMNS[1:])

    def _further(self) -> list[str]:
        return [name for name in self.header if name not in self._known()]


def dataset_of_paths(table: ImageTable, name: str, root: Path, loading: Loading) -> DomainDataset:
    """Builds the dataset of a table of image files, whose paths are relative to `root`."""
    seen: dict[str, str] = {}  # path -> place
    for place, values in table.rows:
        path = values[table.image_column]
        if not path:
            raise UserError(f"{place}: {table.image_column} is empty.")
        before = seen.setdefault(normpath(path), place)
        if before != place:
            where = before.rpartition(", ")[2]
            raise UserError(f"{place}: {path} is in {where} too.")
    paths = [values[table.image_column] for _, values in table.rows]
    return dataset_of_table(table, name, image_files(root, paths, loading))


def dataset_of_table(table: ImageTable, name: str, images: Images) -> DomainDataset:
    """Builds the dataset of a table, whose rows describe the given images in the same order."""
    if not table.rows:
        raise UserError(f"{table.name} lists no images.")
    labels, domains, splits, groups = [], [], [], []
    for place, values in table.rows:
        domain = values.get(DOMAIN) or table.default_domain or ""
        for column, value in ((LABEL, values[LABEL]), (DOMAIN, domain)):
            if not value:
                raise UserError(f"{place}: {column} is empty.")
        split = values.get(SPLIT, "")
        if split.lower() not in SPLIT_NAMES:
            raise UserError(
                f"{place}: split {split!r} is not train, val, test or empty. Say what it stands "
                f"for, e.g. with --split-value {split}=train."
            )
        labels.append(values[LABEL])
        domains.append(domain)
        splits.append(SPLIT_NAMES[split.lower()])
        groups.append(values.get(GROUP, ""))
    dataset = build_dataset(name, images, labels, domains, splits=splits)
    dataset = replace(dataset, notes=table.notes())
    return _with_groups(dataset, groups) if any(groups) else dataset


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
