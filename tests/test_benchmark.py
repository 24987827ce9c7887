"""Plans carried out by real processes: killed, shared, failing, and on Ray."""

import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import forked
from solodg.bench.duration import estimate_training_seconds
from solodg.bench.plan import read_plan
from solodg.bench.records import RECORDS, Results, append_cell, read_results
from solodg.bench.runner import pending, run_serially
from solodg.cli import app
from solodg.errors import UserError
from solodg.progress import NoProgress
from solodg.runs.config import Machine
from solodg.storage import read_lines, try_lock
from test_plan_table import lines, rising, toy_plan

PLAN = """
title: Toy
dataset: toy
targets: [sky]
seeds: [0, 1]
run: {backbone: small_cnn, steps: 8, batch_size: 8, context_images: 2, validate_every: 4,
      train_images: 10}
rows:
  - {name: ERM, run: {algorithm: erm}, paper: {PACS: 81.45}}
  - {name: solo, run: {algorithm: solo}}
notes: [made for a test]
"""


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "toy.yaml"
    path.write_text(PLAN)
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "solodg", "bench", *(str(a) for a in arguments)]


def started(*arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def solodg_bench(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, env=os.environ | environment
    )


def numbers(output: Path) -> dict[str, list]:
    done = read_results(output / RECORDS).done
    return {key: [(r.domain, r.metrics) for r in records] for key, records in done.items()}


def table(output: Path) -> list[str]:
    text = (output / "tables" / "toy.md").read_text()
    return [line for line in text.splitlines() if "minutes" not in line]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Numbers depend on the threads: those of Ray's workers are one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, one_thread) -> Path:
    """The plan, run once without a stop."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "toy.yaml").write_text(PLAN)
    done = CliRunner().invoke(
        app, ["bench", str(folder / "toy.yaml"), "--output", str(folder / "out")]
    )
    assert done.exit_code == 0, done.output
    return folder / "out"


def test_a_plan_becomes_records_tables_and_a_picture(whole: Path) -> None:
    assert len(numbers(whole)) == 4
    for suffix in ("md", "tex", "csv", "png"):
        assert (whole / "tables" / f"toy.{suffix}").stat().st_size > 0
    assert "81.45" in (whole / "tables" / "toy.md").read_text()
    record = next(iter(read_results(whole / RECORDS).done.values()))[0]
    assert record.config["steps"] == 8
    assert record.versions["torch"]
    assert record.data["fingerprint"]
    assert record.machine["cores"]
    assert record.time["at"]
    assert str(whole) not in (whole / RECORDS).read_text()


def test_nothing_is_run_twice(whole: Path, plan_file: Path, solodg) -> None:
    before = (whole / RECORDS).read_bytes()
    code, _, err = solodg("bench", plan_file, "--output", whole)
    assert code == 0
    assert "0 cells run" in err
    assert (whole / RECORDS).read_bytes() == before


def test_killed_in_the_middle_two_runners_share_the_rest_and_end_with_the_same_table(
    whole: Path, plan_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "killed"

    def runner(name: str) -> tuple[BaseProcess, Path]:
        said = tmp_path / name
        return forked.start("bench", plan_file, "--output", output, said=said), said

    process, _ = runner("first")
    deadline = time.monotonic() + 120
    while len(read_lines(output / RECORDS)) == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.join()
    done = len(numbers(output))
    assert 0 < done < 4
    with (output / RECORDS).open("ab") as file:
        file.write(b'{"dataset": "toy", "algo')  # and a crash in mid-write
    runners = [runner("second"), runner("third")]
    for process, _ in runners:
        process.join()
    said = [path.read_text() for _, path in runners]
    assert [process.exitcode for process, _ in runners] == [0, 0], said
    closing = [line for text in said for line in text.splitlines() if "cells run" in line]
    assert sum(int(line.split()[0]) for line in closing) == 4 - done
    assert numbers(output) == numbers(whole)
    assert table(output) == table(whole)


def test_a_cell_that_fails_is_recorded_and_the_rest_goes_on(tmp_path: Path, solodg) -> None:
    path = tmp_path / "toy.yaml"
    path.write_text(
        PLAN.replace(
            "{name: solo, run: {algorithm: solo}}",
            "{name: broken, run: {algorithm: solo, arguments: {test_samples: 3}}}",
        )
    )
    output = tmp_path / "out"
    code, _, err = solodg("bench", path, "--output", output)
    assert code == 1
    assert "Traceback" not in err
    results = read_results(output / RECORDS)
    assert len(results.done) == 2
    assert all("test_samples" in reason for reason in results.failed.values())
    assert len(results.failed) == 2
    assert "2 failed" in (output / "tables" / "toy.md").read_text()


def test_success_after_failure_counts(tmp_path: Path) -> None:
    failed = {"cell": "k", "failed": "no disk", "time": {"at": "2030"}}
    good = lines(toy_plan(), rising)[:2]
    good = [{**line, "cell": line["cell"] | {"key": "k"}} for line in good]
    assert Results([failed]).failed == {"k": "no disk"}
    for order in ([failed, *good], [*good, failed]):
        assert Results(order).failed == {}


def test_half_a_cell_is_not_done() -> None:
    records = lines(toy_plan(), rising)
    assert len(Results(records).done) == 8
    assert len(Results(records[1:]).done) == 7


def test_writers_do_not_mix_their_lines(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from solodg.storage import append_lines\n"
        "for i in range(150):\n"
        "    append_lines(Path(sys.argv[1]), [{'who': sys.argv[2], 'pad': 'x' * 9000}] * 2)"
    )
    path = tmp_path / "lines.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", script, str(path), name]) for name in "ab"]
    assert [w.wait() for w in writers] == [0, 0]
    assert len(read_lines(path)) == len(path.read_text().splitlines()) == 600


def test_a_lock_is_for_one_and_dies_with_its_holder(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from solodg.storage import try_lock\n"
        "with try_lock(Path(sys.argv[1])) as mine: print(mine, flush=True); time.sleep(60)"
    )
    lock = tmp_path / "locks" / "a"
    holder = subprocess.Popen([sys.executable, "-c", script, str(lock)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"True\n"
    with try_lock(lock) as mine:
        assert not mine
    holder.kill()
    holder.wait()
    with try_lock(lock) as mine:
        assert mine


def test_dry_run_tells_and_does_nothing(whole: Path, plan_file: Path, tmp_path, solodg) -> None:
    code, out, err = solodg("bench", plan_file, "--output", tmp_path / "none", "--dry-run")
    assert code == 0, err
    assert "4 of 4 cells to do" in out
    assert not (tmp_path / "none").exists()
    _, out, _ = solodg("bench", plan_file, "--output", whole, "--dry-run")
    assert "0 of 4 cells to do" in out


def test_a_damaged_record_is_no_number_of_the_table(whole, plan_file, tmp_path, solodg) -> None:
    records = tmp_path / "damaged.jsonl"
    records.write_text((whole / RECORDS).read_text().replace('"accuracy": 0', '"accuracy": 1', 1))
    command = ["bench", plan_file, "--table-only", "--records", records, "--output", tmp_path]
    code, _, err = solodg(*command)
    assert code == 0, err
    assert "1 damaged line(s)" in " ".join(err.split())
    kept = read_lines(tmp_path / "tables" / "toy.jsonl")
    assert len(kept) < len(read_lines(whole / RECORDS))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give a plan"),
        (["nowhere.yaml"], "cannot read nowhere.yaml: No such file"),
        (["--verify", "nowhere.jsonl"], "no file of records"),
        (["nowhere.yaml", "--on", "mars"], "mars"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], reason: str, solodg) -> None:
    code, _, err = solodg("bench", *arguments)
    assert code == 2
    assert reason in err
    assert "Traceback" not in err


def test_pending_asks_for_each_run_once(tmp_path: Path, plan_file: Path) -> None:
    cells = read_plan(plan_file).cells()
    assert len(pending(cells * 2, tmp_path)) == 4
    toy = toy_plan()
    by_key = Results(lines(toy, rising)).done
    for key, records in random.Random(0).sample(sorted(by_key.items()), 3):
        append_cell(tmp_path / RECORDS, key, records)
    assert len(pending(toy.cells(), tmp_path)) == 5


def test_a_plan_of_done_cells_needs_no_data(tmp_path: Path) -> None:
    toy = toy_plan()
    for key, records in Results(lines(toy, rising)).done.items():
        append_cell(tmp_path / RECORDS, key, records)
    tally = run_serially(
        toy.cells(), Machine(), tmp_path, progress=NoProgress(), say=lambda text: None
    )
    assert (tally.ran, tally.failed) == (0, 0)


def test_an_error_that_is_ours_leaves_its_traceback(tmp_path: Path, monkeypatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("as if")

    monkeypatch.setattr("solodg.bench.runner.train_run", broken)
    said: list[str] = []
    cells = toy_plan(seeds=[0]).cells()[:2]
    tally = run_serially(cells, Machine(), tmp_path, progress=NoProgress(), say=said.append)
    assert (tally.ran, tally.failed) == (0, 2)
    traces = list((tmp_path / "runs").glob("*/error.txt"))
    assert all("ZeroDivisionError: as if" in path.read_text() for path in traces)
    assert len(traces) == 2
    assert len(pending(cells, tmp_path)) == 2  # tried again next time


def test_the_estimate_knows_single_sources_and_missing_data(tmp_path: Path) -> None:
    one_source = {"dataset": "toy", "targets": [["ash", "sky", "clay"]], "seeds": [0]}
    rows = [{"name": n, "run": {"pseudo_domains": n}} for n in ("random", "clusters")]
    cells = toy_plan(**one_source, rows=rows).cells()
    seconds = estimate_training_seconds(cells, Machine(), Results([]), NoProgress())
    assert all(seconds[cell.run_key] > 0 for cell in cells)
    nowhere = toy_plan(dataset="office-home", targets=["Art"]).cells()
    assert estimate_training_seconds(nowhere, Machine(), Results([]), NoProgress()) == {}


CLUSTER = """
import sys, ray
ray.init(address="local", num_cpus=2, num_gpus=1, _memory=2**31, include_dashboard=False,
         log_to_driver=False, configure_logging=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cluster(monkeypatch) -> Iterator[tuple[str, int]]:
    """Address and process of a Ray cluster of 2 CPUs, 2 GB, and a GPU that is only declared."""
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
        process.stdin.close()


def working(cluster: int) -> set[int]:
    """The processes of a Ray cluster that run a cell now."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True)
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()[1:]]
    parents = {int(pid): int(parent) for pid, parent, *_ in rows}

    def of_cluster(pid: int) -> bool:
        while pid in parents and pid != cluster:
            pid = parents[pid]
        return pid == cluster

    found = {int(pid) for pid, _, *args in rows if args and args[0].startswith("ray::_work")}
    return {pid for pid in found if of_cluster(pid)}


def test_ray_places_cells_tries_those_of_killed_workers_twice_and_gives_the_serial_records(
    whole: Path, tmp_path: Path, cluster: tuple[str, int]
) -> None:
    """Workers of one thread, against one process of one thread."""
    path, output = tmp_path / "toy.yaml", tmp_path / "ray"
    broken = "  - {name: broken, run: {algorithm: solo, arguments: {test_samples: 3}}}\n"
    path.write_text(PLAN.replace("notes:", broken + "notes:").replace("[0, 1]", "[0]"))
    address, process = cluster
    on_ray = [path, "--output", output, "--on", "ray", "--ray-address", address]

    refused = solodg_bench(*on_ray, "--ray-gpus-per-cell", 1, "--ray-memory-gb-per-cell", 3)
    assert refused.returncode == 2, refused.stderr
    said = " ".join(refused.stderr.split())
    assert "1 CPU, 1 GPU, 3 GB of memory" in said
    assert "2 CPU, 1 GPU, 2 GB of memory" in said

    running = started(*on_ray)
    killed, at_once = 0, 0
    while running.poll() is None:
        found = working(process)
        at_once = max(at_once, len(found))
        begun = [*(output / "runs").glob("*/config.json")]
        if not killed and found and begun:
            killed = found.pop()
            os.kill(killed, signal.SIGKILL)
        time.sleep(0.05)
    shown, said = running.communicate()
    assert running.returncode == 1, said
    assert killed
    assert said.count("its process was killed. Tried again, 1 of 2.") == 1
    assert "raylet" not in shown  # Ray's own reports
    assert at_once == 1  # of two CPUs, since there is one GPU
    assert "2 cells run, 1 failed" in said
    assert numbers(output) == {k: v for k, v in numbers(whole).items() if k in numbers(output)}
    assert len(read_lines(output / RECORDS)) == 2 * len(next(iter(numbers(whole).values()))) + 1
    (reason,) = read_results(output / RECORDS).failed.values()
    assert "test_samples" in reason

    running = started(*on_ray)  # the cell that failed
    victims: set[int] = set()
    while running.poll() is None:
        for victim in working(process) - victims:
            os.kill(victim, signal.SIGKILL)
            victims.add(victim)
        time.sleep(0.05)
    shown, said = running.communicate()
    assert running.returncode == 1, said
    assert len(victims) == 3
    assert "raylet" not in shown
    assert "Tried again, 2 of 2." in said
    assert "1 cell(s) failed: repeat the command" in said
    (reason,) = read_results(output / RECORDS).failed.values()
    assert reason.startswith("its process was killed 3 times, the last time by a signal")


@pytest.mark.parametrize(
    ("asked", "accelerator", "cells"),
    [
        ({}, "auto", 3),  # a GPU each, as there are some
        ({}, "cpu", 12),
        ({"gpus": 0}, "auto", 12),
        ({"gpus": 0.5}, "auto", 6),
        ({"gpus": 0.1, "cpus": 2}, "auto", 5),
        ({"gpus": 2}, "auto", 1),
        ({"memory_gb": 8}, "cpu", 5),
        ({"memory_gb": 8, "gpus": 0.5}, "cuda", 3),
    ],
)
def test_slots_are_counted_machine_by_machine(asked: dict, accelerator: str, cells: int) -> None:
    ray = pytest.importorskip("solodg.bench.ray")
    gb = 1024.0**3
    nodes = [
        ray.Node("a", {"CPU": 4.0, "GPU": 2.0, "memory": 16 * gb}),
        ray.Node("b", {"CPU": 6.0, "GPU": 1.0, "memory": 8 * gb}),
        ray.Node("c", {"CPU": 2.0, "memory": 20 * gb}),
    ]
    needed = ray.CellResources(**asked).needed(accelerator, nodes)
    assert ray.slots(nodes, needed) == cells


def test_no_slot_and_wrong_amounts_are_said_at_once(solodg) -> None:
    ray = pytest.importorskip("solodg.bench.ray")
    nodes = [ray.Node("a", {"CPU": 4.0}), ray.Node("b", {"CPU": 2.0, "GPU": 1.0})]
    for asked in ({"cpus": 3, "gpus": 1}, {"gpus": 2}, {"memory_gb": 1}):
        with pytest.raises(UserError, match="a has 4 CPU; b has 2 CPU, 1 GPU"):
            ray.slots(nodes, ray.CellResources(**asked).needed("cpu", nodes))
    with pytest.raises(UserError, match="share of one GPU"):
        ray.CellResources(gpus=1.5).needed("cpu", nodes)
    for options in (
        ["--ray-gpus-per-cell", 1],
        ["--on", "ray", "--ray-gpus-per-cell", -1],
        ["--on", "ray", "--ray-memory-gb-per-cell", 0],
        ["--on", "ray", "--ray-address", "auto", "--ray-workers", 2],
    ):
        for name in ("bench", "tune"):
            code, _, err = solodg(name, "plan.yaml", *options)
            assert code == 2
            assert str(options[-2]) in err


def test_a_cluster_that_does_not_start_is_one_line(tmp_path: Path, monkeypatch) -> None:
    on_ray = pytest.importorskip("solodg.bench.ray")

    def init(**_: object) -> None:
        raise Exception("the node timed out")

    monkeypatch.setattr(on_ray.ray, "init", init)
    with pytest.raises(UserError, match="cannot start the Ray cluster: the node timed out"):
        on_ray.run_on_ray(
            [], Machine(), tmp_path, on_ray.CellResources(), address=None,
            progress=NoProgress(), say=lambda text: None,
        )  # fmt: skip
