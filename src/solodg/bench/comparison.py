"""The table of a plan of several datasets: every dataset and target, each row against the first."""

from collections.abc import Sequence
from typing import NamedTuple

from solodg.bench.plan import Plan
from solodg.bench.records import Results
from solodg.bench.table import Entry, Grid
from solodg.runs.statistics import MeanInterval, mean_interval

CLEARLY = 2.0  # points of accuracy that count as clearly behind


class Comparison(NamedTuple):
    """The accuracies of all rows of a plan on one target, and what they differ by, in points."""

    dataset: str
    target: str
    means: dict[str, MeanInterval]  # by row
    gains: dict[str, MeanInterval]  # over the first row, by row, paired by seeds


def compare_rows(plans: Sequence[Plan], results: Results) -> list[Comparison]:
    """Compares the rows on every dataset and target of which the first row has a record."""
    found = []
    for plan in plans:
        scores = _scores(plan, results)
        first = plan.rows[0].name
        for targets in plan.target_sets():
            by_row = {row.name: scores.get((row.name, targets), {}) for row in plan.rows}
            means, gains = {}, {}
            for name, by_seed in by_row.items():
                mean = mean_interval(list(by_seed.values()))
                paired = [by_seed[s] - by_row[first][s] for s in by_seed if s in by_row[first]]
                gain = mean_interval(paired)
                if mean is not None:
                    means[name] = mean
                if gain is not None and name != first:
                    gains[name] = gain
            if first in means:
                found.append(Comparison(plan.dataset, " ".join(targets), means, gains))
    return found


def comparison_table(title: str, plans: Sequence[Plan], results: Results) -> Grid:
    """Builds the table; a gain is bold if its interval lies above zero."""
    found = compare_rows(plans, results)
    names = [row.name for row in plans[0].rows]
    rows = []
    for line in found:
        shown = [Entry(_text(line.means.get(name))) for name in names]
        shown += [_gain(line.gains.get(name)) for name in names[1:]]
        rows.append([Entry(line.dataset), Entry(line.target), *shown])
    means = {n: mean_interval([c.means[n].mean for c in found if n in c.means]) for n in names}
    gains = {n: mean_interval([c.gains[n].mean for c in found if n in c.gains]) for n in names}
    over_all = [
        Entry("mean"),
        Entry(f"{len(found)} targets"),
        *(Entry(_text(means[name])) for name in names),
        *(_gain(gains[name]) for name in names[1:]),
    ]
    header = ["dataset", "target", *names, *(f"{name} - {names[0]}" for name in names[1:])]
    return Grid(title, header, [*rows, over_all], [*plans[0].notes, *_remarks(found, names)])


def _scores(plan: Plan, results: Results) -> dict[tuple[str, tuple[str, ...]], dict[int, float]]:
    """Returns the mean accuracy on the unseen domains, in %, by row and targets, by seed."""
    found: dict[tuple[str, tuple[str, ...]], dict[int, float]] = {}
    for cell in plan.cells():
        records = [r for r in results.done.get(cell.key, []) if r.role == "target"]
        if records:
            accuracy = sum(r.metrics["accuracy"] for r in records) / len(records)
            by_seed = found.setdefault((cell.row, cell.config.targets), {})
            by_seed[cell.config.seed] = 100 * accuracy
    return found


def _text(value: MeanInterval | None) -> str:
    return "-" if value is None else value.text()


def _gain(value: MeanInterval | None) -> Entry:
    if value is None:
        return Entry("-")
    text = f"{value.mean:+.1f}" + ("" if value.half is None else f" ± {value.half:.1f}")
    return Entry(text, best=value.half is not None and value.low > 0)


def _remarks(found: Sequence[Comparison], names: Sequence[str]) -> list[str]:
    remarks = [
        "accuracy in %, mean over seeds ± half of the 95% interval (Student t); differences are "
        "paired by seed; bold: the interval of the difference lies above zero; the last line is "
        "over targets"
    ]
    for name in names[1:]:
        gains = [c.gains[name] for c in found if name in c.gains]
        behind = sum(g.mean < -CLEARLY for g in gains)
        clearly = sum(g.half is not None and g.high < -CLEARLY for g in gains)
        ahead = sum(g.mean > CLEARLY for g in gains)
        remarks.append(
            f"{name}: ahead of {names[0]} by more than {CLEARLY:g} points on {ahead} of "
            f"{len(gains)} targets, behind by more than that on {behind}, after the interval on "
            f"{clearly}"
        )
    return remarks
