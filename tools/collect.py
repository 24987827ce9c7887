"""Copies the records of the measured plans from a bench folder, and writes docs/results.md.

    python tools/collect.py runs/bench

For each plan in configs/measured that is done: its own records go to docs/results/PLAN.jsonl, its
table into docs/results.md. So do those of the plans of several datasets in configs/lab, with their
tables in docs/adaptation.md. If all runs of `solo` of configs/lab/written.yaml have been studied
(`solodg study`), the table of donors goes there too. A test holds the pages against the records.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from solodg.bench.comparison import comparison_table
from solodg.bench.plan import read_plan, read_plans
from solodg.bench.records import Results, read_results
from solodg.bench.stream_curves import stream_table
from solodg.bench.table import plan_table, records_of
from solodg.explain.swap_study import STYLES
from solodg.runs.statistics import mean_interval
from solodg.storage import write_atomically, write_lines

ROOT = Path(__file__).parents[1]
DOCS, PLANS, LABORATORY = ROOT / "docs", ROOT / "configs" / "measured", ROOT / "configs" / "lab"


def main() -> None:
    """Writes the records and the page."""
    # Ends at a damaged line: committed records are complete.
    results_of_bench = read_results(Path(sys.argv[1]) / "results.jsonl", sys.exit)
    tables = []
    for path in sorted(PLANS.glob("*.yaml")):
        plan = read_plan(path)
        own = records_of(plan, results_of_bench)
        if all(cell.key in results_of_bench.done for cell in plan.cells()):
            write_lines(DOCS / "results" / f"{path.stem}.jsonl", [r.model_dump() for r in own])
        results = read_results(DOCS / "results" / f"{path.stem}.jsonl")
        if results.done:
            command = f"`solodg bench configs/measured/{path.name}`; records: "
            link = f"[{path.stem}.jsonl](results/{path.stem}.jsonl)"
            grid = stream_table(plan, results) or plan_table(plan, results)
            tables.append(f"{command}{link}\n\n{grid.markdown()}")
    _laboratory(results_of_bench)
    _donors(Path(sys.argv[1]) / "runs")
    page = DOCS / "results.md"
    before = page.read_text().split("<!-- tables -->")[0]
    write_atomically(page, f"{before}<!-- tables -->\n\n{chr(10).join(tables)}".encode())


def _laboratory(results_of_bench: Results) -> None:
    """Writes the records and tables of the plans of several datasets."""
    page = DOCS / "adaptation.md"
    text = page.read_text()
    for name in ("shifts", "written"):
        plans = read_plans(LABORATORY / f"{name}.yaml")
        cells = [cell for plan in plans for cell in plan.cells()]
        path = DOCS / "results" / f"lab_{name}.jsonl"
        if all(cell.key in results_of_bench.done for cell in cells):
            own = [r for plan in plans for r in records_of(plan, results_of_bench)]
            write_lines(path, [r.model_dump() for r in own])
        if path.is_file():
            title = plans[0].title.rpartition(": ")[0]
            grid = comparison_table(title, plans, read_results(path))
            text = replaced(text, name, grid.markdown())
    write_atomically(page, text.encode())


def _donors(runs: Path) -> None:
    """Writes the accuracies of the written classifiers by the donor of the style, and a table."""
    path = DOCS / "results" / "lab_written_study.jsonl"
    plans = read_plans(LABORATORY / "written.yaml")
    cells = [cell for plan in plans for cell in plan.cells() if cell.config.algorithm == "solo"]
    if all((runs / cell.key / "study.json").is_file() for cell in cells):
        studied = [json.loads((runs / cell.key / "study.json").read_text()) for cell in cells]
        lines = [
            {"dataset": cell.config.dataset, "seed": cell.config.seed, "run": cell.key} | found
            for cell, found in zip(cells, studied, strict=True)
        ]
        write_lines(path, lines)
    if path.is_file():
        page = DOCS / "adaptation.md"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        write_atomically(page, replaced(page.read_text(), "donors", donor_table(lines)).encode())


def donor_table(lines: Sequence[dict[str, Any]]) -> str:
    """Returns, as Markdown, the accuracy on each target with the style of each kind of donor."""
    rows = {
        (line["dataset"], target): {donor: 100 * found[donor] for donor in STYLES}
        for line in lines
        for target, found in line["style"].items()
    }
    shown = [[*key, *(f"{row[donor]:.1f}" for donor in STYLES)] for key, row in rows.items()]
    gains = {
        donor: mean_interval([row[donor] - row["own"] for row in rows.values()])
        for donor in STYLES[1:]
    }
    means = [statistics.mean(row[donor] for row in rows.values()) for donor in STYLES]
    shown.append(["mean", f"{len(rows)} targets", *(f"{mean:.1f}" for mean in means)])
    differences = [
        "-" if gain is None or gain.half is None else f"{gain.mean:+.1f} ± {gain.half:.1f}"
        for gain in gains.values()
    ]
    shown.append(["less the image's own", "", "", *differences])
    header = ["dataset", "target", "the image's own", *STYLES[1:]]
    table = [header, ["---"] * len(header), *shown]
    return "".join(f"| {' | '.join(row)} |\n" for row in table)


def replaced(text: str, name: str, content: str) -> str:
    """Returns a page with new content between the marks of this name."""
    before, _, rest = text.partition(f"<!-- {name} -->\n")
    after = rest.partition(f"<!-- end of {name} -->")[2]
    return f"{before}<!-- {name} -->\n\n{content}\n<!-- end of {name} -->{after}"


if __name__ == "__main__":
    main()
