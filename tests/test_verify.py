"""Repeating a record gives one of three verdicts. Real runs; some records are edited."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from solodg.bench.verdict import Agreement, compare
from solodg.bench.verify import records_beside
from solodg.progress import NoProgress
from solodg.runs.config import Machine, RunConfig
from solodg.runs.evaluate import evaluate_run
from solodg.runs.folder import machine_kind
from solodg.runs.train import train_run
from solodg.types import Record


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The record of a real run on its target domain."""
    config = RunConfig(
        dataset="toy", targets=("sky",), algorithm="erm", backbone="small_cnn", steps=3,
        batch_size=6, context_images=2, validate_every=3, train_images=6, image_size=16,
    )  # fmt: skip
    folder = train_run(config, Machine(), tmp_path_factory.mktemp("run") / "run")
    records = evaluate_run(folder, Machine(), progress=NoProgress())
    return next(r for r in records if r.role == "target")


def edited(record: Record, **changes: Any) -> Record:
    return record.model_copy(deep=True, update=changes)


def with_seed(record: Record, seed: int, accuracy: float) -> Record:
    """A record that another seed could have, with losses that differ as widely as they can."""
    metrics = record.metrics | {"accuracy": accuracy, "nll": 10.0 * seed, "ece": 1.0 * seed}
    stream = record.stream | ({"order_seed": seed} if record.stream else {})
    config = record.config | {"seed": seed}
    return edited(record, seed=seed, metrics=metrics, config=config, stream=stream)


def on_another_machine(record: Record, accuracy: float) -> Record:
    machine = record.machine | {"capability": "of another kind"}
    return edited(record, machine=machine, metrics=record.metrics | {"accuracy": accuracy})


@pytest.fixture
def verify(tmp_path: Path, solodg: Callable[..., tuple[int, str, str]]):
    """Writes records into a file, and verifies the first of them by a real run."""

    def run(*records: Record) -> tuple[int, str, str]:
        file = tmp_path / "records.jsonl"
        file.write_text("".join(json.dumps(r.model_dump()) + "\n" for r in records))
        code, out, err = solodg("bench", "--verify", f"{file}:1")
        return code, " ".join(out.split()), " ".join(err.split())

    return run


def test_the_same_run_is_equal_to_the_last_bit(record: Record, verify) -> None:
    code, out, _ = verify(record)
    assert code == 0
    assert "Equal to the last bit" in out


def test_another_machine_within_the_seeds_is_accepted(record: Record, verify) -> None:
    accuracy = record.metrics["accuracy"] + 0.01
    other = on_another_machine(record, accuracy)
    code, out, err = verify(other, with_seed(other, 1, 0.0), with_seed(other, 2, 1.0))
    assert code == 0, err
    assert "capability was of another kind" in out
    assert "The same data on another kind of machine" in out
    assert "inside the spread of seeds: 3 seeds differ by up to 1" in out


def test_another_machine_beyond_the_seeds_fails(record: Record, verify) -> None:
    accuracy = record.metrics["accuracy"] + 0.1
    other = on_another_machine(record, accuracy)
    seeds = [with_seed(other, seed, accuracy + 0.001 * seed) for seed in (1, 2)]
    code, _, err = verify(other, *seeds)
    assert code == 1
    assert "outside the spread of seeds (accuracy): 3 seeds differ by up to 0.002" in err


def test_the_same_machine_with_other_numbers_is_other_code(record: Record, verify) -> None:
    forged = edited(record, metrics=record.metrics | {"accuracy": 0.123})
    code, _, err = verify(forged, with_seed(forged, 1, 0.0), with_seed(forged, 2, 1.0))
    assert code == 1
    assert "Other data or code" in err
    assert "the numbers differ" in err


def test_other_data_is_named_even_where_the_numbers_are_equal(record: Record, verify) -> None:
    code, _, err = verify(edited(record, data=record.data | {"fingerprint": "140779ea"}))
    assert code == 1
    assert "Other data or code: the fingerprint of the images was 140779ea" in err
    assert "older" not in err


