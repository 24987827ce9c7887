"""Columns of a table under other names: `--column label=tumor`, as WILDS and others call them."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from solodg.data.loading import Loading
from solodg.errors import UserError, unknown_name

_FIELD = re.compile(r"\{([^{}]+)\}")


class NamedColumns(NamedTuple):
    """The header of a table under the names of this package, and its rows likewise."""

    header: list[str]
    values: Callable[[Mapping[str, Any]], dict[str, Any]]


def named_columns(
    header: Sequence[str], loading: Loading, image_column: str, title: str
) -> NamedColumns:
    """Returns the columns of a table as `loading.columns` names them.

    A name maps to a column, or to a text with columns in braces, from which paths are put together.
    Splits are replaced by `loading.split_values`. `title` is what errors call the table.
    """
    columns, splits = dict(loading.columns), dict(loading.split_values)
    known = (image_column, "label", "domain", "group", "split")
    for name, column in columns.items():
        if name not in known:
            raise unknown_name("name in --column", name, known)
        for part in _FIELD.findall(column) or [column]:
            if part not in header:
                raise unknown_name(f"column of {title}", part, header)
    if not columns and not splits:
        return NamedColumns(list(header), dict)
    used = {part for column in columns.values() for part in _FIELD.findall(column) or [column]}
    rest = [name for name in header if name not in {*columns, *used}]

    def values(row: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: row[name] for name in rest if name in row}
        for name, column in columns.items():
            found[name] = (
                _FIELD.sub(lambda m: str(row[m[1]]), column) if "{" in column else row[column]
            )
        if splits and "split" in found:
            text = str(found["split"]).strip()
            if text not in splits:
                raise UserError(
                    f"{title}: split {text!r} has no --split-value; given are "
                    f"{', '.join(f'{k}={v}' for k, v in splits.items())}."
                )
            found["split"] = splits[text]
        return found

    return NamedColumns([*columns, *rest], values)
