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
from solodg.progress import Advance
from solodg.runs.allocator import keep_freed_memory
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
        started = time.perf_counter()
        yield lambda count, note="": None
        kind = title.split()[0]
        self.seconds[kind] = self.seconds.get(kind, 0.0) + time.perf_counter() - started


def main() -> None:
    """Prints where the time of four runs on PACS goes, and their accuracies."""
    keep_freed_memory()  # as the command line does, for all that is compared
    if len(sys.argv) != 3 or not DATASETS["pacs"].find(Path(sys.argv[1])):
        sys.stderr.write("Give the folder that holds PACS, and a weights file: left out.\n")
        return
    watch, started, rows = Stopwatch(), time.perf_counter(), []
    with tempfile.TemporaryDirectory() as scratch:
        machine = Machine(data_dir=Path(sys.argv[1]), cache_dir=Path(scratch) / "cache")
        for target in DATASETS["pacs"].domains:
            config = RunConfig(
                dataset="pacs",
                targets=(target,),
                algorithm="solo",
                backbone="tf_efficientnet_lite0",
                weights=sys.argv[2],
                freeze_backbone=True,
            )
            folder = train_run(config, machine, Path(scratch) / target, progress=watch)
            records = evaluate_run(folder, progress=watch)
            rows.append([target, f"{100 * (mean_accuracy(records, 'target') or 0.0):.1f}"])
    total = time.perf_counter() - started
    parts = watch.seconds | {"the rest": total - sum(watch.seconds.values())}
    shares = [[kind, f"{s:.0f}", f"{100 * s / total:.0f}%"] for kind, s in parts.items()]
    sys.stdout.write(
        table(f"PACS, four targets, frozen tf_efficientnet_lite0: {total / 60:.1f} minutes",
              ["work", "seconds", "share"], shares)
        + "\n"
        + table("Accuracy on the target, one seed", ["target", "%"], rows)
    )  # fmt: skip


if __name__ == "__main__":
    main()
