"""Plans: what a file means, and that every shipped one is sound."""

import json
import os
import time
from pathlib import Path

import pytest

from solodg.bench.cell import Cell
from solodg.bench.plan import Plan, read_plan, read_plans
from solodg.bench.records import read_results
from solodg.bench.stream_curves import stream_table
from solodg.bench.table import plan_table
from solodg.bench.verify import recorded_config
from solodg.data.lab import FAMILIES
from solodg.errors import UserError
from solodg.runs.config import OFF_VALUES, RunConfig
from solodg.runs.defaults import resolve
from solodg.runs.stream import Stream

CONFIGS = Path(__file__).parents[1] / "configs"
TABLES = {
    "ablation",
    "domain_splits",
    "meta_learning",
    "backbones",
    "pacs",
    "office_home",
    "rotated_mnist",
    "rotated_fashion_mnist",
    "single_source",
    "tent_study",
}


def toy_plan(**changes) -> Plan:
    values = {
        "name": "toy",
        "title": "Toy",
        "dataset": "toy",
        "targets": ["sky", "moss"],
        "seeds": [0, 1],
        "run": {"backbone": "small_cnn", "steps": 4, "arguments": {}},
        "rows": [
            {"name": "ERM", "run": {"algorithm": "erm"}},
            {"name": "solo", "run": {"algorithm": "solo"}},
        ],
    }
    return Plan(**values | changes)


def test_every_table_has_a_plan_and_a_quick_twin() -> None:
    for folder in (CONFIGS, CONFIGS / "quick"):
        assert {path.stem for path in folder.glob("*.yaml")} >= TABLES


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda p: str(p.relative_to(CONFIGS))
)
def test_every_shipped_plan_is_sound(path: Path) -> None:
    plans = read_plans(path)
    cells = [cell for plan in plans for cell in plan.cells()]
    assert len({cell.key for cell in cells}) == len(cells)  # no two rows are the same run
    assert all(plan.notes for plan in plans)
    if path.parent.name == "measured":
        assert all(len(plan.seeds) >= 3 for plan in plans)


def test_a_plan_of_several_datasets_is_one_for_each(tmp_path: Path) -> None:
    path = tmp_path / "both.yaml"
    head = "title: t\nseeds: [0, 1]\nrows: [{name: a}]\n"
    path.write_text(head + "datasets: {toy: [sky, moss], pacs: [[photo, sketch]]}\n")
    toy, pacs = read_plans(path)
    assert (toy.name, toy.title, toy.dataset) == ("both-toy", "t: toy", "toy")
    assert toy.target_sets() == [("sky",), ("moss",)]
    assert pacs.target_sets() == [("photo", "sketch")]
    with pytest.raises(UserError, match="several datasets"):
        read_plan(path)
    for wrong in ("datasets: [toy]", "datasets: {}", "datasets: {toy: [sky]}\ndataset: toy"):
        path.write_text(head + wrong)
        with pytest.raises(UserError, match="datasets maps names"):
            read_plans(path)


def test_the_families_that_took_no_part_in_the_choice_are_in_the_laboratory() -> None:
    plans = {plan.dataset: plan for plan in read_plans(CONFIGS / "lab" / "shifts.yaml")}
    assert set(plans) == {f"{i}-{f}" for i in ("digits", "clothes", "objects") for f in FAMILIES}
    assert all(len(plan.target_sets()) == 2 and len(plan.seeds) == 3 for plan in plans.values())


