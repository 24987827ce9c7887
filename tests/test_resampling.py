"""Resampling in integers: the same bits on every processor, and what floats would make."""

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from solodg.data import DATASETS, Loading
from solodg.data.resampling import resizing, rotation
from solodg.data.rotation import ANGLES
from test_rotated import idx_folder

# Fingerprints of one data set of each kind, as every processor must compute them.
FINGERPRINTS = {
    "rotated-mnist, 28 pixels": "7a3861ba768fe5f1",
    "rotated-mnist, 96 pixels": "c6b96a630fd9d59f",
    "toy, 1 channel": "0a3f0711d34c4cf3",
    "toy, 3 channels": "2d729a5bb18a5eb8",
}
# An old processor, for each library that chooses its instructions.
OLD_PROCESSOR = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OPENBLAS_CORETYPE": "Prescott",
    "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F AVX512CD AVX512_SKX",
}


def fingerprints(folder: Path) -> dict[str, str]:
    def load(name: str, size: int, channels: int) -> str:
        loading = Loading(folder, size, channels, train_images=40)
        return DATASETS[name].load(loading).fingerprint()

    return {
        "rotated-mnist, 28 pixels": load("rotated-mnist", 28, 1),
        "rotated-mnist, 96 pixels": load("rotated-mnist", 96, 1),
        "toy, 1 channel": load("toy", 32, 1),
        "toy, 3 channels": load("toy", 32, 3),
    }


def test_every_processor_makes_the_same_data(tmp_path: Path) -> None:
    idx_folder(tmp_path / "mnist", train=300)
    script = f"from test_resampling import *; print(fingerprints(Path({str(tmp_path)!r})))"
    old = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=Path(__file__).parent, env=os.environ | OLD_PROCESSOR,
        capture_output=True, text=True,
    )  # fmt: skip
    assert fingerprints(tmp_path) == FINGERPRINTS
    assert old.stdout == f"{FINGERPRINTS}\n", old.stderr


