"""The results of the swap study on several runs, as tables and as points of a figure."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table

from solodg.explain.studied_run import Accuracies
from solodg.runs.statistics import MeanInterval, mean_interval
from solodg.runs.tables import UNSEEN_MEAN


class RunAccuracies(NamedTuple):
    """The accuracies of one run, for one thing that was swapped."""

    seed: int
    accuracies: Accuracies


def means_by_donor(
    runs: Sequence[RunAccuracies], domain: str | None = None
) -> dict[str, MeanInterval]:
    """Returns the mean accuracy over seeds, in %, for each kind of donor.

    With `domain` it is that of one unseen domain, otherwise of the mean over unseen domains.
    """
    values: dict[str, dict[int, list[float]]] = {}  # donor -> seed -> accuracies
    for seed, accuracies in runs:
        for name, by_donor in accuracies.items():
            for donor, value in by_donor.items() if domain in (None, name) else ():
                values.setdefault(donor, {}).setdefault(seed, []).append(100 * value)
    means = {}
    for donor, seeds in values.items():
        result = mean_interval([statistics.mean(each) for each in seeds.values()])
        assert result is not None
        means[donor] = result
    return means


def study_table(swapped: str, runs: Sequence[RunAccuracies]) -> Table:
    """Returns a table with a row for each unseen domain and their mean, a column for each donor."""
    domains = list(dict.fromkeys(name for run in runs for name in run.accuracies))
    rows = {name: means_by_donor(runs, name) for name in domains}
    rows[UNSEEN_MEAN] = means_by_donor(runs)
    seeds = len({run.seed for run in runs})
    title = f"Whose {swapped}? Accuracy on unseen domains, %"
    table = Table(title=title, caption=f"{seeds} seed(s)")
    table.add_column("domain")
    for donor in rows[UNSEEN_MEAN]:
        table.add_column(donor, justify="right")
    for name, found in rows.items():
        table.add_row(name, *(found[donor].text() for donor in rows[UNSEEN_MEAN]))
    return table
