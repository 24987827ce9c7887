"""A plan on a Ray cluster: the same cells, records and resume, many at a time.

Workers train and score; this process alone writes the records. The output folder has the same
path on every machine: shared, it lets a killed training go on anywhere; not shared, a cell that
is run again elsewhere starts anew.
"""

import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from solodg.bench.plan import Cell
from solodg.bench.runner import WAIT, Recorder, Tally, lock_path, pending, run_cell
from solodg.data import DATASETS
from solodg.errors import UserError
from solodg.runs.allocator import keep_freed_memory
from solodg.runs.build import Say
from solodg.runs.config import Machine
from solodg.storage import try_lock
from solodg.types import Record

try:
    import ray
except ImportError as error:
    raise UserError(
        "running on Ray needs the package: pip install 'solodg[ray]', or leave --on away."
    ) from error


def run_on_ray(
    cells: Sequence[Cell],
    machine: Machine,
    output: Path,
    *,
    address: str | None,
    say: Say,
    workers: int | None = None,
) -> Tally:
    """All cells at once, as many at a time as the cluster has room for."""
    try:
        ray.init(
            address=address or "local",
            num_cpus=workers if address is None else None,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(f"cannot reach the Ray cluster: {error}") from error
    try:
        return _run([_absolute(cell) for cell in cells], _here(machine), output.resolve(), say)
    finally:
        ray.shutdown()


def _run(cells: Sequence[Cell], machine: Machine, output: Path, say: Say) -> Tally:
    room: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    gpus = 1 if room.get("GPU", 0) else 0
    task = ray.remote(_work).options(num_cpus=1, num_gpus=gpus, max_retries=2)
    runs: dict[str, list[Cell]] = {}
    for cell in pending(cells, output):
        runs.setdefault(cell.run_key, []).append(cell)
    record = Recorder(output, sum(len(group) for group in runs.values()), say)
    say(f"{record.total} cells on {room.get('CPU', 0):.0f} CPUs.")
    with ExitStack() as locks:
        waiting: dict[Any, list[Cell]] = {}
        while runs or waiting:
            for key in list(runs):
                if not locks.enter_context(try_lock(lock_path(output, runs[key][0]))):
                    continue  # another runner has it: looked at again below
                group = runs.pop(key)
                left = pending(group, output)
                for cell in group:
                    if cell not in left:
                        record.found(cell)
                # Cells of one training go to one worker: the first trains, the others only score.
                if left:
                    waiting[task.remote(left, machine, output)] = left
            if not waiting:
                record.waits(sum(len(group) for group in runs.values()))
                time.sleep(WAIT)
                continue
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=10.0 if runs else None)
            for reference in ready:
                _collect(reference, waiting.pop(reference), record)
    return record.tally()


def _collect(reference: Any, group: list[Cell], record: Recorder) -> None:
    try:
        answers = ray.get(reference)
    except ray.exceptions.RayError as error:  # the worker is gone
        answers = [Failure(f"{type(error).__name__}: {error}", "")] * len(group)
    for cell, answer in zip(group, answers, strict=True):
        if isinstance(answer, Failure):
            record.failure(cell, answer.reason, answer.trace)
        else:
            record(cell, lambda answer=answer: answer)  # type: ignore[misc]


class Failure(NamedTuple):
    """An error as text: it has to travel."""

    reason: str
    trace: str


def _work(group: list[Cell], machine: Machine, output: Path) -> list[list[Record] | Failure]:
    keep_freed_memory()
    answers: list[list[Record] | Failure] = []
    for cell in group:
        try:
            answers.append(run_cell(cell, machine, output))
        except UserError as error:
            answers.append(Failure(str(error), ""))
        except Exception as error:
            answers.append(Failure(f"{type(error).__name__}: {error}", traceback.format_exc()))
    return answers


def _absolute(cell: Cell) -> Cell:
    """Workers have a working folder of their own."""
    config = cell.config
    values: dict[str, Any] = {}
    if config.weights:
        values["weights"] = str(Path(config.weights).resolve())
    if config.dataset not in DATASETS:
        values["dataset"] = str(Path(config.dataset).resolve())
    return replace(cell, config=config.model_copy(update=values))


def _here(machine: Machine) -> Machine:
    paths = {
        name: path.resolve()
        for name in ("data_dir", "cache_dir")
        if (path := getattr(machine, name)) is not None
    }
    return machine.model_copy(update=paths)
