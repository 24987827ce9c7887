"""Runs the cells of a plan on a Ray cluster, many at a time; records are as in `bench.runner`.

Workers train and score; only this process writes records. The output folder must have the same
path on every machine. If the machines share it, an interrupted training continues on any of them;
otherwise a cell that moves to another machine starts again.
"""

import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from solodg.bench.cell import Cell
from solodg.bench.runner import WAIT, Recorder, Tally, lock_path, pending, run_cell
from solodg.errors import UserError
from solodg.progress import Progress, Say
from solodg.runs.allocator import keep_freed_memory
from solodg.runs.config import Machine
from solodg.runs.folder import absolute_config, absolute_machine
from solodg.storage import hold_lock
from solodg.types import Record

try:
    import ray
except ImportError as error:
    raise UserError(
        "running on Ray needs the package: pip install 'solodg[ray]', or run without --on ray."
    ) from error


def run_on_ray(
    cells: Sequence[Cell],
    machine: Machine,
    output: Path,
    *,
    address: str | None,
    progress: Progress,
    say: Say,
    workers: int | None = None,
) -> Tally:
    """Runs the pending cells, as many at a time as the cluster has CPUs or GPUs.

    `address` is that of a running cluster; None starts a local one with `workers` CPUs.
    """
    try:
        with progress.stage("Starting Ray"):
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
        return _run(
            # Workers run in another folder.
            [replace(cell, config=absolute_config(cell.config)) for cell in cells],
            absolute_machine(machine),
            output.resolve(),
            progress,
            say,
        )
    finally:
        ray.shutdown()


def _run(
    cells: Sequence[Cell], machine: Machine, output: Path, progress: Progress, say: Say
) -> Tally:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    gpus = 1 if resources.get("GPU", 0) else 0
    task = ray.remote(_work).options(num_cpus=1, num_gpus=gpus, max_retries=2)
    runs: dict[str, list[Cell]] = {}
    for cell in pending(cells, output):
        runs.setdefault(cell.run_key, []).append(cell)
    record = Recorder(output, sum(len(group) for group in runs.values()), say)
    say(f"{record.total} cells on {resources.get('CPU', 0):.0f} CPUs.")
    bar = progress.bar("Running cells", record.total)
    with ExitStack() as locks, bar as advance:
        waiting: dict[Any, list[Cell]] = {}
        while runs or waiting:
            for key in list(runs):
                if not hold_lock(lock_path(output, runs[key][0]), locks):
                    continue  # another runner has it: tried again in the next round
                group = runs.pop(key)
                left = pending(group, output)
                for cell in group:
                    if cell not in left:
                        record.done_elsewhere(cell)
                        advance(1)
                # One worker gets all cells of a training: the first trains, the others score.
                if left:
                    waiting[task.remote(left, machine, output)] = left
            if not waiting:
                record.report_waiting(sum(len(group) for group in runs.values()))
                time.sleep(WAIT)
                continue
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=10.0)
            advance(0)
            for reference in ready:
                group = waiting.pop(reference)
                _collect(reference, group, record)
                advance(len(group))
    return record.tally()


def _collect(reference: Any, group: list[Cell], record: Recorder) -> None:
    try:
        outcomes = ray.get(reference)
    except ray.exceptions.RayError as error:  # the worker is gone
        outcomes = [Failure(f"{type(error).__name__}: {error}", "")] * len(group)
    for cell, outcome in zip(group, outcomes, strict=True):
        if isinstance(outcome, Failure):
            record.failure(cell, outcome.reason, outcome.trace)
        else:
            record(cell, lambda outcome=outcome: outcome)  # type: ignore[misc]


class Failure(NamedTuple):
    """An error of a worker as text, since not every exception can be sent."""

    reason: str
    trace: str


def _work(group: list[Cell], machine: Machine, output: Path) -> list[list[Record] | Failure]:
    keep_freed_memory()
    outcomes: list[list[Record] | Failure] = []
    for cell in group:
        try:
            outcomes.append(run_cell(cell, machine, output))
        except UserError as error:
            outcomes.append(Failure(str(error), ""))
        except Exception as error:
            outcomes.append(Failure(f"{type(error).__name__}: {error}", traceback.format_exc()))
    return outcomes