def test_a_sweep_is_a_row_for_each_mix() -> None:
    row = {
        "name": "Tent",
        "run": {"algorithm": "erm"},
        "adapter": "tent",
        "stream": {"images": 5, "arguments": {"learning_rate": 0.1}},
        "sweep": {"domains": ["single", "mixed"], "steps": [1, 10], "batch_size": [2, 4]},
    }
    plan = toy_plan(rows=[row, {"name": "solo"}])
    assert [r.name for r in plan.rows][:3] == [
        "Tent, 1 step, single, batch 2",
        "Tent, 1 step, single, batch 4",
        "Tent, 10 steps, single, batch 2",
    ]
    assert len(plan.rows) == 9
    third = plan.rows[2]
    assert third.curve == "Tent, 10 steps"
    assert third.stream == Stream(
        images=5, arguments={"learning_rate": 0.1, "steps": 10}, domains="single", batch_size=2
    )
    assert plan.rows[-1].stream is None
    cells = plan.cells()
    assert {(c.config.seed, c.stream.order_seed) for c in cells if c.stream} == {(0, 0), (1, 1)}
    assert len({cell.key for cell in cells}) == len(cells) == 36


@pytest.mark.parametrize(
    ("sweep", "reason"),
    [
        ({"batch_size": []}, "a sweep over no value"),
        ({"batch_size": [0]}, "greater than 0"),
        ({"domains": ["one"]}, "single"),
        ({"arguments": [{"steps": 1}]}, "by its own name"),
        ({"batch_sizes": [1, 2]}, "batch_sizes.*A stream has batch_size"),
        ({"steps": [0]}, "steps=0"),
        ({"reset": ["batch", "never"], "batch_size": [1]}, None),
    ],
)
def test_a_sweep_that_cannot_be(tmp_path: Path, sweep: dict, reason: str | None) -> None:
    file = tmp_path / "p.yaml"
    rows = [{"name": "x", "adapter": "tent", "sweep": sweep}]
    file.write_text(json.dumps({"title": "t", "dataset": "toy", "seeds": [0], "rows": rows}))
    if reason is None:
        assert [row.curve for row in read_plan(file).rows] == ["x, reset batch", "x, reset never"]
        return
    with pytest.raises(UserError, match=reason):
        read_plan(file)


def test_an_adapter_of_one_algorithm_is_not_for_another() -> None:
    plan = toy_plan(rows=[{"name": "x", "run": {"algorithm": "erm"}, "adapter": "ttt"}])
    with pytest.raises(UserError, match="needs algorithm ttt, not erm"):
        plan.cells()


def test_two_points_at_one_place_of_a_curve_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    row = {"name": "x", "curve": "one", "sweep": {"images": [1, 2], "batch_size": [1]}}
    file.write_text(json.dumps({"title": "t", "dataset": "toy", "seeds": [0], "rows": [row]}))
    with pytest.raises(UserError, match="another row with the same batch size"):
        read_plan(file)


def test_cells_are_rows_times_targets_times_seeds() -> None:
    cells = toy_plan().cells()
    found = {(c.row, c.config.targets, c.config.seed) for c in cells}
    assert found == {
        (row, (target,), seed)
        for row in ("ERM", "solo")
        for target in ("sky", "moss")
        for seed in (0, 1)
    }


def test_a_row_may_have_settings_that_the_sources_of_one_target_chose() -> None:
    rows = [{"name": "ERM", "run": {"image_norm": 300}, "by_target": {"Sky": {"image_norm": 9}}}]
    found = {c.config.targets[0]: c.config.image_norm for c in toy_plan(rows=rows).cells()}
    assert found == {"sky": 9, "moss": 300}
    with pytest.raises(UserError, match="unknown target of row 'ERM' 'sea'"):
        toy_plan(rows=[{"name": "ERM", "by_target": {"sea": {}}}]).cells()


def test_targets_each_a_set_or_the_datasets_own() -> None:
    assert len(toy_plan(targets="each").target_sets()) == 4
    together = toy_plan(dataset="rotated-mnist", targets=[[0, 15]])
    assert together.target_sets() == [("0", "15")]
    assert toy_plan(dataset="rotated-mnist", targets=None).target_sets() == [("0", "90")]


