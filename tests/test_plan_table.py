"""Tables: intervals, what is bold, every format, and independence of the order of records."""

import csv
import io
import json
import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from solodg.bench.comparison import compare_rows, comparison_table
from solodg.bench.records import Results
from solodg.bench.table import Column, column_mean, plan_table
from solodg.runs.statistics import mean_interval
from test_plan import toy_plan


def lines(plan, accuracy) -> list[dict]:
    """Records as a file holds them; `accuracy(cell, domain)` in [0, 1]."""
    found = []
    for cell in plan.cells():
        domains = [(t, "target") for t in cell.config.targets] + [("land", "in-distribution")]
        for part, (domain, role) in enumerate(domains):
            value = accuracy(cell, domain)
            found.append(
                {
                    "dataset": "toy",
                    "algorithm": cell.config.algorithm,
                    "variant": "default",
                    "adapter": cell.adapter,
                    "target": list(cell.config.targets),
                    "domain": domain,
                    "role": role,
                    "seed": cell.config.seed,
                    "protocol": "p",
                    "metrics": {"accuracy": value, "nll": 1 - value, "ece": 0.1, "images": 10},
                    "config": {},
                    "versions": {},
                    "data": {},
                    "time": {"training_seconds": 60.0},
                    "cell": {"key": cell.key, "part": part, "parts": len(domains)},
                }
            )
    return found


def rising(cell, domain) -> float:
    return 0.5 + 0.01 * cell.config.seed + 0.2 * (cell.row == "solo") + 0.05 * (domain == "moss")


@given(st.lists(st.floats(0, 100), min_size=2, max_size=9))
def test_the_interval_is_students(values) -> None:
    found = mean_interval(values)
    from scipy import stats

    spread = np.std(values, ddof=1) / np.sqrt(len(values))
    if spread > 1e-9:
        low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=spread)
        assert found.low == pytest.approx(low)
        assert found.high == pytest.approx(high)
    assert found.n == len(values)


def test_one_seed_has_no_interval_and_none_is_best() -> None:
    grid = plan_table(toy_plan(seeds=[3]), Results(lines(toy_plan(seeds=[3]), rising)))
    assert not any(e.best for row in grid.rows for e in row)
    assert "±" not in grid.rows[0][1].text


def test_means_are_over_targets_within_a_seed_then_over_seeds() -> None:
    plan = toy_plan(seeds=[0, 1, 2])
    grid = plan_table(plan, Results(lines(plan, rising)))
    mean = grid.rows[1][grid.header.index("unseen, mean")].text
    per_seed = [statistics.mean([70 + s, 75 + s]) for s in (0, 1, 2)]
    half = 4.302653 * statistics.stdev(per_seed) / 3**0.5
    assert mean == f"{statistics.mean(per_seed):.1f} ± {half:.1f}"
    assert [e.best for e in (grid.rows[0][3], grid.rows[1][3])] == [False, True]
    assert grid.rows[0][grid.header.index("seeds")].text == "3"


def test_a_seed_that_lacks_a_target_is_not_in_the_mean() -> None:
    plan = toy_plan()
    some = [line for line in lines(plan, rising) if (line["seed"], line["target"]) != (1, ["moss"])]
    runs = [r for r in Results(some).done.values() if r[0].algorithm == "erm"]
    assert column_mean(Column("", "target"), runs, plan).n == 1
    assert column_mean(Column("", "target", "sky"), runs, plan).n == 2
    assert any("6 of 8" in note for note in plan_table(plan, Results(some)).notes)


@given(st.integers(0, 10_000))
def test_the_order_of_records_does_not_matter(seed: int) -> None:
    plan = toy_plan()
    # A cell recorded twice with other numbers, as after a repeat on another machine.
    again = [
        {**line, "time": {"at": "2030", "training_seconds": 1.0}}
        for line in lines(plan, lambda c, d: 0.5)[:2]
    ]
    records = lines(plan, rising) + again
    shuffled = records.copy()
    random.Random(seed).shuffle(shuffled)
    assert plan_table(plan, Results(records)) == plan_table(plan, Results(shuffled))


def test_overlap_with_the_best_is_bold_too() -> None:
    plan = toy_plan(seeds=[0, 1, 2])
    noisy = lines(plan, lambda c, d: 0.6 + 0.1 * c.config.seed + 0.01 * (c.row == "solo"))
    column = plan_table(plan, Results(noisy)).header.index("unseen, mean")
    assert all(row[column].best for row in plan_table(plan, Results(noisy)).rows)


def test_formats_say_the_same() -> None:
    plan = toy_plan(
        rows=[
            {"name": "a_b & 5%", "paper": {"PACS": "84.15 ± 0.21"}},
            {"name": "c", "run": {"algorithm": "erm"}},
        ]
    )
    grid = plan_table(plan, Results(lines(plan, rising)))
    rows = list(csv.reader(io.StringIO(grid.csv())))
    assert rows[0] == grid.header
    assert rows[1][-1] == "84.15 ± 0.21"
    assert grid.header[-1] == "paper: PACS"
    assert rows[2][-1] == "-"
    latex = grid.latex()
    assert r"a\_b \& 5\%" in latex
    assert latex.count(r" \\") == 3
    markdown = grid.markdown().splitlines()
    assert len({line.count("|") for line in markdown if line.startswith("|")}) == 1
    console = Console(file=io.StringIO(), width=300)
    console.print(grid.rich())
    assert "84.15 ± 0.21" in console.file.getvalue()


def test_records_travel_through_json() -> None:
    plan = toy_plan()
    there = json.loads(json.dumps(lines(plan, rising)))
    assert plan_table(plan, Results(there)) == plan_table(plan, Results(lines(plan, rising)))


def test_a_comparison_has_every_target_and_pairs_seeds() -> None:
    plan = toy_plan(seeds=[0, 1, 2])
    noise = {0: 0.0, 1: 0.1, 2: -0.05}  # of a seed, the same for both rows

    def accuracy(cell, domain) -> float:
        gain = {"sky": 0.10, "moss": -0.04}.get(domain, 0.0) * (cell.row == "solo")
        return 0.5 + noise[cell.config.seed] + gain + 0.001 * cell.config.seed

    results = Results(lines(plan, accuracy))
    sky, moss = compare_rows([plan], results)
    assert (sky.dataset, sky.target, moss.target) == ("toy", "sky", "moss")
    assert sky.gains["solo"].mean == pytest.approx(10)
    assert sky.gains["solo"].half == pytest.approx(0, abs=1e-9)  # paired: the noise is gone
    assert sky.means["ERM"].half > 5
    assert moss.gains["solo"].mean == pytest.approx(-4)
    grid = comparison_table("t", [plan], results)
    assert grid.header == ["dataset", "target", "ERM", "solo", "solo - ERM"]
    assert [row[-1].text for row in grid.rows[:2]] == ["+10.0 ± 0.0", "-4.0 ± 0.0"]
    assert [row[-1].best for row in grid.rows[:2]] == [True, False]
    assert grid.rows[-1][1].text == "2 targets"
    assert grid.rows[-1][-1].text.startswith("+3.0 ± ")
    assert (
        "by more than 2 points on 1 of 2 targets, behind by more than that on 1, after the"
        in (grid.notes[-1])
    )
    some = [line for line in lines(plan, accuracy) if line["seed"] == 0]
    assert comparison_table("t", [plan], Results(some)).rows[0][-1].text == "+10.0"
