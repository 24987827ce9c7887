"""SVHN -> MNIST: one source domain, house numbers; the unseen target is handwritten digits.

Training needs several source domains: make them with --pseudo-domains (the paper's table 8).
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from solodg.data.domains import DomainDataset
from solodg.data.images import ImageArray
from solodg.data.loading import DatasetSpec, Loading
from solodg.data.resampling import resizing
from solodg.data.rotated import ROTATED_MNIST, upright
from solodg.data.splits import TEST, UNASSIGNED
from solodg.errors import UserError
from solodg.pixels import Pixels

_HOW = (
    "Put train_32x32.mat of http://ufldl.stanford.edu/housenumbers into <data-dir>/svhn, or use "
    "--download. MNIST comes as for rotated-mnist."
)


def _find(data_dir: Path) -> str | None:
    for folder in (data_dir / "svhn", data_dir / "SVHN", data_dir):
        if (folder / "train_32x32.mat").is_file():
            return str(folder)
    return None


def _load(loading: Loading) -> DomainDataset:
    found = _find(loading.data_dir)
    if found is None and loading.download:
        found = _download(loading.data_dir)
    if found is None:
        raise UserError(f"SVHN not found in {loading.data_dir}. {_HOW}")
    from scipy.io import loadmat

    try:
        content = loadmat(Path(found) / "train_32x32.mat")
        labels = content["y"].reshape(-1).astype(np.int64) % 10
        pixels = content["X"].transpose(3, 2, 0, 1)  # (N, 3, 32, 32)
        if pixels.shape[1] != 3 or pixels.dtype != np.uint8 or len(pixels) != len(labels):
            raise ValueError("not the images and labels of SVHN")
    except Exception as error:  # a damaged file: scipy raises errors of any type
        raise UserError(f"cannot read {found}/train_32x32.mat: {error}") from error
    svhn = np.ascontiguousarray(pixels)
    target, _ = upright(ROTATED_MNIST.name, loading)
    mnist = target.test[:, None]
    images = torch.cat([_fit(svhn, loading), _fit(mnist, loading)])
    return DomainDataset(
        name="svhn-mnist",
        images=ImageArray(images),
        labels=np.concatenate([labels, target.test_labels]),
        domains=np.repeat([0, 1], [len(svhn), len(mnist)]).astype(np.int64),
        classes=tuple(str(d) for d in range(10)),
        domain_names=("svhn", "mnist"),
        split=np.repeat([UNASSIGNED, TEST], [len(svhn), len(mnist)]).astype(np.int64),
        protocol="single-source",
        kind="digit",
        facts={"origin": target.origin},
    )


def _fit(images: Pixels, loading: Loading) -> Tensor:
    """Brings (N, C, H, W) images to the channels and size of `loading`, in integers."""
    if loading.channels == 1 and images.shape[1] == 3:
        red, green, blue = images.astype(np.int32).transpose(1, 0, 2, 3)
        grey = (299 * red + 587 * green + 114 * blue + 500) // 1000
        images = grey[:, None].astype(np.uint8)
    count, channels, height, width = images.shape
    size = loading.image_size
    if (height, width) != (size, size):
        flat = resizing(height, width, size)(images.reshape(-1, height, width))
        images = flat.reshape(count, channels, size, size)
    return torch.from_numpy(images).expand(-1, loading.channels, -1, -1).contiguous()


def _download(data_dir: Path) -> str:
    from solodg.torchvision_shim import make_torchvision_importable

    make_torchvision_importable()
    from torchvision.datasets import SVHN

    try:
        SVHN(str(data_dir / "svhn"), split="train", download=True)
    except (OSError, RuntimeError) as error:
        raise UserError(f"cannot download SVHN: {error}. {_HOW}") from error
    return str(data_dir / "svhn")


SVHN_MNIST = DatasetSpec(
    name="svhn-mnist",
    title="SVHN -> MNIST",
    domains=("svhn", "mnist"),
    load=_load,
    find=_find,
    how_to_get=_HOW,
    channels=3,
    image_size=32,
    default_targets=("mnist",),
)
