"""What each test-time method costs beside plain inference: ResNet-18 at 224 pixels, 7 classes.

`python -m benchmarks.adapters` prints the table. Each method with its defaults. Those that
work image by image are measured on fewer images than 64, and that is said.
"""

import copy
import sys

import torch

from benchmarks.model import NETWORK, build, predictor
from benchmarks.timing import Timing, alternate, milliseconds, ratio, table
from solodg.adapters import ADAPTERS
from solodg.runs.allocator import keep_freed_memory

_FEW = 2


def rows(
    size: int = 224, network: str = NETWORK, rounds: tuple[int, int] = (15, 2)
) -> list[list[str]]:
    """Measures all test-time methods at batch sizes 1 and 64; returns the rows of the table.

    `rounds` are those at each of the two sizes.
    """
    found = []
    models = {name: build(name, 7, size, network) for name in ("erm", "solo", "solo_plus", "ttt")}
    for batch, count in zip((1, 64), rounds, strict=True):
        x = torch.rand(batch, 3, size, size)
        work = {
            "ERM": predictor(models["erm"], x),
            "single-sample": predictor(models["solo"], x),
            "solo_plus": predictor(models["solo_plus"], x),
        }
        few = min(batch, _FEW)
        for name, kind in ADAPTERS.items():
            if name != "none":
                adapter = kind(copy.deepcopy(models[kind.trained_by or "erm"])).eval()
                by_image = name in ("memo", "ttt")
                work[f"ERM + {name}"] = predictor(adapter, x[:few] if by_image else x)
        measured = alternate(work, rounds=count, warmup=1)
        for name, timing in measured.items():
            if batch > few and name in ("ERM + memo", "ERM + ttt"):
                timing = Timing([seconds * batch / few for seconds in timing.rounds])
                name += f" ({few} images measured, times {batch // few})"
            cost = ratio(timing, measured["ERM"])
            found.append([f"batch {batch}", name, milliseconds(timing), cost])
    return found


def main() -> None:
    """Prints the table of test-time methods."""
    keep_freed_memory()  # as the command line does, for all that is compared
    header = ["", "method", "time", "/ ERM"]
    sys.stdout.write(table("Test-time methods, ResNet-18 at 224 pixels", header, rows()))


if __name__ == "__main__":
    main()
