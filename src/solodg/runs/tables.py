"""Records as tables for the terminal, and metrics as text: pure functions of records."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.table import Table

from solodg.runs.scores import Estimate, Scores
from solodg.types import Record

ROLES = {
    "target": "unseen",
    "in-distribution": "seen, new images",
    "source-validation": "seen, validation",
    "new-site": "new site",
}
UNSEEN = ("target", "new-site")  # roles of domains that training did not see


UNSEEN_MEAN = "unseen, mean"


class MetricRow(NamedTuple):
    """The metrics of one domain as they are shown to a person."""

    accuracy: str  # %
    nll: str
    ece: str  # %
    images: str


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


OVERALL_TITLES = {
    "accuracy": "accuracy %",
    "balanced_accuracy": "balanced accuracy %",
    "macro_auc": "macro AUC",
    "macro_f1": "macro F1",
    "nll": "NLL",
    "ece": "ECE %",
    "brier": "Brier",
}
CLASS_TITLES = {
    "sensitivity": "sensitivity %",
    "specificity": "specificity %",
    "auc": "AUC",
    "f1": "F1",
}


def estimate_text(found: Estimate | None, title: str) -> str:
    """Formats a metric with its interval, e.g. `93.1 (90.2-95.4)`; in percent if its title is."""
    if found is None:
        return "-"
    form = percent if title.endswith("%") else "{:.3f}".format
    if found.low is None or found.high is None:
        return form(found.value)
    return f"{form(found.value)} ({form(found.low)}-{form(found.high)})"


def evaluation_table(records: Sequence[Record], scores: Sequence[Scores]) -> Table:
    """Builds the table of one model: a row for each domain, then the mean accuracies by role.

    `scores` are those of the records, with intervals.
    """
    first = records[0]
    table = Table(title=f"{first.algorithm} ({first.variant}) on {first.dataset}")
    for column in ("domain", "", *OVERALL_TITLES.values(), "images"):
        table.add_column(column, justify="left" if column in ("domain", "") else "right")
    for record, found in zip(records, scores, strict=True):
        cells = [estimate_text(found.overall.get(n), t) for n, t in OVERALL_TITLES.items()]
        table.add_row(record.domain, ROLES[record.role], *cells, str(found.images))
    for role in ROLES:
        mean = mean_accuracy(records, role)
        if mean is not None:
            empty = [""] * len(OVERALL_TITLES)
            table.add_row("mean", ROLES[role], percent(mean), *empty, style="bold")
    return table


def class_table(domain: str, scores: Scores) -> Table:
    """Builds the table of the classes of one domain, each against all others."""
    table = Table(title=f"{domain}, each class against the others")
    table.add_column("class")
    for column in (*CLASS_TITLES.values(), "images"):
        table.add_column(column, justify="right")
    for name, found in scores.classes.items():
        cells = [estimate_text(found.get(n), t) for n, t in CLASS_TITLES.items()]
        table.add_row(name, *cells, str(scores.class_images[name]))
    return table


def threshold_table(
    title: str,
    domains: Sequence[tuple[str, str]],
    scores: Sequence[Mapping[str, Estimate]],
) -> Table:
    """Builds the table of the scores at a threshold: a row for each domain and its role."""
    table = Table(title=title)
    table.add_column("domain")
    table.add_column("")
    names = ("sensitivity", "specificity", "accuracy")
    for name in names:
        table.add_column(f"{name} %", justify="right")
    for domain, found in zip(domains, scores, strict=True):
        table.add_row(*domain, *(estimate_text(found.get(name), "%") for name in names))
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