def test_a_key_knows_the_run_and_not_the_machine(tmp_path: Path) -> None:
    values = {"dataset": "toy", "targets": ("sky",), "backbone": "tf_efficientnet_lite0"}
    keys = {
        Cell("a", "none", RunConfig(**values, weights=f"{folder}/w.safetensors")).key
        for folder in ("one", "another/place")
    }
    assert len(keys) == 1
    plain = Cell("a", "none", RunConfig(**values))
    assert plain.key not in keys
    assert Cell("b", "none", RunConfig(**values, seed=1)).key != plain.key
    assert Cell("b", "tent", RunConfig(**values)).run_key == plain.run_key


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rows: [", "is not YAML"),
        ("- a", "is not a plan"),
        ("title: t\ndataset: toy\nseeds: [0]\nrows: []", "rows"),
        ("title: t\ndataset: toy\ntargets: []\nseeds: [0]\nrows: [{name: a}]", "no target"),
        ("title: t\ndataset: toy\nseeds: [0, 0]\nrows: [{name: a}]", "twice"),
        ("title: t\ndataset: toy\nseeds: [0]\nsteps: 5\nrows: [{name: a}]", "steps"),
        ("title: t\ndataset: toy\nseeds: [0]\nrows: [{name: a}, {name: a}]", "one name"),
        ("title: t\ndataset: toy\nseeds: [0]\nrows: [{name: a, adapter: tont}]", "tont"),
    ],
)
def test_a_bad_plan_says_what_is_wrong(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=reason):
        read_plan(path)


@pytest.mark.parametrize(
    "name",
    ["../../out", "/tmp/out", "a/b", "a\\b", "", ".", "..", ".hidden", "a\0b", "a\nb", "x" * 201],
)
def test_a_name_of_a_plan_cannot_leave_the_output_folder(tmp_path: Path, name: str) -> None:
    path = tmp_path / "plan.yaml"
    values = {"name": name, "title": "t", "dataset": "toy", "seeds": [0], "rows": [{"name": "a"}]}
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match="cannot name files"):
        read_plan(path)


BASE = "title: t\ndataset: toy\nseeds: [0]\n"
MANY = list(range(1, 301))
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ((BASE + "rows: [{name: \xe4}]").encode("latin-1"), "not UTF-8"),
        (bytes(range(256)), "plan.yaml is not"),
        ((BOMB + BASE + "rows: [{name: a, run: *a11}]").encode(), "aliases"),
        ((BASE + "rows: &r [{name: a, run: {x: *r}}]").encode(), "alias"),
        ((BASE + "rows: " + "[" * 1200).encode(), "nested too deeply"),
        ((BASE + "rows: 2024-99-99").encode(), "not YAML"),
        ((BASE + f"rows: {'9' * 9999}").encode(), "not YAML"),
        ((BASE + "rows: [{name: a, run: {arguments: 5}}]").encode(), "arguments"),
        ((BASE + "rows: [{name: a, run: {weights: 5}}]").encode(), "weights"),
        ((BASE + "rows: [{name: a, run: 5}]").encode(), "run"),
        (b"x" * 2**21, "2,097,152 bytes"),
        (b"", "is not a plan"),
        (b"!!python/object/apply:os.system [ls]", "not YAML"),
    ],
)
def test_a_damaged_plan_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=reason):
        read_plan(path).cells()


