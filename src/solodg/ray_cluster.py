"""A plan on a Ray cluster: the same cells, records and resume, many at a time.

Workers train and score; this process alone writes the records. The output folder has the same
path on every machine: shared, it lets a killed training go on anywhere; not shared, a cell that
is run again elsewhere starts anew.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from solodg.assembly import Say
from solodg.benchmark import Recorder, Tally, lock_path, pending, run_cell
from solodg.config import Machine
from solodg.errors import UserError
from solodg.plan import Cell
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
            address=address,
            num_cpus=workers if address is None else None,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(f"cannot reach the Ray cluster: {error}") from error
    try:
        return _run(cells, machine, output.resolve(), say)
    finally:
        ray.shutdown()


def _run(cells: Sequence[Cell], machine: Machine, output: Path, say: Say) -> Tally:
    room: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    gpus = 1 if room.get("GPU", 0) else 0
    task = ray.remote(_work).options(num_cpus=1, num_gpus=gpus, max_retries=2)
    with ExitStack() as locks:
        runs: dict[str, list[Cell]] = {}
        for cell in pending(cells, output):
            runs.setdefault(cell.run_key, []).append(cell)
        for key in list(runs):
            if not locks.enter_context(try_lock(lock_path(output, runs[key][0]))):
                say(f"{runs[key][0]}: another runner has it.")
                del runs[key]
        record = Recorder(output, sum(len(group) for group in runs.values()), say)
        say(f"{record.total} cells on {room.get('CPU', 0):.0f} CPUs.")
        # Cells of one training go to one worker: the first trains, the others only score.
        waiting = {task.remote(group, machine, output): group for group in runs.values()}
        while waiting:
            (ready, *_), _ = ray.wait(list(waiting), num_returns=1)
            group = waiting.pop(ready)
            try:
                answers = ray.get(ready)
            except ray.exceptions.RayError as error:  # the worker is gone
                answers = [error] * len(group)
            for cell, answer in zip(group, answers, strict=True):
                record(cell, lambda answer=answer: _result(answer))  # type: ignore[misc]
        return record.tally()


def _work(group: list[Cell], machine: Machine, output: Path) -> list[list[Record] | Exception]:
    answers: list[list[Record] | Exception] = []
    for cell in group:
        try:
            answers.append(run_cell(cell, machine, output))
        except UserError as error:
            answers.append(error)
        except Exception as error:  # with its traceback as text: it has to travel
            answers.append(RuntimeError(f"{type(error).__name__}: {error}"))
    return answers


def _result(answer: list[Record] | Exception) -> list[Record]:
    if isinstance(answer, Exception):
        raise answer
    return answer
