"""Records as tables for the terminal, and metrics as text: pure functions of records."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.table import Table

from solodg.types import Record

ROLES = {
    "target": "unseen",
    "in-distribution": "seen, new images",
    "source-validation": "seen, validation",
}


UNSEEN_MEAN = "unseen, mean"


class MetricRow(NamedTuple):
    """The metrics of one domain as they are shown to a person."""

    accuracy: str  # %
    nll: str
    ece: str  # %
    images: str


METRIC_TITLES = MetricRow("accuracy %", "NLL", "ECE %", "images")


def metric_row(metrics: Mapping[str, float]) -> MetricRow:
    """Formats the metrics of a record: accuracy and ECE in percent, NLL, number of images."""
    return MetricRow(
        percent(metrics["accuracy"]),
        f"{metrics['nll']:.3f}",
        percent(metrics["ece"]),
        f"{metrics['images']:.0f}",
    )


def percent(share: float) -> str:
    """Formats a share of 1 in percent, with one digit after the point."""
    return f"{100 * share:.1f}"


def mean_accuracy(records: Sequence[Record], role: str) -> float | None:
    """Returns the mean accuracy over the domains of a role; None where there is none."""
    values = [r.metrics["accuracy"] for r in records if r.role == role]
    return sum(values) / len(values) if values else None


def evaluation_table(records: Sequence[Record]) -> Table:
    """Builds the table of one model: a row for each domain, then the means by role."""
    first = records[0]
    table = Table(title=f"{first.algorithm} ({first.variant}) on {first.dataset}")
    for column in ("domain", "", *METRIC_TITLES):
        table.add_column(column, justify="left" if column in ("domain", "") else "right")
    for r in records:
        table.add_row(r.domain, ROLES[r.role], *metric_row(r.metrics))
    for role in ROLES:
        mean = mean_accuracy(records, role)
        if mean is not None:
            table.add_row("mean", ROLES[role], percent(mean), "", "", "", style="bold")
    return table


def comparison_table(title: str, rows: dict[str, Sequence[Record]]) -> Table:
    """Builds the table of several models: a row for each, a column for each unseen domain, means.

    `rows` maps the name of a model to its records.
    """
    first = next(iter(rows.values()))
    targets = [r.domain for r in first if r.role == "target"]
    seen = next(r.role for r in first if r.role != "target")
    table = Table(title=title)
    table.add_column("accuracy %")
    for domain in targets:
        table.add_column(f"unseen {domain}", justify="right")
    table.add_column(UNSEEN_MEAN, justify="right", style="bold")
    table.add_column(ROLES[seen], justify="right")
    for name, records in rows.items():
        by_domain = {r.domain: r.metrics["accuracy"] for r in records if r.role == "target"}
        means = (mean_accuracy(records, role) or 0.0 for role in ("target", seen))
        values = (*(by_domain[d] for d in targets), *means)
        table.add_row(name, *map(percent, values))
    return table
