"""Whole models: prediction and training step beside the same backbone with a linear classifier.

`python -m benchmarks.model` prints the tables, of our methods. `benchmarks.methods` has all.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.timing import alternate, milliseconds, ratio, table
from solodg.algorithms import ALGORITHMS, Algorithm, build_algorithm
from solodg.models.allocator import keep_freed_memory
from solodg.models.backbones import build_backbone
from solodg.runs.config import AUTO, RunConfig
from solodg.runs.fit import Schedule, build_optimizer, update
from solodg.runs.open_parts import NORM_FROM_RANDOM, NORM_FROM_WEIGHTS
from solodg.types import Batch, Episode

NETWORK = "resnet18"
OURS = ("erm", "solo", "solo_plus", "solo_code")


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


def predictor(model: nn.Module, x: Tensor) -> Callable[[], object]:
    """Returns a function that predicts one batch."""

    def predict() -> None:
        with torch.inference_mode():
            model(x)

    return predict


def step_rows(shown: Episode, network: str = NETWORK, rounds: int = 9) -> list[list[str]]:
    """Measures a whole update by our methods beside ERM; returns the rows of the table."""
    work = {name: updater(name, shown, network) for name in OURS}
    measured = alternate(work, rounds=rounds, warmup=2)
    return [
        [name, milliseconds(timing), ratio(timing, measured["erm"])]
        for name, timing in sorted(measured.items(), key=lambda item: item[1].median)
    ]


def noise_episode(
    context: int,
    queries: int,
    domains: int = 5,
    classes: int = 10,
    *,
    channels: int = 1,
    size: int = 32,
) -> Episode:
    """Returns an episode of noise; the defaults are the sizes of rotated MNIST."""

    def batch(labels: Tensor, domain: Tensor) -> Batch:
        return Batch(torch.rand(len(labels), channels, size, size), labels, domain)

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
    images = shown.merged
    recipe = ALGORITHMS[name].recipes["random"]
    norm = recipe.get("image_norm")
    backbone = build_backbone(
        network,
        channels=images.x.shape[1],
        image_size=images.x.shape[2],
        image_norm=NORM_FROM_RANDOM if norm == AUTO else norm,
        pose=recipe.get("pose") == AUTO,
    )
    if compiled:
        backbone.forward = torch.compile(backbone.forward)  # type: ignore[method-assign]
    algorithm = build_algorithm(
        name,
        backbone,
        num_classes=int(images.y.max()) + 1,
        num_domains=int(images.domain.max()) + 1,
        **recipe.get("arguments", {}),
    ).train()
    optimizer = build_optimizer(algorithm, Schedule(1, 1, 1e-3, 1e-3, 5e-4, 0))
    return lambda: update(algorithm, optimizer, shown)


def main() -> None:
    """Prints the tables of inference and of training steps."""
    keep_freed_memory()  # as the command line does, for all that is compared
    header = ["", "ERM", "solo", "solo_plus", "solo / ERM", "solo_plus / ERM"]
    sys.stdout.write(table("Inference, ResNet-18 at 224 pixels", header, inference_rows()) + "\n")
    defaults = RunConfig(dataset="rotated-mnist")
    shown = noise_episode(defaults.context_images, defaults.batch_size)
    title = (
        f"A whole training step of {len(shown.merged.y)} images, ResNet-18 at 32 pixels, rotated "
        "MNIST"
    )
    sys.stdout.write(table(title, ["method", "time", "/ ERM"], step_rows(shown)))


if __name__ == "__main__":
    main()
