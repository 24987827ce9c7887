"""The curves of a plan with adapters: accuracy and time over test batch sizes."""

from collections.abc import Callable, Sequence
from pathlib import Path

from solodg.plan import Plan, Row
from solodg.plan_table import Column, column_estimate, estimate, runs_of
from solodg.plots import Curve, batch_size_curves
from solodg.results import Results
from solodg.types import Record


def draw_streams(plan: Plan, results: Results, folder: Path) -> list[Path]:
    """`PLAN-accuracy.png` (mean and per target) and `PLAN-time.png`; none without adapters."""
    adapted = [row for row in plan.rows if row.adapter != "none"]
    if not adapted or not any(runs_of(plan, row.name, results) for row in adapted):
        return []
    domains = [name for targets in plan.target_sets() for name in targets]
    streams = sorted({row.stream.domains for row in adapted}, reverse=True)
    panels = {f"{stream} stream": _curves(plan, results, stream, None) for stream in streams}
    for name in domains:
        panels[f"unseen {name}, {streams[0]}"] = _curves(plan, results, streams[0], name)
    accuracy, time = folder / f"{plan.name}-accuracy.png", folder / f"{plan.name}-time.png"
    batch_size_curves(panels, accuracy, ylabel="accuracy, %", log=False)
    times = {f"{stream} stream": _times(plan, results, stream) for stream in streams}
    batch_size_curves(times, time, ylabel="milliseconds per test image", log=True)
    return [accuracy, time]


def _curves(plan: Plan, results: Results, stream: str, domain: str | None) -> list[Curve]:
    column = Column("", "target", domain)

    def value(row: Row) -> tuple[float, float] | None:
        found = column_estimate(column, runs_of(plan, row.name, results), plan)
        return (found.mean, found.half or 0.0) if found else None

    return _gather(plan, stream, value)


def _times(plan: Plan, results: Results, stream: str) -> list[Curve]:
    def value(row: Row) -> tuple[float, float] | None:
        runs = runs_of(plan, row.name, results)
        found = estimate([_milliseconds(records) for records in runs])
        return (found.mean, 0.0) if found else None

    return _gather(plan, stream, value)


def _milliseconds(records: Sequence[Record]) -> float:
    unseen = [r for r in records if r.role == "target"]
    images = sum(r.metrics["images"] for r in unseen)
    seconds = sum(float(r.time["seconds"]) for r in unseen)
    return 1000 * seconds / images


def _gather(
    plan: Plan, stream: str, value: Callable[[Row], tuple[float, float] | None]
) -> list[Curve]:
    """Rows of one method and one number of steps are one curve."""
    curves: dict[str, Curve] = {}
    for row in plan.rows:
        found = value(row)
        if found is None:
            continue
        if row.adapter == "none":
            curves[row.name] = Curve(row.name, {}, found)
        elif row.stream.domains == stream:
            steps = row.stream.arguments.get("steps", 1)
            name = f"{row.adapter}, {steps} step{'s' if steps > 1 else ''}"
            curves.setdefault(name, Curve(name, {})).points[row.stream.batch_size] = found
    return list(curves.values())
