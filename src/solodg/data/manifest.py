"""CSV manifests of the user's own images: path, label, domain, and optionally group and split."""

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from solodg.data.columns import named_columns
from solodg.data.domains import DomainDataset
from solodg.data.image_table import COLUMNS, PATH, ImageTable, Row, dataset_of_paths
from solodg.data.loading import Loading
from solodg.errors import UserError
from solodg.storage import read_text

ENDINGS = (".csv", ".tsv")
_SEPARATORS = (",", ";", "\t")


def load_manifest(
    path: Path, loading: Loading, *, default_domain: str | None = None
) -> DomainDataset:
    """Reads a CSV with columns path, label, domain, and optionally group and split.

    `loading.columns` may name other columns in their place.
    Columns are separated by commas, semicolons or tabs. Other columns are ignored, which
    `DomainDataset.notes` says. Paths are relative to the file. A split is train, val, test or
    empty. Images without a domain are of `default_domain`; without it, they are an error.
    """
    text = read_text(path)
    if "\0" in text:
        raise UserError(f"{path} holds a null character: is this a CSV?")
    with io.StringIO(text, newline="") as file:
        reader = csv.reader(file, delimiter=_separator(text))
        try:
            first = [name.strip() for name in next(reader, [])]
            named = named_columns(first, loading, PATH, str(path))
            header = named.header
            table = ImageTable(str(path), header, [], default_domain=default_domain)
            table.check_header()
            lines = [(reader.line_num, [v.strip() for v in row]) for row in reader if any(row)]
        except csv.Error as error:
            raise UserError(f"{path}, line {reader.line_num}: {error}.") from error
    rows = [_row(f"{path}, line {line}", first, values) for line, values in lines]
    rows = [Row(place, named.values(values)) for place, values in rows]
    return dataset_of_paths(replace(table, rows=rows), path.stem, path.parent, loading)


def _row(place: str, header: Sequence[str], values: Sequence[str]) -> Row:
    """Returns the values of a line by column; those that are missing at its end are empty."""
    if len(values) > len(header):
        raise UserError(
            f"{place}: {len(values)} values for {len(header)} columns. Put values that contain the "
            "separator into double quotes."
        )
    return Row(place, dict(zip_longest(header, values, fillvalue="")))


def _separator(text: str) -> str:
    """Returns the separator with which the first line has the most of the known columns."""
    first = io.StringIO(text, newline="").readline()

    def known(separator: str) -> int:
        try:
            names = next(csv.reader([first], delimiter=separator), [])
        except csv.Error:  # reading the table reports it
            return 0
        return len({name.strip() for name in names} & {*COLUMNS})

    return max(_SEPARATORS, key=known)  # the comma, where none has any
