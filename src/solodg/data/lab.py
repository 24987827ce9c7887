"""A laboratory of domain shifts: digits, clothes and objects, each in seven families of domains.

`digits-colour` are digits whose four domains differ in colour, `objects-rotation` are photographs
whose domains differ by rotation, and so on; the domains of `none` do not differ at all. They tell
where a method helps and where it does harm. Every training image is in one domain; the test images
are shown in all of them. `solodg.data.shifts` makes the domains.
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch

from solodg.data import rotated, shifts
from solodg.data.domains import DomainDataset, Kind
from solodg.data.images import ImageArray
from solodg.data.loading import DatasetSpec, Loading
from solodg.data.splits import TEST, TRAIN, VAL
from solodg.errors import UserError
from solodg.pixels import Pixels
from solodg.seeding import numpy_generator

_SIZE = 32  # pixels a side
_TRAIN, _VAL, _TEST = 1000, 250, 1000  # images of a domain, at most
FAMILIES: dict[str, dict[str, shifts.Shift]] = {
    "rotation": {f"{d:+d}": shifts.rotated(d) for d in (-30, 0, 30, 60)},
    "size": {
        "small": shifts.resized(60),
        "medium": shifts.resized(80),
        "large": shifts.resized(100),
        "moved": shifts.resized(70, offset=6),
    },
    "colour": {
        "plain": shifts.unchanged,
        "inverted": shifts.inverted,
        "low-contrast": shifts.low_contrast,
        "tinted": shifts.tinted,
    },
    "quality": {
        "clean": shifts.unchanged,
        "blurred": shifts.blurred,
        "noisy": shifts.noisy,
        "compressed": shifts.compressed,
    },
    "background": {
        "plain": shifts.unchanged,
        "gradient": shifts.on_gradient,
        "stripes": shifts.on_stripes,
        "texture": shifts.on_texture,
    },
    "resolution": {
        "32": shifts.unchanged,
        "14": shifts.coarse(14),
        "10": shifts.coarse(10),
        "7": shifts.coarse(7),
    },
    "none": dict.fromkeys("abcd", shifts.unchanged),
}


@dataclass(frozen=True)
class _Images:
    """A kind of images: how they are called, found and read."""

    name: str
    title: str
    kind: Kind  # decides the augmentation
    how_to_get: str


_DIGITS = _Images("digits", "Digits", "digit", rotated.ROTATED_MNIST.how_to_get)
_CLOTHES = _Images("clothes", "Clothes", "digit", rotated.ROTATED_FASHION_MNIST.how_to_get)
_OBJECTS = _Images(
    "objects",
    "Objects",
    "photo",
    "Put images of CIFAR-10 into <data-dir>/cifar10-subset.npz: arrays train_x, train_y, test_x, "
    "test_y (images N x 32 x 32 x 3) and classes.",
)
_ARRAYS = "cifar10-subset.npz"


def _pool(images: _Images, loading: Loading) -> tuple[rotated.Pool, tuple[str, ...]]:
    """Returns images (N, 32, 32, 3) with labels, and the names of their classes."""
    if images is _OBJECTS:
        return _objects(loading.data_dir)
    pool, classes = rotated.upright(_rotated_spec(images).name, loading)
    return replace(pool, train=_square(pool.train), test=_square(pool.test)), classes


def _rotated_spec(images: _Images) -> DatasetSpec:
    """Returns the dataset that shows the same digits or clothes rotated."""
    return rotated.ROTATED_MNIST if images is _DIGITS else rotated.ROTATED_FASHION_MNIST


def _square(grey: Pixels) -> shifts.Pixels:
    """Pads grey images (N, 28, 28) to (N, 32, 32, 3)."""
    edge = (_SIZE - grey.shape[1]) // 2
    padded = np.pad(grey, ((0, 0), (edge, edge), (edge, edge)))
    return np.repeat(padded[..., None], 3, axis=3)


@lru_cache(maxsize=1)
def _objects(data_dir: Path) -> tuple[rotated.Pool, tuple[str, ...]]:
    path = data_dir / _ARRAYS
    if not path.is_file():
        raise UserError(f"{_ARRAYS} not found in {data_dir}. {_OBJECTS.how_to_get}")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            train, test = arrays["train_x"], arrays["test_x"]
            labels = [arrays[name].astype(np.int64) for name in ("train_y", "test_y")]
            classes = tuple(str(name) for name in arrays["classes"])
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}. {_OBJECTS.how_to_get}") from error
    return rotated.Pool(train, labels[0], test, labels[1], "cifar10-subset"), classes


def _load(images: _Images, family: str, loading: Loading) -> DomainDataset:
    pool, classes = _pool(images, loading)
    domains = FAMILIES[family]
    generator = numpy_generator(loading.seed, "lab", images.name, family)
    order = generator.permutation(len(pool.train))
    share = len(order) // len(domains)  # of the training images, for each domain
    train = min(loading.train_images or _TRAIN, share * 4 // 5)
    val = min(_VAL, share - train)
    test = generator.permutation(len(pool.test))[:_TEST]
    pixels, labels = [], []
    for number, shift in enumerate(domains.values()):
        own = order[number * share : number * share + train + val]
        pixels.append(shift(np.concatenate([pool.train[own], pool.test[test]]), generator))
        labels.append(np.concatenate([pool.train_labels[own], pool.test_labels[test]]))
    count = len(labels[0])
    split = np.repeat([TRAIN, VAL, TEST], [train, val, len(test)])
    tensor = torch.from_numpy(np.concatenate(pixels).transpose(0, 3, 1, 2).copy())
    return DomainDataset(
        name=f"{images.name}-{family}",
        images=ImageArray(tensor),
        labels=np.concatenate(labels),
        domains=np.repeat(np.arange(len(domains)), count).astype(np.int64),
        classes=classes,
        domain_names=tuple(domains),
        split=np.tile(split, len(domains)).astype(np.int64),
        protocol=f"lab-{train}-train-{val}-val",
        kind=images.kind,
        facts={"origin": pool.origin},
    )


def _find(images: _Images, data_dir: Path) -> str | None:
    if images is _OBJECTS:
        return str(data_dir / _ARRAYS) if (data_dir / _ARRAYS).is_file() else None
    return _rotated_spec(images).find(data_dir)


LAB = tuple(
    DatasetSpec(
        name=f"{images.name}-{family}",
        title=f"{images.title}, domains that differ in {family}"
        if family != "none"
        else f"{images.title}, domains that do not differ",
        domains=tuple(domains),
        load=partial(_load, images, family),
        find=partial(_find, images),
        how_to_get=images.how_to_get,
        channels=3,
        image_size=_SIZE,
        default_targets=(tuple(domains)[-1],),
        takes_train_images=True,
    )
    for images in (_DIGITS, _CLOTHES, _OBJECTS)
    for family, domains in FAMILIES.items()
)
