"""The table of a dataset: images of each class in each domain, and what was left out."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from solodg.data.summary import DataSummary

MAX_CLASSES, MAX_DOMAINS = 12, 8  # that have a row or a column of their own


def print_data(summary: "DataSummary", console: Console) -> None:
    """Prints the table of a dataset, and a line for each reason to leave something out."""
    # A table that goes into a file or a pipe is not folded to the width of a terminal.
    console.print(_table(summary), width=None if console.is_terminal else 1000)
    for line in [*_empty_cells(summary), *summary.remarks()]:
        console.print(line)


def _table(summary: "DataSummary") -> Table:
    """Builds the table; what is beyond its limits is added up in one row and one column."""
    counts = _bounded(summary.counts, MAX_DOMAINS)  # (domains, classes)
    counts = _bounded(counts.T, MAX_CLASSES)  # (classes, domains)
    domains = [
        f"{name} ({summary.roles[name]})" if name in summary.roles else name
        for name in summary.domains
    ]
    columns = _bounded_names(domains, MAX_DOMAINS, "domains")
    rows = _bounded_names(list(summary.classes), MAX_CLASSES, "classes")
    words = [
        f"{summary.counts.sum()} images",
        f"{len(summary.classes)} classes",
        f"{len(domains)} domains",
    ]
    if summary.groups is not None:
        words.append(f"{summary.groups} groups")
    table = Table(title=f"{summary.name}: {', '.join(words)}", title_justify="left")
    table.add_column("images")
    for column in (*columns, "all"):
        table.add_column(column, justify="right")
    for name, row in zip(rows, counts, strict=True):
        table.add_row(name, *map(str, row), str(row.sum()))
    totals = counts.sum(0)
    table.add_row("all", *map(str, totals), str(totals.sum()), style="bold")
    return table


def _bounded(counts: "NDArray[np.int64]", limit: int) -> "NDArray[np.int64]":
    """Returns the first `limit` rows, and the sum of the others as one more."""
    if len(counts) <= limit:
        return counts
    import numpy as np  # late: `solodg --help` does without

    return np.concatenate([counts[:limit], counts[limit:].sum(0, keepdims=True)])


def _bounded_names(names: list[str], limit: int, kind: str) -> list[str]:
    if len(names) <= limit:
        return names
    return [*names[:limit], f"{len(names) - limit} further {kind}"]


def _empty_cells(summary: "DataSummary") -> list[str]:
    """Says in how many domains a class has no image, with an example."""
    domains, classes = (summary.counts == 0).nonzero()
    if len(domains) == 0:
        return []
    example = f"{summary.classes[classes[0]]} in {summary.domains[domains[0]]}"
    return [f"Classes without an image in a domain: {len(domains)}, e.g. {example}."]
