"""Curves over batch sizes: what is in them, drawn to real files."""

from pathlib import Path

from PIL import Image

from solodg.results import Results
from solodg.stream_figure import _curves, _times, draw_streams
from test_plan import toy_plan
from test_plan_table import lines, rising

ROWS = [{"name": "ERM", "run": {"algorithm": "erm"}}, {"name": "solo"}] + [
    {
        "name": f"{steps} {size} {domains}",
        "run": {"algorithm": "erm"},
        "adapter": "tent",
        "stream": {"batch_size": size, "domains": domains, "arguments": {"steps": steps}},
    }
    for steps in (1, 10)
    for size in (1, 16)
    for domains in ("single", "mixed")
]


def results(plan) -> Results:
    records = lines(plan, rising)
    for record in records:
        record["time"] = {"seconds": 0.5, "training_seconds": 1.0}
    return Results(records)


def test_rows_become_curves_and_level_lines(tmp_path: Path) -> None:
    plan = toy_plan(rows=ROWS, targets=[["sky", "moss"]])
    curves = {curve.name: curve for curve in _curves(plan, results(plan), "single", None)}
    assert set(curves) == {"ERM", "solo", "tent, 1 step", "tent, 10 steps"}
    assert curves["solo"].level is not None
    assert set(curves["tent, 10 steps"].points) == {1, 16}
    times = {curve.name: curve for curve in _times(plan, results(plan), "mixed")}
    assert times["ERM"].level == (50.0, 0.0)  # half a second for ten images of each target
    for path in draw_streams(plan, results(plan), tmp_path):
        assert Image.open(path).size[0] > 600


def test_no_adapter_no_figure(tmp_path: Path) -> None:
    plan = toy_plan()
    assert draw_streams(plan, results(plan), tmp_path) == []
    unfinished = toy_plan(rows=ROWS)
    assert draw_streams(unfinished, Results([]), tmp_path) == []