def test_fewer_than_two_other_seeds_leave_the_spread_unknown(record: Record) -> None:
    other = on_another_machine(record, 0.123)
    verdict = compare(other, record, [other, with_seed(other, 1, 0.9), with_seed(other, 1, 0.8)])
    assert (verdict.agreement, verdict.ok) == (Agreement.OTHER_MACHINE, False)
    assert "has 1 other seed(s)" in verdict.reason


def test_only_runs_that_differ_in_the_seed_alone_make_the_spread(record: Record) -> None:
    other = on_another_machine(record, 0.123)
    longer = [with_seed(other, seed, float(seed)) for seed in (1, 2)]
    longer = [edited(r, config=r.config | {"steps": 99}) for r in longer]
    elsewhere = [edited(with_seed(other, seed, float(seed)), domain="ash") for seed in (1, 2)]
    assert "has 0 other seed(s)" in compare(other, record, [*longer, *elsewhere]).reason


def test_another_version_of_solodg_is_other_code(record: Record) -> None:
    other = edited(on_another_machine(record, 0.1), versions=record.versions | {"solodg": "0.0"})
    assert compare(other, record, []).agreement is Agreement.OTHER_DATA_OR_CODE
    same = edited(other, metrics=record.metrics)
    assert compare(same, record, []).agreement is Agreement.EQUAL


def test_a_lost_metric_and_nan_are_never_inside_the_spread(record: Record) -> None:
    other = on_another_machine(record, record.metrics["accuracy"])
    seeds = [with_seed(other, seed, seed - 1.0) for seed in (1, 2)]
    for metrics in ({"accuracy": float("nan")}, {"accuracy": None}):
        left = {k: v for k, v in (record.metrics | metrics).items() if v is not None}
        assert not compare(other, edited(record, metrics=left), seeds).ok


def test_a_record_of_rotated_digits_by_floats_is_recognised(record: Record) -> None:
    machine = {k: v for k, v in record.machine.items() if k != "capability"}
    data = record.data | {"fingerprint": "140779ea91686333"}
    old = edited(record, dataset="rotated-mnist", machine=machine, data=data)
    assert "older than images that every processor makes alike" in compare(old, record, []).reason


def test_a_record_says_what_the_processor_can_do_but_not_its_name(record: Record) -> None:
    assert record.machine == machine_kind(torch.device("cpu"))
    assert record.machine["capability"] == torch.backends.cpu.get_cpu_capability()
    assert "Intel" not in json.dumps(record.machine)


def test_a_record_that_does_not_say_its_processor_is_no_other_machine(record: Record) -> None:
    machine = {k: v for k, v in record.machine.items() if k not in ("capability", "instructions")}
    old = edited(record, machine=machine)
    now = edited(record, metrics=record.metrics | {"accuracy": 0.123})
    seeds = [with_seed(old, seed, seed / 10) for seed in (5, 6, 7)]
    verdict = compare(old, now, [old, *seeds])
    assert verdict.agreement == Agreement.OTHER_DATA_OR_CODE
    assert not verdict.ok
    assert "does not say what its processor" in verdict.reason


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"algorithm": "erm", "variant": [1]},
        {"algorithm": "erm", "variant": "a", "arguments": [1]},
    ],
)
def test_a_record_with_a_damaged_config_is_refused_and_no_neighbour_of_others(
    record: Record, config: dict[str, Any], tmp_path: Path, solodg
) -> None:
    file = tmp_path / "records.jsonl"
    broken = edited(record, config=config)
    file.write_text("".join(json.dumps(r.model_dump()) + "\n" for r in (broken, record)))
    code, _, err = solodg("bench", "--verify", f"{file}:1")
    assert code == 2
    assert "damaged" in err
    assert records_beside(f"{file}:2") == [record]
