"""PACS on frozen features, all four targets, from images to table: how long, and where it goes.

`python -m benchmarks.frozen_pacs DATA_DIR WEIGHTS` with an empty cache each time.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.timing import table
from solodg.data import DATASETS
from solodg.models.allocator import keep_freed_memory
from solodg.progress import Advance
from solodg.runs.config import Machine, RunConfig
from solodg.runs.evaluate import evaluate_run
from solodg.runs.tables import mean_accuracy
from solodg.runs.train import train_run


class Stopwatch:
    """A Progress that adds up the seconds of each kind of work."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def bar(self, title: str, total: int, done: int = 0) -> Iterator[Advance]:
        """Measures the work until the bar is closed, under the first word of its title."""
        with self.stage(title.split()[0]):
            yield lambda count, note="": None

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Measures the work until the stage is closed, under its title."""
        started = time.perf_counter()
        yield
        passed = time.perf_counter() - started
        self.seconds[title] = self.seconds.get(title, 0.0) + passed


def main() -> None:
    """Prints where the time of four runs goes, first without stored features, then with them."""
    keep_freed_memory()  # as the command line does, for all that is compared
    if len(sys.argv) != 3 or not DATASETS["pacs"].find(Path(sys.argv[1])):
        sys.stderr.write("Give the folder that holds PACS, and a weights file: left out.\n")
        return
    with tempfile.TemporaryDirectory() as scratch:
        machine = Machine(data_dir=Path(sys.argv[1]), cache_dir=Path(scratch) / "cache")
        for state in ("nothing stored", "features stored"):
            _report(state, machine, Path(scratch) / state)


def _report(state: str, machine: Machine, folder: Path) -> None:
    watch, started, rows = Stopwatch(), time.perf_counter(), []
    for target in DATASETS["pacs"].domains:
        config = RunConfig(
            dataset="pacs",
            targets=(target,),
            algorithm="solo_plus",
            backbone="tf_efficientnet_lite0",
            weights=sys.argv[2],
            freeze_backbone=True,
        )
        run = train_run(config, machine, folder / target, progress=watch)
        records = evaluate_run(run, machine, progress=watch)
        rows.append([target, f"{100 * (mean_accuracy(records, 'target') or 0.0):.1f}"])
    total = time.perf_counter() - started
    parts = watch.seconds | {"the rest": total - sum(watch.seconds.values())}
    shares = [[kind, f"{s:.1f}", f"{100 * s / total:.0f}%"] for kind, s in parts.items()]
    title = f"PACS, solo_plus on frozen features, four targets, {state}: {total:.0f} s"
    sys.stdout.write(table(title, ["work", "seconds", "share"], shares) + "\n")
    sys.stdout.write(table("Accuracy on the target", ["target", "%"], rows) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