def test_a_pipe_or_a_device_is_no_plan(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", Path("/dev/zero")):
        with pytest.raises(UserError, match="not a regular file"):
            read_plan(path)


@pytest.mark.parametrize(
    "text",
    [
        f"rows: [{{name: a, adapter: tent, sweep: {{batch_size: {MANY}, order_seed: {MANY}}}}}]",
        f"rows: [{', '.join(f'{{name: a{n}}}' for n in range(400))}]",
    ],
)
def test_more_cells_than_allowed_are_counted_and_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(f"title: t\ndataset: toy\nseeds: {MANY}\n{text}")
    started = time.monotonic()
    with pytest.raises(UserError, match=r"cells, at most 100,000 are allowed"):
        read_plan(path)
    assert time.monotonic() - started < 20  # they were not made first


def test_keys_of_before_are_kept() -> None:
    """Committed records are found by these: a change of theirs would lose them."""
    keys = [cell.key for cell in read_plan(CONFIGS / "measured" / "ablation.yaml").cells()]
    assert keys[:2] == ["f2307d5e29ec3a72", "7b5eb38b9156513e"]


def test_names_of_shipped_plans_are_their_own() -> None:
    plans = [plan for path in CONFIGS.rglob("*.yaml") for plan in read_plans(path)]
    assert len({plan.name for plan in plans}) == len(plans)


def test_folders_of_one_name_are_two_datasets(tmp_path: Path) -> None:
    keys = set()
    for parent in ("a", "b"):
        (tmp_path / parent / "pacs").mkdir(parents=True)
        config = RunConfig(dataset=str(tmp_path / parent / "pacs"), targets=("x",))
        keys.add(Cell("r", "none", config).key)
    keys.add(Cell("r", "none", RunConfig(dataset="pacs", targets=("x",))).key)
    assert len(keys) == 3


@pytest.mark.parametrize("name", ["seed", "targets", "dataset", "devices"])
def test_what_belongs_to_the_plan_is_not_a_setting_of_a_run(name: str) -> None:
    with pytest.raises(UserError, match=name):
        toy_plan(run={name: "1"}).cells()


def test_spelling_of_a_target_does_not_matter() -> None:
    cells = [
        toy_plan(dataset="pacs", targets=[t]).cells() for t in ("art painting", "Art_Painting")
    ]
    assert [c.key for c in cells[0]] == [c.key for c in cells[1]]


def test_bad_run_values_name_their_row() -> None:
    with pytest.raises(UserError, match=r"row 'a'.*stepps"):
        toy_plan(rows=[{"name": "a", "run": {"stepps": 3}}]).cells()


def test_weights_are_found_on_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "title: t\ndataset: toy\ntargets: [sky]\nseeds: [0]\n"
        "run: {weights: w.safetensors}\nrows: [{name: a}]"
    )
    here = tmp_path / "elsewhere" / "w.safetensors"
    (cell,) = read_plan(path, weights=here).cells()
    assert cell.config.weights == str(here)
    with pytest.raises(UserError, match=r"asks for weights 'w.safetensors'"):
        read_plan(path, weights=tmp_path / "other.safetensors")


MEASURED = CONFIGS / "measured"
RESULTS = Path(__file__).parents[1] / "docs" / "results"


WITH_RECORDS = [
    p for p in sorted(MEASURED.glob("*.yaml")) if (RESULTS / f"{p.stem}.jsonl").is_file()
]


@pytest.mark.parametrize("path", WITH_RECORDS, ids=lambda p: p.stem)
def test_the_published_table_is_that_of_the_committed_records(path: Path) -> None:
    plan = read_plan(path)
    results = read_results(RESULTS / f"{path.stem}.jsonl")
    assert all(cell.key in results.done for cell in plan.cells())
    grid = stream_table(plan, results) or plan_table(plan, results)
    assert grid.markdown() in (RESULTS.parent / "results.md").read_text()
    for records in results.done.values():
        for record in records:
            assert record.versions
            assert record.data["fingerprint"]
            assert record.machine["cores"]


def said(name: str, value: object) -> object:
    """To say no is to say nothing."""
    return None if value == OFF_VALUES.get(name) else value or None


@pytest.mark.parametrize("path", WITH_RECORDS, ids=lambda p: p.stem)
def test_a_committed_record_is_repeated_as_it_was_made(path: Path) -> None:
    results = read_results(RESULTS / f"{path.stem}.jsonl")
    cells = {cell.key: cell for cell in read_plan(path).cells()}
    for key, records in results.done.items():
        again = resolve(RunConfig(**recorded_config(records[0])))
        asked = resolve(cells[key].config)
        differing = {
            name
            for name, value in again.model_dump().items()
            if said(name, value) != said(name, getattr(asked, name)) and name != "weights"
        }
        assert not differing, (key, differing)
