"""Accuracy and time over test batch sizes, for plans that score streams of test images.

Rows with the same `curve` form one line; they differ in batch size and in stream.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from solodg.bench.plan import Plan
from solodg.bench.records import Results
from solodg.bench.table import Column, Entry, Grid, column_mean, runs_by_row
from solodg.figures.plots import Curve, batch_size_curves
from solodg.runs.statistics import MeanInterval, mean_interval
from solodg.types import Record


class Point(NamedTuple):
    """A row of the plan as a point of a curve."""

    curve: str
    domains: str  # single or mixed
    batch_size: int
    runs: list[list[Record]]


def stream_points(plan: Plan, results: Results) -> list[Point]:
    """Returns a point for each row that has a curve and records."""
    runs = runs_by_row(plan, results)
    return [
        Point(row.curve, row.stream.domains, row.stream.batch_size, runs[row.name])
        for row in plan.rows
        if row.curve and row.stream and runs[row.name]
    ]


def draw_streams(plan: Plan, results: Results, folder: Path) -> list[Path]:
    """Draws `PLAN-accuracy.png` and `PLAN-time.png` and returns their paths.

    Panels of a column show one stream. Accuracy has a row of panels for the mean and for each
    target. A plan without curves has no figures.
    """
    points = stream_points(plan, results)
    if not points:
        return []
    domains = [name for targets in plan.target_sets() for name in targets]
    streams = sorted({point.domains for point in points}, reverse=True)
    panels = [
        [
            (f"{'mean' if name is None else f'unseen {name}'}, {stream} stream",
             accuracy_curves(plan, points, stream, name))
            for stream in streams
        ]
        for name in (None, *domains)
    ]  # fmt: skip
    accuracy, time = folder / f"{plan.name}-accuracy.png", folder / f"{plan.name}-time.png"
    batch_size_curves(panels, accuracy, ylabel="accuracy, %", log=False)
    times = [(f"{stream} stream", time_curves(points, stream)) for stream in streams]
    batch_size_curves([times], time, ylabel="milliseconds per test image", log=True)
    return [accuracy, time]


def accuracy_curves(
    plan: Plan, points: Sequence[Point], stream: str, domain: str | None = None
) -> list[Curve]:
    """Returns the accuracy over batch sizes on a domain, or the mean over unseen domains."""
    column = Column("", "target", domain)
    values = [column_mean(column, point.runs, plan) for point in points]
    return _curves(points, values, stream)


def time_curves(points: Sequence[Point], stream: str) -> list[Curve]:
    """Returns the milliseconds per test image over batch sizes."""
    return _curves(points, [_milliseconds(point) for point in points], stream)


def stream_table(plan: Plan, results: Results) -> Grid | None:
    """Builds a table with a row for each curve and stream, and a column for each batch size.

    Returns None for a plan without curves.
    """
    points = stream_points(plan, results)
    if not points:
        return None
    sizes = sorted({point.batch_size for point in points})
    ends = list(dict.fromkeys((sizes[0], sizes[-1])))
    column = Column("", "target")
    lines: dict[tuple[str, str], dict[int, Point]] = {}
    for point in points:
        lines.setdefault((point.curve, point.domains), {})[point.batch_size] = point
    rows = []
    for (curve, stream), found in lines.items():
        accuracy = [
            value.text()
            if size in found and (value := column_mean(column, found[size].runs, plan))
            else "-"
            for size in sizes
        ]
        times = [
            f"{_milliseconds(found[size]).mean:.2f}" if size in found else "-" for size in ends
        ]
        rows.append([Entry(text) for text in (curve, stream, *accuracy, *times)])
    header = [
        "method",
        "stream",
        *(f"batch {size}" for size in sizes),
        *(f"ms/image, batch {size}" for size in ends),
    ]
    remark = "accuracy in % on unseen domains, mean over seeds ± half of the 95% interval"
    return Grid(plan.title, header, rows, [*plan.notes, remark])


def _milliseconds(point: Point) -> MeanInterval:
    """Returns the mean time per test image; without interval, since other work disturbs it."""
    found = mean_interval([_per_image(records) for records in point.runs])
    assert found is not None
    return MeanInterval(found.mean, None, found.n)


def _per_image(records: Sequence[Record]) -> float:
    unseen = [r for r in records if r.role == "target"]
    images = sum(r.metrics["images"] for r in unseen)
    seconds = sum(float(r.time["seconds"]) for r in unseen)
    return 1000 * seconds / images


def _curves(
    points: Sequence[Point], values: Sequence[MeanInterval | None], stream: str
) -> list[Curve]:
    curves: dict[str, Curve] = {}
    for point, value in zip(points, values, strict=True):
        if value is not None and point.domains == stream:
            curve = curves.setdefault(point.curve, Curve(point.curve, {}))
            curve.points[point.batch_size] = (value.mean, value.half or 0.0)
    return list(curves.values())
