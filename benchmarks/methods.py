"""Every training-time and test-time method beside ERM: a training step and a prediction.

`python -m benchmarks.methods` prints the tables: ResNet-18 with random weights, 64 pixels, 7
classes of 3 domains, steps of 32 images, each method with its defaults. In every round all methods
take turns, and a ratio is the median over rounds of that within a round. Tables of accuracy are at
equal images; the third column says how many steps a method makes in the time of 300 of ERM.

`memo` and `ttt` work image by image: they are measured on two images where the batch has more.
"""

import copy
import statistics
import sys

import torch

from benchmarks.model import NETWORK, build, noise_episode, predictor, updater
from benchmarks.timing import Timing, alternate, milliseconds, ratio, table
from solodg.adapters import ADAPTERS
from solodg.algorithms import ALGORITHMS
from solodg.models.allocator import keep_freed_memory

CLASSES, DOMAINS, BATCH, STEPS = 7, 3, 32, 300
HEADER = ["method", "step", "/ ERM", f"steps in the time of {STEPS} of ERM",
          "prediction, batch 1", "/ ERM", f"batch {BATCH}", "/ ERM"]  # fmt: skip
_BY_IMAGE = ("memo", "ttt")
_FEW = 2


def algorithm_rows(
    size: int = 64, network: str = NETWORK, rounds: tuple[int, int, int] = (5, 15, 5)
) -> list[list[str]]:
    """Measures a training step and predictions of every algorithm; returns the table's rows.

    `rounds` are those of the step and of predictions at batch sizes 1 and 32. What is solved in
    closed form has no step.
    """
    # One image of each class and domain, and as many more as make 32.
    queries = BATCH - DOMAINS * CLASSES
    shown = noise_episode(1, queries, DOMAINS, CLASSES, channels=3, size=size)
    trained = [name for name, kind in ALGORITHMS.items() if not kind.is_closed_form({})]
    work = {name: updater(name, shown, network) for name in trained}
    steps = alternate(work, rounds=rounds[0], warmup=1)
    models = {name: build(name, CLASSES, size, network) for name in ALGORITHMS}
    predictions = []
    for batch, count in zip((1, BATCH), rounds[1:], strict=True):
        x = torch.rand(batch, 3, size, size)
        runs = {name: predictor(model, x) for name, model in models.items()}
        predictions.append(alternate(runs, rounds=count, warmup=1))
    return [
        [
            name,
            *(_step_cells(steps[name], steps["erm"]) if name in steps else ["-"] * 3),
            *(
                cell
                for each in predictions
                for cell in (milliseconds(each[name]), ratio(each[name], each["erm"]))
            ),
        ]
        for name in ALGORITHMS
    ]


def _step_cells(own: Timing, erm: Timing) -> list[str]:
    pairs = zip(erm.rounds, own.rounds, strict=True)
    share = statistics.median(of_erm / of_own for of_erm, of_own in pairs)
    return [milliseconds(own), ratio(own, erm), f"{STEPS * share:.0f}"]


def adapter_rows(
    size: int = 64, network: str = NETWORK, rounds: tuple[int, int] = (9, 3)
) -> list[list[str]]:
    """Measures prediction by every test-time method; returns the rows of the table.

    `rounds` are those at batch sizes 1 and 32.
    """
    found = []
    models = {name: build(name, CLASSES, size, network) for name in ("erm", "ttt")}
    for batch, count in zip((1, BATCH), rounds, strict=True):
        x = torch.rand(batch, 3, size, size)
        few = min(batch, _FEW)
        work = {}
        for name, kind in ADAPTERS.items():
            adapter = kind(copy.deepcopy(models[kind.trained_by or "erm"])).eval()
            work[name] = predictor(adapter, x[:few] if name in _BY_IMAGE else x)
        measured = alternate(work, rounds=count, warmup=1)
        for name, timing in measured.items():
            label = name
            if batch > few and name in _BY_IMAGE:
                timing = Timing([seconds * batch / few for seconds in timing.rounds])
                label += f" ({few} images measured, times {batch // few})"
            cost = ratio(timing, measured["none"])
            found.append([f"batch {batch}", label, milliseconds(timing), cost])
    return found


def main() -> None:
    """Prints the tables of training-time and of test-time methods."""
    keep_freed_memory()  # as the command line does, for all that is compared
    title = "Every algorithm, ResNet-18 at 64 pixels, 7 classes, steps of 32 images of 3 domains"
    sys.stdout.write(table(title, HEADER, algorithm_rows()) + "\n")
    header = ["", "adapter", "prediction", "/ none"]
    sys.stdout.write(table("Every adapter, ResNet-18 at 64 pixels", header, adapter_rows()))


if __name__ == "__main__":
    main()