def axis_by_hand(before: int, after: int) -> list[list[int]]:
    """Triangular weights in Python's integers, in units of 2 ** -15."""
    weights = []
    for i in range(after):
        row = [
            max(0, 2 * max(before, after) - abs((2 * i + 1) * before - (2 * j + 1) * after))
            for j in range(before)
        ]
        weights.append([(2 * w * 2**15 + sum(row)) // (2 * sum(row)) for w in row])
    return weights


def resize_by_hand(image: list[list[int]], size: int) -> list[list[int]]:
    """Resizes values in Python's integers; the result has 30 more bits."""
    rows, columns = axis_by_hand(len(image), size), axis_by_hand(len(image[0]), size)
    return [
        [
            sum(
                rows[i][k] * columns[j][m] * image[k][m]
                for k in range(len(image)) if rows[i][k]
                for m in range(len(image[0])) if columns[j][m]
            )
            for j in range(size)
        ]
        for i in range(size)
    ]  # fmt: skip


def half_up(value: int, bits: int) -> int:
    return (value + 2 ** (bits - 1)) // 2**bits


def rotate_by_hand(image: list[list[int]], angle: int, size: int) -> list[list[int]]:
    """One pixel's share in every pixel of the result, in units of 2 ** -22, summed over pixels."""
    height, width, large = len(image), len(image[0]), 4 * size
    scale = 2**14
    cosine = round(math.cos(math.radians(angle)) * scale)
    sine = round(math.sin(math.radians(angle)) * scale)
    total = [[0] * size for _ in range(size)]
    for k in range(height):
        for m in range(width):
            single = [[int((a, b) == (k, m)) for b in range(width)] for a in range(height)]
            enlarged = resize_by_hand(single, large)
            turned = [[0] * large for _ in range(large)]
            for i in range(large):
                for j in range(large):
                    x, y = 2 * j + 1 - large, 2 * i + 1 - large
                    top, down = divmod(sine * x + cosine * y + (large - 1) * scale, 2**15)
                    left, right = divmod(cosine * x - sine * y + (large - 1) * scale, 2**15)
                    value = 0
                    for a, weight_a in ((top, 2**15 - down), (top + 1, down)):
                        for b, weight_b in ((left, 2**15 - right), (left + 1, right)):
                            if 0 <= a < large and 0 <= b < large:
                                value += weight_a * weight_b * enlarged[a][b]
                    turned[i][j] = half_up(value, 30)
            shrunk = resize_by_hand(turned, size)
            for i in range(size):
                for j in range(size):
                    total[i][j] += half_up(shrunk[i][j], 60 - 22) * image[k][m]
    return [[min(half_up(v, 22), 255) for v in row] for row in total]


@pytest.mark.parametrize("angle", [0, 15, 60])
def test_a_rotation_is_that_of_a_slow_reference_in_integers(angle: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (4, 5), dtype=np.uint8)
    got = rotation(4, 5, angle, 3)(image[None])[0]
    assert got.tolist() == rotate_by_hand(image.tolist(), angle, 3)


@pytest.mark.parametrize("size", [3, 4, 9])
def test_a_resizing_is_that_of_a_slow_reference_in_integers(size: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (4, 5), dtype=np.uint8)
    sums = [[half_up(v, 30) for v in row] for row in resize_by_hand(image.tolist(), size)]
    assert resizing(4, 5, size)(image[None])[0].tolist() == sums


def test_rounded_cosines_do_not_depend_on_the_last_digit_of_a_library() -> None:
    for angle in ANGLES:
        for value in (math.cos(math.radians(angle)), math.sin(math.radians(angle))):
            scaled = value * 2**14
            assert abs(scaled - math.floor(scaled) - 0.5) > 1e-6


def in_floats(images: Tensor, angle: int, size: int) -> Tensor:
    """Enlarges, rotates and shrinks images by torch: (N, H, W) -> (N, size, size)."""
    large = max(size, min(224, 4 * size))
    cosine, sine = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    matrix = torch.tensor([[cosine, -sine, 0.0], [sine, cosine, 0.0]])
    x = F.interpolate(images[:, None], size=(large, large), mode="bilinear", align_corners=False)
    grid = F.affine_grid(matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    x = F.grid_sample(x, grid, align_corners=False)
    return F.interpolate(x, size=(size, size), mode="bilinear", antialias=True)[:, 0].round()


@pytest.mark.parametrize("size", [8, 28, 32, 96, 224])
@pytest.mark.parametrize("angle", [15, 90])
def test_a_rotation_is_within_one_grey_level_of_floats(size: int, angle: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    expected = in_floats(torch.from_numpy(images).float(), angle, size)
    difference = (torch.from_numpy(rotation(28, 28, angle, size)(images)) - expected).abs()
    assert difference.max() <= 1
    assert difference.mean() < 0.05


@pytest.mark.parametrize(("before", "size"), [(28, 32), (32, 28), (32, 16), (28, 96)])
def test_a_resizing_is_within_one_grey_level_of_floats(before: int, size: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, before, before), dtype=np.uint8)
    floats = torch.from_numpy(images)[:, None].float()
    expected = F.interpolate(floats, size=(size, size), mode="bilinear", antialias=True)[:, 0]
    got = torch.from_numpy(resizing(before, before, size)(images))
    assert (got - expected.round()).abs().max() <= 1


def test_white_stays_white_and_black_stays_black() -> None:
    for level in (0, 255):
        image = np.full((2, 28, 28), level, dtype=np.uint8)
        for size in (7, 28, 32, 224):
            assert (resizing(28, 28, size)(image) == level).all()
            assert (rotation(28, 28, 30, size)(image)[:, size // 2, size // 2] == level).all()


def test_many_images_at_once_are_resampled_as_each_alone() -> None:
    images = np.random.default_rng(0).integers(0, 256, (30, 28, 28), dtype=np.uint8)
    turn = rotation(28, 28, 45, 224)  # 30 images are several parts
    alone = b"".join(turn(image[None]).tobytes() for image in images)
    assert hashlib.sha256(turn(images).tobytes()).digest() == hashlib.sha256(alone).digest()
