"""What `study` found on several runs, as tables and as points to draw."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table

from solodg.explain.swap_study import Accuracies
from solodg.runs.statistics import MeanInterval, mean_interval

MEAN = "unseen, mean"


class Answer(NamedTuple):
    """One run's."""

    seed: int
    accuracies: Accuracies


def by_whose(answers: Sequence[Answer], domain: str | None = None) -> dict[str, MeanInterval]:
    """In %, over seeds; of one unseen domain, or the mean over all that a seed's runs have."""
    values: dict[str, dict[int, list[float]]] = {}
    for seed, accuracies in answers:
        for name, by_kind in accuracies.items():
            for whose, value in by_kind.items() if domain in (None, name) else ():
                values.setdefault(whose, {}).setdefault(seed, []).append(100 * value)
    found = {}
    for whose, seeds in values.items():
        result = mean_interval([statistics.mean(each) for each in seeds.values()])
        assert result is not None
        found[whose] = result
    return found


def study_table(question: str, answers: Sequence[Answer]) -> Table:
    """Unseen domains and their mean, by whose style, frame or statistics."""
    domains = list(dict.fromkeys(name for answer in answers for name in answer.accuracies))
    rows = {name: by_whose(answers, name) for name in domains} | {MEAN: by_whose(answers)}
    seeds = len({answer.seed for answer in answers})
    title = f"Whose {question}? Accuracy on unseen domains, %"
    table = Table(title=title, caption=f"{seeds} seed(s)")
    table.add_column("domain")
    for whose in rows[MEAN]:
        table.add_column(whose, justify="right")
    for name, found in rows.items():
        table.add_row(name, *(found[whose].text() for whose in rows[MEAN]))
    return table
