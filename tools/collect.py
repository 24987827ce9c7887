"""Copies the records of the measured plans from a bench folder, and writes docs/results.md.

    python tools/collect.py runs/bench

For each plan in configs/measured that is done: its own records go to docs/results/PLAN.jsonl, its
table into docs/results.md. So do those of the plans of several datasets in configs/lab, with their
tables in docs/adaptation.md. A test holds the pages against the records.
"""

import sys
from pathlib import Path

from solodg.bench.comparison import comparison_table
from solodg.bench.plan import read_plan, read_plans
from solodg.bench.records import Results, read_results
from solodg.bench.stream_curves import stream_table
from solodg.bench.table import plan_table, records_of
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
            before, _, rest = text.partition(f"<!-- {name} -->\n")
            after = rest.partition(f"<!-- end of {name} -->")[2]
            table = f"<!-- {name} -->\n\n{grid.markdown()}\n<!-- end of {name} -->"
            text = f"{before}{table}{after}"
    write_atomically(page, text.encode())


if __name__ == "__main__":
    main()
