"""Runs the cells of a plan that are not done yet, one by one, and records their scores.

Everything is in one folder: `results.jsonl`, only ever appended to; `runs/KEY`, one for each
training; `tables/PLAN.*`. After an interruption the same command continues where it
stopped. Several runners may share the folder: a runner locks the cell that it works on, and the
lock ends with its process.
"""

import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from solodg.bench.cell import Cell
from solodg.bench.records import RECORDS, append_cell, append_failure, read_results
from solodg.errors import UserError
from solodg.progress import NoProgress, Progress, Say
from solodg.runs.config import Machine
from solodg.runs.evaluate import evaluate_run
from solodg.runs.tables import mean_accuracy, percent
from solodg.runs.train import train_run
from solodg.storage import lock, try_lock
from solodg.types import Record

ERROR = "error.txt"
WAIT = 2.0  # seconds until cells that another runner has locked are tried again


@dataclass(frozen=True)
class Tally:
    """How many cells were run and recorded, how many failed, and the seconds that it took."""

    ran: int
    failed: int
    seconds: float


def run_cell(
    cell: Cell,
    machine: Machine,
    output: Path,
    progress: Progress | None = None,
    say: Say = lambda text: None,
) -> list[Record]:
    """Trains the run of a cell, or completes its training, and scores it."""
    folder = output / "runs" / cell.run_key
    progress = progress or NoProgress()
    with lock(output / "locks" / f"{cell.run_key}.work"):  # a worker that Ray lost may still run
        train_run(cell.config, machine, folder, resume=True, progress=progress, say=say)
        return evaluate_run(
            folder,
            machine,
            adapter=cell.adapter,
            stream=cell.stream,
            accelerator=machine.accelerator,
            same_sources=True,  # the records of a plan are of one dataset
            progress=progress,
            say=say,
        )


def pending(cells: Sequence[Cell], output: Path) -> list[Cell]:
    """Returns the cells that are not done yet, including those that failed before."""
    done = read_results(output / RECORDS).done
    unique = {cell.key: cell for cell in cells}
    return [cell for key, cell in unique.items() if key not in done]


def run_serially(
    cells: Sequence[Cell], machine: Machine, output: Path, *, progress: Progress, say: Say
) -> Tally:
    """Runs the pending cells one after another in this process."""
    queue = deque(pending(cells, output))
    record = Recorder(output, len(queue), say)
    skipped = 0
    while queue:
        cell = queue.popleft()
        with try_lock(lock_path(output, cell)) as locked:
            if not locked:
                queue.append(cell)
                skipped += 1
                if skipped >= len(queue):  # other runners have all that is left
                    record.report_waiting(len(queue))
                    time.sleep(WAIT)
                    skipped = 0
                continue
            skipped = 0
            if cell.key in read_results(output / RECORDS).done:
                record.done_elsewhere(cell)
                continue
            say(f"[{record.position} of {record.total}] {cell}")
            record(cell, partial(run_cell, cell, machine, output, progress, say))
    return record.tally()


def lock_path(output: Path, cell: Cell) -> Path:
    """Returns the file that a runner locks while it works on a cell."""
    return output / "locks" / cell.run_key


class Recorder:
    """Records the scores or the error of each cell, and estimates how long the rest takes."""

    def __init__(self, output: Path, total: int, say: Say) -> None:
        self.output, self.total, self.say = output, total, say
        self.started, self.ran, self.failed, self.elsewhere = time.monotonic(), 0, 0, 0
        self.waiting = 0

    @property
    def position(self) -> int:
        """Returns the number of the current cell, counted from 1."""
        return self.ran + self.failed + self.elsewhere + 1

    def done_elsewhere(self, cell: Cell) -> None:
        """Counts a cell that another runner has done in the meantime."""
        self.elsewhere += 1
        self.say(f"{cell}: done by another runner.")

    def report_waiting(self, count: int) -> None:
        """Reports that other runners work on `count` cells, whenever the number changes."""
        if count != self.waiting:
            self.say(f"Waiting for {count} cell(s) that other runners work on.")
        self.waiting = count

    def __call__(self, cell: Cell, work: Callable[[], list[Record]]) -> None:
        """Does the work of a cell and records what it returns, or its error."""
        try:
            records = work()
        except UserError as error:
            self.failure(cell, str(error))
            return
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            self.failure(cell, f"{type(error).__name__}: {error}", text)
            return
        append_cell(self.output / RECORDS, cell.key, records)
        self.ran += 1
        accuracy = percent(mean_accuracy(records, "target") or 0.0)
        self.say(f"{cell}: {accuracy}% on unseen domains. {self._time_left()}")

    def failure(self, cell: Cell, reason: str, trace: str = "") -> None:
        """Records that a cell failed; a traceback goes into the folder of its run."""
        append_failure(self.output / RECORDS, cell.key, str(cell), reason)
        if trace:
            folder = self.output / "runs" / cell.run_key
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ERROR).write_text(trace)
            reason += f" (traceback in {folder / ERROR})"
        self.failed += 1
        self.say(f"{cell}: FAILED: {reason} {self._time_left()}")

    def _time_left(self) -> str:
        done = self.position - 1
        left = (time.monotonic() - self.started) / (self.ran + self.failed) * (self.total - done)
        return f"{done} of {self.total} done, about {format_seconds(left)} left."

    def tally(self) -> Tally:
        """Returns the counts so far."""
        return Tally(self.ran, self.failed, time.monotonic() - self.started)


def format_seconds(seconds: float) -> str:
    """Formats a duration for a person: seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
