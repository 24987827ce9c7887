"""A plan as one HTML page: its table, its figures, and each of its runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from solodg.bench.cell import Cell
from solodg.bench.plan import Plan
from solodg.bench.records import Results
from solodg.bench.table import Column, column_mean, plan_table, runs_by_row
from solodg.figures.html import Picture, chart, write_page
from solodg.figures.plots import plan_drawing
from solodg.figures.style import data_uri
from solodg.runs.folder import REPORT
from solodg.runs.tables import ROLES, mean_accuracy, metric_row, percent
from solodg.types import Record

POINTS_LABEL = "accuracy on unseen domains, %, mean and 95% interval over seeds"


def write_plan_page(
    plan: Plan, results: Results, output: Path, pictures: Sequence[Path] = ()
) -> Path:
    """Writes `tables/PLAN.html` under `output` and returns its path.

    `pictures` are PNG files that become part of the page.
    """
    path = output / "tables" / f"{plan.name}.html"
    points = plan_points(plan, results)
    figures = []
    if points:
        figures.append(chart(plan_drawing(plan.title, POINTS_LABEL, points), POINTS_LABEL))
    figures += [_png(picture) for picture in pictures]
    runs = [
        _run(cell, results.done[cell.key], output)
        for cell in plan.cells()
        if cell.key in results.done
    ]
    failures = [(str(c), results.failed[c.key]) for c in plan.cells() if c.key in results.failed]
    grid = plan_table(plan, results)
    write_page(path, "plan.html.j2", title=plan.title, grid=grid, figures=figures, runs=runs,
               failures=failures)  # fmt: skip
    return path


def plan_points(plan: Plan, results: Results) -> list[tuple[str, float, float]]:
    """Returns name, mean and half width of the interval of each method that has records."""
    points = []
    for name, runs in runs_by_row(plan, results).items():
        found = column_mean(Column("", "target"), runs, plan)
        if found:
            points.append((name, found.mean, found.half or 0.0))
    return points


def _run(cell: Cell, records: Sequence[Record], output: Path) -> dict[str, Any]:
    """Returns what the page shows of one cell, with a link to its run's report if it exists."""
    folder = output / "runs" / cell.run_key
    has_report = (folder / REPORT).is_file()
    return {
        "name": str(cell),
        "accuracy": percent(mean_accuracy(records, "target") or 0.0),
        "link": f"../runs/{cell.run_key}/{REPORT}" if has_report else None,
        "command": f"solodg report {folder}",
        "domains": [
            {"domain": r.domain, "role": ROLES[r.role], **metric_row(r.metrics)._asdict()}
            for r in records
        ],
    }


def _png(path: Path) -> Picture:
    with Image.open(path) as image:
        width, height = image.size
    return Picture(data_uri(path.read_bytes(), "png"), path.stem, width, height)
