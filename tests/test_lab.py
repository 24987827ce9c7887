"""The laboratory of shifts: what a domain changes, and what stays the same."""

from pathlib import Path

import numpy as np
import pytest

from solodg.data import DATASETS, Loading, shifts
from solodg.data.lab import FAMILIES, LAB
from solodg.data.splits import TEST, TRAIN
from solodg.errors import UserError

SHIFTS = [(f"{family}-{name}", s) for family, each in FAMILIES.items() for name, s in each.items()]


def photographs(count: int) -> np.ndarray:
    """Returns smooth colourful images (N, 32, 32, 3), unlike ink on black."""
    generator = np.random.default_rng(0)
    grids = generator.integers(40, 256, (count, 8, 8, 3)).astype(np.uint8)
    return grids.repeat(4, axis=1).repeat(4, axis=2)


@pytest.fixture(scope="module")
def digits():
    return DATASETS["digits-colour"].load(
        Loading(Path("nowhere"), image_size=32, channels=3, train_images=100)
    )


@pytest.mark.parametrize(("name", "shift"), SHIFTS, ids=[name for name, _ in SHIFTS])
def test_a_shift_changes_images_by_its_seed_alone(name: str, shift: shifts.Shift) -> None:
    for images in (photographs(6), np.where(photographs(6) > 200, 255, 0).astype(np.uint8)):
        once, again, other = (shift(images, np.random.default_rng(seed)) for seed in (1, 1, 2))
        assert once.shape == images.shape
        assert once.dtype == np.uint8
        np.testing.assert_array_equal(once, again)
        unchanged = shift is shifts.unchanged
        assert np.array_equal(once, images) == unchanged
        drawn = shift not in (shifts.unchanged, shifts.inverted) and "resolution" not in name
        assert np.array_equal(once, other) != drawn


class Middle:
    """Draws the middle of each range, as a generator without chance."""

    def integers(self, low: int, high: int, size: object) -> np.ndarray:
        return np.full(size, (low + high - 1) // 2, dtype=np.int64)


def test_a_rotation_by_ninety_degrees_is_numpys() -> None:
    images = photographs(3)
    turned = shifts.rotated(90)(images, Middle()).astype(int)
    expected = np.rot90(images, axes=(1, 2)).astype(int)
    assert abs(turned - expected).mean() < 12  # resampling smooths edges between squares
    assert abs(turned - np.rot90(images, -1, axes=(1, 2))).mean() > 40


def test_resized_moves_the_object() -> None:
    images = np.zeros((200, 32, 32, 3), dtype=np.uint8)
    images[:, 14:18, 14:18] = 255
    moved = shifts.resized(70, offset=6)(images, np.random.default_rng(0))
    ink = moved[..., 0].astype(float)
    down = (ink.sum(2) * np.arange(32)).sum(1) / ink.sum((1, 2)) - 15.5
    assert down.min() < -4
    assert down.max() > 4
    assert abs(down).max() < 7


def test_no_training_image_is_in_two_domains_and_test_images_are_in_all(digits) -> None:
    assert digits.domain_names == ("plain", "inverted", "low-contrast", "tinted")
    pixels = digits.images.take(np.arange(len(digits.labels))).numpy()
    plain, inverted = (pixels[(digits.domains == d) & (digits.split == TEST)] for d in (0, 1))
    np.testing.assert_array_equal(255 - plain, inverted)
    trained = [
        {row.tobytes() for row in pixels[(digits.domains == d) & (digits.split == TRAIN)]}
        for d in (0, 1)
    ]
    assert len(trained[0]) == 100
    assert not trained[0] & {(255 - np.frombuffer(row, np.uint8)).tobytes() for row in trained[1]}


def test_objects_are_read_from_arrays(tmp_path: Path) -> None:
    loading = Loading(tmp_path, image_size=32, channels=3)
    with pytest.raises(UserError, match="cifar10-subset"):
        DATASETS["objects-none"].load(loading)
    np.savez(
        tmp_path / "cifar10-subset.npz",
        train_x=photographs(200),
        train_y=np.arange(200) % 2,
        test_x=photographs(40),
        test_y=np.arange(40) % 2,
        classes=np.array(["cat", "dog"]),
    )
    dataset = DATASETS["objects-none"].load(loading)
    assert dataset.classes == ("cat", "dog")
    assert dataset.kind == "photo"
    source = dataset.leave_out(["d"])
    assert (len(source.train), len(source.val), len(source.test)) == (3 * 40, 3 * 10, 3 * 40)


def test_there_are_seven_families_of_three_kinds() -> None:
    assert len(LAB) == 21
    assert {spec.name.split("-")[0] for spec in LAB} == {"digits", "clothes", "objects"}
