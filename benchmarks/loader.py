"""Does the model wait for images? Images per second of the loader alone, and its share of a step.

`python -m benchmarks.loader [DATA_DIR]` prints the table; PACS is measured where it is found.
"""

import sys
import time
from pathlib import Path

import torch

from benchmarks.timing import table
from solodg.algorithms import ALGORITHMS, Algorithm
from solodg.data import DATASETS, LabelledImages, Loading
from solodg.data.episodes import EpisodeLoader, EpisodeSampler
from solodg.data.images import ImageFiles
from solodg.data.transforms import AUGMENTATIONS, Augmentation
from solodg.models.allocator import keep_freed_memory
from solodg.models.backbones import build_backbone
from solodg.runs.config import RunConfig
from solodg.runs.fit import Schedule, build_optimizer, update
from solodg.seeding import torch_generator
from solodg.types import Episode


def measure(name: str, target: str, data_dir: Path, steps: int) -> list[str]:
    """Measures loading and training on a dataset; returns its row of the table."""
    spec = DATASETS[name]
    dataset = spec.load(Loading(data_dir, spec.image_size, spec.channels))
    source = dataset.leave_out(spec.default_targets or (target,))
    decode_rate = _decode_rate(source.train)
    defaults = RunConfig(dataset=name)
    sampler = EpisodeSampler(
        source.train, context=defaults.context_images, queries=defaults.batch_size, seed=0
    )
    loader = EpisodeLoader(source.train, sampler)
    images = len(loader.load(0).merged.y)
    alone = _drain(loader, 10)
    backbone = build_backbone("resnet18", channels=spec.channels, image_size=spec.image_size)
    algorithm = ALGORITHMS["solo"](backbone, num_classes=len(source.classes))
    waited, augmented, total = _train(algorithm, loader, AUGMENTATIONS[source.kind], steps)
    return [
        f"{spec.title}, {spec.image_size} pixels",
        decode_rate,
        f"{10 * images / alone:.0f}",
        f"{steps * images / total:.0f}",
        f"{100 * waited / total:.2f}%",
        f"{100 * augmented / total:.1f}%",
    ]


def _decode_rate(train: LabelledImages) -> str:
    """Returns the images per second of the first epoch; later ones read the cache."""
    if not isinstance(train.images, ImageFiles):
        return "no files"
    started = time.perf_counter()
    train.images.bad_images(lambda count: None)
    return f"{len(train) / (time.perf_counter() - started):.0f}"


def _drain(loader: EpisodeLoader, steps: int) -> float:
    started = time.perf_counter()
    for _ in loader.episodes(0, steps):
        pass
    return time.perf_counter() - started


def _train(
    algorithm: Algorithm, loader: EpisodeLoader, augment: Augmentation, steps: int
) -> tuple[float, float, float]:
    """Trains after one step of warm-up.

    Returns the seconds waited for episodes, spent on augmentation, and in all.
    """
    optimizer = build_optimizer(algorithm, Schedule(1, 1, 1e-4, 1e-4, 0.0, 0))
    episodes = loader.episodes(0, steps + 1)
    waited = augmented = started = 0.0
    for step in range(steps + 1):
        if step == 1:
            waited, augmented, started = 0.0, 0.0, time.perf_counter()
        began = time.perf_counter()
        episode = next(episodes)
        got = time.perf_counter()
        generator = torch_generator(0, step)
        halves = (half._replace(x=augment(half.x, generator)) for half in episode[:2])
        ready = Episode(*halves, episode.num_context)
        waited, augmented = waited + got - began, augmented + time.perf_counter() - got
        update(algorithm, optimizer, ready)
    return waited, augmented, time.perf_counter() - started


def main() -> None:
    """Prints the table of loading and training rates."""
    keep_freed_memory()  # as the command line does, for all that is compared
    data_dir = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("data")
    torch.manual_seed(0)
    rows = [measure("rotated-mnist", "", data_dir, steps=40)]
    if DATASETS["pacs"].find(data_dir):
        rows.append(measure("pacs", "sketch", data_dir, steps=4))
    else:
        sys.stderr.write(f"PACS not found in {data_dir}: its row is left out.\n")
    header = ["", "decoding, images/s", "loader alone, images/s", "training, images/s",
              "waiting for the loader", "augmentation"]  # fmt: skip
    sys.stdout.write(table("Data, ResNet-18, default episodes", header, rows))


if __name__ == "__main__":
    main()
