"""Records as tables for a person: pure functions of records."""

from collections.abc import Sequence

from rich.table import Table

from solodg.types import Record

ROLES = {
    "target": "unseen",
    "in-distribution": "seen, new images",
    "source-validation": "seen, validation",
}


def mean_accuracy(records: Sequence[Record], role: str) -> float | None:
    values = [r.metrics["accuracy"] for r in records if r.role == role]
    return sum(values) / len(values) if values else None


def evaluation_table(records: Sequence[Record]) -> Table:
    """One model: a row per domain, and the mean over the unseen ones."""
    first = records[0]
    table = Table(title=f"{first.algorithm} ({first.variant}) on {first.dataset}")
    for column in ("domain", "", "accuracy %", "NLL", "ECE %", "images"):
        table.add_column(column, justify="left" if column in ("domain", "") else "right")
    for r in records:
        m = r.metrics
        table.add_row(
            r.domain,
            ROLES[r.role],
            f"{100 * m['accuracy']:.1f}",
            f"{m['nll']:.3f}",
            f"{100 * m['ece']:.1f}",
            f"{m['images']:.0f}",
        )
    for role in ROLES:
        mean = mean_accuracy(records, role)
        if mean is not None:
            table.add_row("mean", ROLES[role], f"{100 * mean:.1f}", "", "", "", style="bold")
    return table


def comparison_table(title: str, rows: dict[str, Sequence[Record]]) -> Table:
    """Several models: a row each, a column per unseen domain, then the means."""
    first = next(iter(rows.values()))
    targets = [r.domain for r in first if r.role == "target"]
    own = next(r.role for r in first if r.role != "target")
    table = Table(title=title)
    table.add_column("accuracy %")
    for domain in targets:
        table.add_column(f"unseen {domain}", justify="right")
    table.add_column("unseen, mean", justify="right", style="bold")
    table.add_column(ROLES[own], justify="right")
    for name, records in rows.items():
        by_domain = {r.domain: r.metrics["accuracy"] for r in records if r.role == "target"}
        means = (mean_accuracy(records, role) or 0.0 for role in ("target", own))
        values = (*(by_domain[d] for d in targets), *means)
        table.add_row(name, *(f"{100 * value:.1f}" for value in values))
    return table
