"""Runs the cells of a plan on a Ray cluster, many at a time; records are as in `bench.runner`.

Workers train and score; only this process writes records. The output folder must have the same
path on every machine. If the machines share it, an interrupted training continues on any of them;
otherwise a cell that moves to another machine starts again.

A cell whose process is killed is tried again twice, then recorded as failed. Ray's own retries are
off: after a shortage of memory they have no end, and they are reported on stdout.
"""

import io
import logging
import math
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from solodg.bench.cell import Cell
from solodg.bench.runner import WAIT, Recorder, Tally, lock_path, pending, run_cell
from solodg.errors import UserError
from solodg.models.allocator import keep_freed_memory
from solodg.progress import Progress, Say
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


RETRIES = 2  # of a cell whose process is killed
_GB = 1024**3
_NO_CLUSTER = "Start one with `ray start --head`, or leave --ray-address out to start one here."
_ON_NO_GPU = ("cpu", "mps")  # accelerators that Ray does not place


class CellResources(NamedTuple):
    """What each cell asks of the machine that runs it. Ray places by it; it enforces no limit.

    Without `gpus` it is one GPU if the cluster has any and the accelerator may be one.
    """

    cpus: int = 1  # also the number of threads
    gpus: float | None = None
    memory_gb: float | None = None

    def needed(self, accelerator: str, nodes: Sequence["Node"]) -> "Amounts":
        """Returns the amounts by Ray's names: CPU, GPU, and memory in bytes."""
        gpus = self.gpus
        if gpus is None and accelerator == "auto":
            gpus = float(any(node.has.get("GPU", 0) for node in nodes))
        elif gpus is None:
            gpus = float(accelerator not in _ON_NO_GPU)
        if gpus > 1 and gpus != int(gpus):
            raise UserError(
                f"--ray-gpus-per-cell {gpus:g}: give a share of one GPU, e.g. 0.5, or a whole "
                "number."
            )
        memory = int((self.memory_gb or 0) * _GB)
        return {"CPU": float(self.cpus), "GPU": gpus, "memory": float(memory)}


Amounts = dict[str, float]  # of CPU, GPU, and memory in bytes


class Node(NamedTuple):
    """A machine of a Ray cluster, and what it has in all."""

    name: str
    has: Amounts

    def room_for(self, needed: Amounts) -> int:
        """Returns how many cells it can run at once."""
        return min(math.floor(self.has.get(k, 0) / v + 1e-9) for k, v in needed.items() if v)


def slots(nodes: Sequence[Node], needed: Amounts) -> int:
    """Returns how many cells the machines can run at once; raises `UserError` if it is none.

    Ray would wait for ever for a machine that is large enough.
    """
    count = sum(node.room_for(needed) for node in nodes)
    if count == 0:
        found = "; ".join(f"{node.name} has {_words(node.has)}" for node in nodes)
        raise UserError(
            f"no machine of the Ray cluster can run a cell, which asks for {_words(needed)}: "
            f"{found or 'there is none'}. Ask for less (--ray-cpus-per-cell, --ray-gpus-per-cell, "
            "--ray-memory-gb-per-cell), or add a machine and repeat the command."
        )
    return count


def _words(amounts: Amounts) -> str:
    """Returns amounts for a person: `2 CPU, 0.5 GPU, 8 GB of memory`."""
    words = [f"{amounts[name]:g} {name}" for name in ("CPU", "GPU") if amounts.get(name)]
    if amounts.get("memory"):
        words.append(f"{amounts['memory'] / _GB:.3g} GB of memory")
    return ", ".join(words) or "nothing"


def run_on_ray(
    cells: Sequence[Cell],
    machine: Machine,
    output: Path,
    resources: CellResources,
    *,
    address: str | None,
    progress: Progress,
    say: Say,
    workers: int | None = None,
) -> Tally:
    """Runs the pending cells, as many at a time as the cluster has `resources` for.

    `address` is that of a running cluster; None starts a local one with `workers` CPUs.
    """
    with _warnings_said(say), redirect_stdout(io.StringIO()):
        try:
            with progress.stage("Starting Ray"):
                ray.init(
                    address=address or "local",
                    num_cpus=workers if address is None else None,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                )
        except Exception as error:  # Ray raises a bare one if a busy machine starts it too slowly
            what, remedy = ("reach", _NO_CLUSTER) if address else ("start", "Try again.")
            reason = str(error).rstrip(".")
            raise UserError(f"cannot {what} the Ray cluster: {reason}. {remedy}") from error
        try:
            return _run(
                # Workers run in another folder.
                [replace(cell, config=absolute_config(cell.config)) for cell in cells],
                absolute_machine(machine),
                output.resolve(),
                resources,
                progress,
                say,
            )
        finally:
            ray.shutdown()


