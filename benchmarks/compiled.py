"""Does `torch.compile` pay? Inference and a training step of ResNet-18, beside plain PyTorch.

`python -m benchmarks.compiled` prints the table; it needs a C++ compiler.
"""

import sys
import time
from collections.abc import Callable

import torch

from benchmarks.model import build, noise_episode, predictor, updater
from benchmarks.timing import alternate, milliseconds, ratio, table
from solodg.models.allocator import keep_freed_memory

HEADER = ["", "compiled", "plain", "plain / compiled", "seconds to compile"]


def row(
    title: str, plain: Callable[[], object], compiled: Callable[[], object], rounds: int
) -> list[str]:
    """Measures compiled and plain work in turns; returns their row of the table."""
    started = time.perf_counter()
    compiled()
    seconds = time.perf_counter() - started
    measured = alternate({"compiled": compiled, "plain": plain}, rounds=rounds)
    cells = [milliseconds(measured[name]) for name in ("compiled", "plain")]
    return [title, *cells, ratio(measured["plain"], measured["compiled"]), f"{seconds:.0f}"]


def main() -> None:
    """Prints the table of compiled and plain PyTorch."""
    keep_freed_memory()  # as the command line does, for all that is compared
    rows = []
    model = build("solo", 7, 224)
    for batch, rounds in ((1, 60), (32, 9)):
        x, fast = torch.rand(batch, 3, 224, 224), torch.compile(model)
        title = f"inference at 224 pixels, batch {batch}"
        rows.append(row(title, predictor(model, x), predictor(fast, x), rounds))
    shown = noise_episode(4, 32)
    steps = [updater("solo", shown, compiled=compiled) for compiled in (False, True)]
    rows.append(row("training step at 32 pixels", *steps, rounds=15))
    sys.stdout.write(table("torch.compile, ResNet-18", HEADER, rows))


if __name__ == "__main__":
    main()
