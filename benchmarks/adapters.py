"""What each test-time method costs beside plain inference: ResNet-18 at 224 pixels, 7 classes.

`python -m benchmarks.adapters` prints the table. Each method with its authors' defaults.
"""

import copy
import sys

import torch

from benchmarks.model import build, predictor
from benchmarks.timing import alternate, milliseconds, ratio, table
from solodg.adapters import ADAPTERS
from solodg.allocator import keep_freed_memory


def rows(size: int = 224) -> list[list[str]]:
    found = []
    models = {name: build(name, 7, size) for name in ("erm", "solo", "ttt")}
    for batch, rounds in ((1, 15), (64, 2)):
        x = torch.rand(batch, 3, size, size)
        work = {"ERM": predictor(models["erm"], x), "single-sample": predictor(models["solo"], x)}
        for name, kind in ADAPTERS.items():
            if name != "none" and not (batch > 1 and name in ("memo", "ttt")):  # image by image
                base = copy.deepcopy(models["ttt" if name == "ttt" else "erm"])
                work[f"ERM + {name}"] = predictor(kind(base).eval(), x)
        measured = alternate(work, rounds=rounds, warmup=1)
        for name, timing in measured.items():
            cost = ratio(timing, measured["ERM"])
            found.append([f"batch {batch}", name, milliseconds(timing), cost])
    return found


def main() -> None:
    keep_freed_memory()  # as the command line does, for all that is compared
    header = ["", "method", "time", "/ ERM"]
    sys.stdout.write(table("Test-time methods, ResNet-18 at 224 pixels", header, rows()))
    sys.stdout.write(
        "\nmemo and ttt work image by image: at batch 64 they cost 64 times batch 1.\n"
    )


if __name__ == "__main__":
    main()