@contextmanager
def _warnings_said(say: Say) -> Iterator[None]:
    """Passes warnings of Ray to `say`, which is silent where they would be in the way."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(record.getMessage())

    logger, handler = logging.getLogger("ray"), Handler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _nodes() -> list[Node]:
    """Returns the living machines of the cluster."""
    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [Node(n["NodeManagerHostname"], n["Resources"]) for n in found if n["Alive"]]


def _run(
    cells: Sequence[Cell],
    machine: Machine,
    output: Path,
    resources: CellResources,
    progress: Progress,
    say: Say,
) -> Tally:
    nodes = _nodes()
    needed = resources.needed(machine.accelerator, nodes)
    at_once = slots(nodes, needed)
    task = ray.remote(_work).options(
        num_cpus=needed["CPU"],
        num_gpus=needed["GPU"],
        memory=needed["memory"] or None,
        max_retries=0,  # see above
    )
    runs: dict[str, list[Cell]] = {}
    for cell in pending(cells, output):
        runs.setdefault(cell.run_key, []).append(cell)
    record = Recorder(output, sum(len(group) for group in runs.values()), say)
    say(f"{record.total} cells, up to {at_once} at a time, each with {_words(needed)}.")
    bar = progress.bar("Running cells", record.total)
    # A bar shows on the terminal what is printed meanwhile; what Ray prints is hidden from it too.
    with ExitStack() as locks, bar as advance, redirect_stdout(io.StringIO()):
        waiting: dict[Any, _Attempt] = {}
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
                    waiting[task.remote(left, machine, output)] = _Attempt(left, 1)
            if not waiting:
                record.report_waiting(sum(len(group) for group in runs.values()))
                time.sleep(WAIT)
                continue
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=10.0)
            advance(0)
            for reference in ready:
                group, number = attempt = waiting.pop(reference)
                outcomes = _outcomes(reference, attempt)
                if outcomes is None:
                    say(f"{attempt}: its process was killed. Tried again, {number} of {RETRIES}.")
                    waiting[task.remote(group, machine, output)] = _Attempt(group, number + 1)
                    continue
                for cell, outcome in zip(group, outcomes, strict=True):
                    if isinstance(outcome, Failure):
                        record.failure(cell, outcome.reason, outcome.trace)
                    else:
                        record(cell, lambda outcome=outcome: outcome)  # type: ignore[misc]
                advance(len(group))
    return record.tally()


class _Attempt(NamedTuple):
    """The cells of one training that a worker has; `number` counts the workers from 1."""

    cells: list[Cell]
    number: int

    def __str__(self) -> str:
        others = len(self.cells) - 1
        return f"{self.cells[0]}" + (f" (and {others} cells of its training)" if others else "")


def _outcomes(reference: Any, attempt: _Attempt) -> "list[list[Record] | Failure] | None":
    """Returns records or a failure for each cell; None if the worker was killed and may be again.

    Waits for the worker if it still runs.
    """
    try:
        found: list[list[Record] | Failure] = ray.get(reference)
        return found
    except ray.exceptions.RayError as error:
        killed = next((words for kind, words in _KILLED.items() if isinstance(error, kind)), None)
        if killed is None:
            reason = f"{type(error).__name__}: {error}"
        elif attempt.number <= RETRIES:
            return None
        else:
            reason = f"its process was killed {attempt.number} times, the last time {killed}"
        return [Failure(reason, "")] * len(attempt.cells)


# What the end of a worker says to the user.
_KILLED = {
    ray.exceptions.OutOfMemoryError: (
        "by Ray, since memory was short. --ray-memory-gb-per-cell lets fewer cells share a "
        "machine; --memory-gb keeps fewer decoded images."
    ),
    ray.exceptions.NodeDiedError: "because its machine was lost.",
    ray.exceptions.WorkerCrashedError: (
        "by a signal or a crash. Linux kills processes when memory is short: "
        "--ray-memory-gb-per-cell lets fewer cells share a machine."
    ),
}


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
