"""Defaults may change: runs and records of before keep theirs, and new ones name them all."""

import inspect
import shutil
from pathlib import Path

import pytest

import solodg
from solodg.adapters import ADAPTERS
from solodg.adapters.tent import Tent
from solodg.algorithms import ALGORITHMS
from solodg.algorithms.solo import Solo
from solodg.bench.cell import Cell
from solodg.bench.plan import read_plan
from solodg.bench.records import read_results
from solodg.bench.verify import read_record, recorded_config, recorded_stream, records_beside
from solodg.runs import checkpoint
from solodg.runs.config import Machine, RunConfig
from solodg.runs.defaults import algorithm_arguments, checked_arguments, resolve
from solodg.runs.evaluate import evaluate_run
from solodg.runs.folder import read_config
from solodg.runs.stored_arguments import (
    changed_adapter_arguments,
    changed_arguments,
    complete_adapter_arguments,
    complete_arguments,
)
from solodg.runs.stream import Stream, adapter_arguments
from solodg.runs.train import train_run
from solodg.storage import read_json, write_json

ROOT = Path(__file__).parents[1]
OLD_RUN = ROOT / "tests" / "data" / "run_format_2"
RECORDS = ROOT / "docs" / "results" / "ablation.jsonl"
PICTURE = ROOT / "docs" / "disc.png"
NOT_ARGUMENTS = {"backbone", "num_classes", "num_domains", "algorithm"}


def arguments_of(kind: type) -> set[str]:
    return set(inspect.signature(kind).parameters) - NOT_ARGUMENTS


@pytest.fixture
def new_defaults(monkeypatch: pytest.MonkeyPatch):
    """As if a later version had other defaults."""

    def change() -> None:
        monkeypatch.setitem(Solo.__init__.__kwdefaults__, "test_samples", 4)
        monkeypatch.setitem(Solo.__init__.__kwdefaults__, "kl_weight", 0.5)
        monkeypatch.setitem(Tent.__init__.__kwdefaults__, "learning_rate", 0.5)
        monkeypatch.setitem(Solo.variants["no-prior-supervision"], "prior_weight", 0.2)
        assert algorithm_arguments(RunConfig(dataset="toy", algorithm="solo"))["test_samples"] == 4

    return change


# What now differs from the defaults of runs that do not name their arguments.
CHANGED = {
    "entropy_regularisation": {"weighting": "data", "domain_rate": 0.1},
    "jigen": {"whole": 0.9},
    "masf": {"leak": 0.2, "means": "fixed"},
    "mldg": {"meta_train": "sum"},
    "rsc": {"channel_share": 1 / 3.2},
    "ttt": {"own_stages": 1},
}
CHANGED_ADAPTERS = {
    "memo": {"copies": 64, "prior": 16.0},
    "shot": {"learning_rate": 1e-3, "nesterov": True, "weight_decay": 1e-3, "rounds": 2},
    "ttt": {"copies": 32},
}


# Algorithms that came after all arguments were stored need no entry.
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if complete_arguments(name, {})])
def test_every_argument_of_an_algorithm_has_a_value_for_runs_that_do_not_name_it(name) -> None:
    assert arguments_of(ALGORITHMS[name]) <= complete_arguments(name, {}).keys()
    for variant in ALGORITHMS[name].variants:
        config = RunConfig(dataset="toy", algorithm=name, variant=variant)
        changed = changed_arguments(name, algorithm_arguments(config), variant)
        assert changed == CHANGED.get(name, {})


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_argument_of_an_adapter_has_one_too(name) -> None:
    changed = changed_adapter_arguments(name, adapter_arguments(name, {}))
    assert changed == CHANGED_ADAPTERS.get(name, {})
    before = complete_adapter_arguments(name, {})
    assert changed_adapter_arguments(name, adapter_arguments(name, before)) == {}
    unknown = {argument: object() for argument in arguments_of(ADAPTERS[name])}
    assert changed_adapter_arguments(name, unknown) == unknown


def test_a_run_that_names_few_arguments_keeps_the_defaults_of_its_time(new_defaults) -> None:
    before = solodg.load(OLD_RUN).predict(PICTURE)
    config = read_config(OLD_RUN)
    new_defaults()
    assert solodg.load(OLD_RUN).predict(PICTURE) == before
    assert checkpoint.load_info(OLD_RUN).arguments["test_samples"] == 32
    assert read_config(OLD_RUN) == config
    assert config.arguments["kl_weight"] == 1e-4


