"""Curves over batch sizes: what is in them, drawn to real files."""

from pathlib import Path

import pytest
from PIL import Image

from solodg.bench.records import Results
from solodg.bench.stream_curves import (
    accuracy_curves,
    draw_streams,
    stream_points,
    stream_table,
    time_curves,
)
from test_plan import toy_plan
from test_plan_table import lines, rising

STREAMS = {"domains": ["single", "mixed"], "batch_size": [1, 16]}
ROWS = [
    {"name": "solo", "sweep": STREAMS},
    {
        "name": "Tent",
        "run": {"algorithm": "erm"},
        "adapter": "tent",
        "sweep": STREAMS | {"steps": [1, 10]},
    },
]


def results(plan) -> Results:
    records = lines(plan, rising)
    for record in records:
        record["time"] = {"seconds": 0.5, "training_seconds": 1.0}
    return Results(records)


def test_rows_become_curves(tmp_path: Path) -> None:
    plan = toy_plan(rows=ROWS, targets=[["sky", "moss"]])
    points = stream_points(plan, results(plan))
    curves = {curve.name: curve for curve in accuracy_curves(plan, points, "single")}
    assert set(curves) == {"solo", "Tent, 1 step", "Tent, 10 steps"}
    assert set(curves["Tent, 10 steps"].points) == {1, 16}
    assert curves["solo"].points[1][0] == pytest.approx(53.0)  # of two seeds, two targets
    assert accuracy_curves(plan, points, "single", "moss")[0].points[1][0] == pytest.approx(55.5)
    times = {curve.name: curve for curve in time_curves(points, "mixed")}
    assert times["solo"].points[16] == (50.0, 0.0)  # half a second for ten images of each target
    for path in draw_streams(plan, results(plan), tmp_path):
        assert Image.open(path).size[0] > 600


def test_the_table_has_a_line_per_curve_and_stream() -> None:
    plan = toy_plan(rows=ROWS, targets=[["sky", "moss"]])
    grid = stream_table(plan, results(plan))
    assert grid.header[:4] == ["method", "stream", "batch 1", "batch 16"]
    assert [tuple(e.text for e in row[:2]) for row in grid.rows] == [
        (curve, stream)
        for curve, stream in [
            ("solo", "single"),
            ("solo", "mixed"),
            ("Tent, 1 step", "single"),
            ("Tent, 10 steps", "single"),
            ("Tent, 1 step", "mixed"),
            ("Tent, 10 steps", "mixed"),
        ]
    ]
    assert grid.rows[0][2].text.startswith("53.0 ±")
    assert grid.rows[0][-1].text == "50.00"


def test_no_curve_no_figure(tmp_path: Path) -> None:
    plan = toy_plan()
    assert draw_streams(plan, results(plan), tmp_path) == []
    assert stream_table(plan, results(plan)) is None
    unfinished = toy_plan(rows=ROWS)
    assert draw_streams(unfinished, Results([]), tmp_path) == []
