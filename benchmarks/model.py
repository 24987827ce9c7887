"""Whole models: prediction and training step beside the same backbone with a linear classifier.

`python -m benchmarks.model` prints the tables.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.timing import alternate, milliseconds, ratio, table
from solodg.algorithms import ALGORITHMS, Algorithm, build_algorithm
from solodg.models.backbones import build_backbone
from solodg.runs.allocator import keep_freed_memory
from solodg.runs.config import AUTO, RunConfig
from solodg.runs.fit import Schedule, build_optimizer, update
from solodg.runs.open_parts import NORM_FROM_RANDOM, NORM_FROM_WEIGHTS
from solodg.types import Batch, Episode

NETWORK = "resnet18"


def build(name: str, classes: int, size: int, network: str = NETWORK) -> Algorithm:
    """Builds a model that is ready to predict, on a network with random weights."""
    torch.manual_seed(0)
    norm = ALGORITHMS[name].recipes["pretrained"].get("image_norm")
    backbone = build_backbone(
        network, image_size=size, image_norm=NORM_FROM_WEIGHTS if norm == AUTO else norm
    )
    algorithm = build_algorithm(name, backbone, num_classes=classes, num_domains=3).eval()
    y = torch.arange(classes)
    with torch.inference_mode():
        algorithm.finalize([Batch(torch.rand(classes, 3, size, size), y, y * 0)])
    return algorithm


def inference_rows(size: int = 224) -> list[list[str]]:
    """Measures prediction beside ERM; returns the rows of the table."""
    rows = []
    for classes in (7, 345):
        models = {name: build(name, classes, size) for name in ("erm", "solo", "solo_plus")}
        for batch in (1, 64):
            x = torch.rand(batch, 3, size, size)
            runs = {name: predictor(model, x) for name, model in models.items()}
            measured = alternate(runs, rounds=100 if batch == 1 else 7, warmup=3)
            cells = [milliseconds(measured[name]) for name in models]
            ratios = [ratio(measured[name], measured["erm"]) for name in ("solo", "solo_plus")]
            rows.append([f"{classes} classes, batch {batch}", *cells, *ratios])
    return rows


def prediction_rows(
    size: int = 224, network: str = NETWORK, rounds: tuple[int, int] = (30, 3)
) -> list[list[str]]:
    """Measures prediction by every algorithm beside ERM, of 7 classes; returns the table's rows.

    `rounds` are those at batch sizes 1 and 64.
    """
    models = {name: build(name, 7, size, network) for name in ALGORITHMS}
    columns = []
    for batch, count in zip((1, 64), rounds, strict=True):
        x = torch.rand(batch, 3, size, size)
        runs = {name: predictor(model, x) for name, model in models.items()}
        measured = alternate(runs, rounds=count, warmup=1)
        columns.append(
            {n: [milliseconds(t), ratio(t, measured["erm"])] for n, t in measured.items()}
        )
    return [[name, *columns[0][name], *columns[1][name]] for name in ALGORITHMS]


def predictor(model: nn.Module, x: Tensor) -> Callable[[], object]:
    """Returns a function that predicts one batch."""

    def predict() -> None:
        with torch.inference_mode():
            model(x)

    return predict


def step_rows(shown: Episode, network: str = NETWORK, rounds: int = 9) -> list[list[str]]:
    """Measures a whole update for every algorithm that makes steps; returns the table's rows."""
    trained = [name for name, kind in ALGORITHMS.items() if not kind.is_closed_form({})]
    work = {name: updater(name, shown, network) for name in trained}
    measured = alternate(work, rounds=rounds, warmup=2)
    return [
        [name, milliseconds(timing), ratio(timing, measured["erm"])]
        for name, timing in sorted(measured.items(), key=lambda item: item[1].median)
    ]


def mnist_episode(context: int, queries: int, domains: int = 5, classes: int = 10) -> Episode:
    """Returns an episode of noise with the sizes of rotated MNIST."""

    def batch(labels: Tensor, domain: Tensor) -> Batch:
        return Batch(torch.rand(len(labels), 1, 32, 32), labels, domain)

    labels = torch.arange(classes).repeat(context)
    source = batch(
        labels.repeat(domains - 1), torch.arange(domains - 1).repeat_interleave(len(labels))
    )
    own = torch.cat([labels, torch.arange(queries) % classes])
    return Episode(source, batch(own, torch.full_like(own, domains - 1)), len(labels))


def updater(
    name: str, shown: Episode, network: str = NETWORK, *, compiled: bool = False
) -> Callable[[], object]:
    """Returns a function that makes one update, with the method's recipe for random weights."""
    torch.manual_seed(0)
    recipe = ALGORITHMS[name].recipes["random"]
    norm = recipe.get("image_norm")
    backbone = build_backbone(
        network,
        channels=1,
        image_size=32,
        image_norm=NORM_FROM_RANDOM if norm == AUTO else norm,
        pose=recipe.get("pose") == AUTO,
    )
    if compiled:
        backbone.forward = torch.compile(backbone.forward)  # type: ignore[method-assign]
    algorithm = build_algorithm(
        name, backbone, num_classes=10, num_domains=5, **recipe.get("arguments", {})
    ).train()
    optimizer = build_optimizer(algorithm, Schedule(1, 1, 1e-3, 1e-3, 5e-4, 0))
    return lambda: update(algorithm, optimizer, shown)


def main() -> None:
    """Prints the tables of inference and of training steps."""
    keep_freed_memory()  # as the command line does, for all that is compared
    header = ["", "ERM", "solo", "solo_plus", "solo / ERM", "solo_plus / ERM"]
    sys.stdout.write(table("Inference, ResNet-18 at 224 pixels", header, inference_rows()) + "\n")
    title = "Inference of every method, ResNet-18 at 224 pixels, 7 classes"
    header = ["method", "batch 1", "/ ERM", "batch 64", "/ ERM"]
    sys.stdout.write(table(title, header, prediction_rows()) + "\n")
    defaults = RunConfig(dataset="rotated-mnist")
    shown = mnist_episode(defaults.context_images, defaults.batch_size)
    title = (
        f"A whole training step of {len(shown.merged.y)} images, ResNet-18 at 32 pixels, rotated "
        "MNIST"
    )
    sys.stdout.write(table(title, ["method", "time", "/ ERM"], step_rows(shown)))


if __name__ == "__main__":
    main()