def test_a_new_run_names_all_arguments_and_so_do_its_records(tmp_path: Path, new_defaults) -> None:
    fast = {"batch_size": 4, "context_images": 1, "centre_images": 2, "steps": 2}
    config = RunConfig(
        dataset="toy", targets=("sky",), algorithm="solo", backbone="small_cnn",
        variant="no-prior-supervision", arguments={"hidden": 4}, **fast,
    )  # fmt: skip
    run = train_run(config, Machine(accelerator="cpu"), tmp_path)
    stored = read_json(run / "config.json")["arguments"]
    assert stored.keys() == arguments_of(Solo)
    assert (stored["hidden"], stored["prior_weight"], stored["test_samples"]) == (4, 0.0, 32)
    assert read_json(run / "model.json")["arguments"] == stored
    assert read_json(run / "model.json")["format"] == "solodg-model-4"
    record = evaluate_run(run)[0]
    assert record.config["arguments"] == stored
    before = solodg.load(run).predict(PICTURE)
    new_defaults()
    assert solodg.load(run).predict(PICTURE) == before
    assert evaluate_run(run)[0].metrics == record.metrics
    assert resolve(RunConfig(**recorded_config(record))).arguments == stored


def test_a_finished_cell_of_before_is_not_that_of_another_default(new_defaults) -> None:
    plan = ROOT / "configs" / "measured" / "ablation.yaml"
    results = read_results(RECORDS)

    def done() -> set[str]:
        return {c.row for c in read_plan(plan).cells() if c.key in results.done}

    rows = {row.name for row in read_plan(plan).rows}
    assert done() == rows
    new_defaults()
    assert done() == set()
    first = resolve(RunConfig(**recorded_config(read_record(f"{RECORDS}:20"))))
    assert Cell("", "none", first).key in results.done  # what a record says, it still says


def test_the_key_of_a_stream_knows_a_changed_default_of_its_adapter(new_defaults) -> None:
    config = resolve(RunConfig(dataset="toy", algorithm="erm", targets=("sky",)))
    streams = [None, Stream(), Stream(arguments={"learning_rate": 0.001})]
    before = [Cell("", "tent", config, stream).key for stream in streams]
    new_defaults()
    after = [Cell("", "tent", config, stream).key for stream in streams]
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, False, True]


def test_a_record_of_before_is_repeated_with_the_defaults_of_its_time() -> None:
    """Of `memo`, which has another number of copies and mixed statistics since."""
    path = RECORDS.parent / "pacs_adapters.jsonl"
    record = next(r for r in records_beside(str(path)) if r.adapter == "memo")
    assert "prior" not in record.stream["arguments"]
    stream = recorded_stream(record)
    assert stream.arguments == {"copies": 16, "learning_rate": 2.5e-4, "prior": None}
    assert recorded_stream(records_beside(str(RECORDS))[0]) is None
    # A plan finds it by naming what was off, and does not find it without.
    config = resolve(RunConfig(**recorded_config(record)))
    keys = [
        Cell("", "memo", config, stream.model_copy(update={"arguments": named})).key
        for named in ({"copies": 16, "prior": None}, {"copies": 16})
    ]
    assert [key == record.cell["key"] for key in keys] == [True, False]


def test_a_run_of_before_keeps_the_meaning_of_arguments_it_does_not_name(tmp_path: Path) -> None:
    """Written as such a run is, with the arguments that were given alone."""
    shutil.copytree(OLD_RUN, tmp_path / "run")
    for name, changed in CHANGED.items():
        values = read_json(OLD_RUN / "config.json") | {"algorithm": name, "arguments": {}}
        write_json(tmp_path / "run" / "config.json", values | {"variant": "default"})
        stored = read_config(tmp_path / "run").arguments
        assert changed.keys() <= stored.keys()
        assert all(stored[argument] != value for argument, value in changed.items())
        checked_arguments(name, stored)


def test_an_old_run_that_is_scored_again_names_all_arguments(tmp_path: Path) -> None:
    shutil.copytree(OLD_RUN, tmp_path / "run")
    assert evaluate_run(tmp_path / "run")[0].config["arguments"].keys() == arguments_of(Solo)
