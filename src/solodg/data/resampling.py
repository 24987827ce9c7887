"""Resizing and rotating images in integers, so that every processor makes the same pixels.

Sums of floats depend on their order, and so on the processor and its libraries; a rounded pixel
then differs here and there. Here a resampling is a sparse matrix of integers: each weight is a
multiple of `2 ** -_BITS`, found by integer division, and sums of integers have no order.
"""

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from solodg.data.images import digest
from solodg.pixels import Pixels

_AXIS_BITS = 15  # of the weights along one axis; those of an image have twice as many
_BITS = 22  # of the final weights: 255 * 2 ** 22 fits into 32 bits
_SUMS_AT_ONCE = 1 << 19  # pixels; their sums stay in the processor's cache


class Resampling:
    """A linear map of images (height, width) to images (size, size)."""

    def __init__(self, weights: Any, size: int) -> None:
        self._weights = weights  # sparse, (size * size, height * width) int32
        self.size = size

    def __call__(self, images: Pixels) -> Pixels:
        """Resamples images: (N, height, width) -> (N, size, size) uint8."""
        out = np.empty((len(images), self.size, self.size), dtype=np.uint8)
        at_once = max(1, _SUMS_AT_ONCE // self.size**2)
        for start in range(0, len(images), at_once):
            part = images[start : start + at_once]
            columns = np.ascontiguousarray(part.reshape(len(part), -1).T, dtype=np.int32)
            sums = self._weights @ columns  # (size * size, B)
            pixels = np.minimum(_rounded(sums, _BITS), 255).astype(np.uint8)
            out[start : start + len(part)] = pixels.T.reshape(-1, self.size, self.size)
        return out

    def key(self) -> str:
        """Returns a hash of the weights: it changes when the pixels would."""
        parts = (self._weights.indptr, self._weights.indices, self._weights.data)
        return digest(b"".join(part.astype("<i8").tobytes() for part in parts))


@cache
def resizing(height: int, width: int, size: int) -> Resampling:
    """Returns the bilinear resizing to (size, size), with an antialias filter where it shrinks."""
    return Resampling(_final(_resized(height, width, size), 2 * _AXIS_BITS), size)


@cache
def rotation(height: int, width: int, angle: int, size: int) -> Resampling:
    """Returns the counter-clockwise rotation by `angle` degrees, as one map to (size, size).

    Images are enlarged before they are rotated, so that the rotation is smooth, then shrunk.
    """
    large = max(size, min(224, 4 * size))
    rotated = _rotated(large, angle) @ _resized(height, width, large)
    rotated.data = _rounded(rotated.data, 2 * _AXIS_BITS)
    return Resampling(_final(_resized(large, large, size) @ rotated, 4 * _AXIS_BITS), size)


def _final(weights: Any, bits: int) -> Any:
    """Rounds weights, multiples of `2 ** -bits`, to those of a `Resampling`."""
    weights.data = _rounded(weights.data, bits - _BITS)
    weights.eliminate_zeros()
    weights.sort_indices()
    return weights.astype(np.int32)


def _rounded(values: NDArray[Any], bits: int) -> NDArray[Any]:
    """Divides by `2 ** bits`; halves are rounded up."""
    return (values + (1 << (bits - 1))) >> bits


def _resized(height: int, width: int, size: int) -> Any:
    """Returns the weights of a resizing, (size * size, height * width) int64, sparse."""
    from scipy import sparse  # late: it takes a moment to import

    rows, columns = _axis_weights(height, size), _axis_weights(width, size)
    return sparse.kron(sparse.csr_array(rows), sparse.csr_array(columns), format="csr")


def _axis_weights(before: int, after: int) -> NDArray[np.int64]:
    """Returns the weights of `before` pixels in each of `after` pixels, (after, before).

    They fall linearly with the distance of the centres to 0 at one pixel, of whichever are the
    larger, and each row sums to about `2 ** _AXIS_BITS`.
    """
    centres_after = (2 * np.arange(after, dtype=np.int64) + 1) * before
    centres_before = (2 * np.arange(before, dtype=np.int64) + 1) * after
    distance = np.abs(centres_after[:, None] - centres_before)  # in pixels / (2 * before * after)
    weights = np.maximum(2 * max(before, after) - distance, 0)
    total = weights.sum(1, keepdims=True)
    rounded: NDArray[np.int64] = ((weights << (_AXIS_BITS + 1)) + total) // (2 * total)
    return rounded


def _rotated(size: int, angle: int) -> Any:
    """Returns the weights of a rotation, (size * size, size * size) int64, sparse.

    Each pixel is interpolated between four; pixels outside the image are 0.
    """
    from scipy import sparse

    # In half-pixels the coordinates are integers. Cosine and sine are rounded so coarsely that the
    # last digits, in which libraries differ, do not count.
    scale = 1 << (_AXIS_BITS - 1)
    cosine, sine = (round(f(math.radians(angle)) * scale) for f in (math.cos, math.sin))
    offset = 2 * np.arange(size, dtype=np.int64) + 1 - size  # from the centre, in half-pixels
    y, x = offset[:, None], offset[None, :]
    row = (sine * x + cosine * y + (size - 1) * scale).ravel()  # times 2 ** _AXIS_BITS
    column = (cosine * x - sine * y + (size - 1) * scale).ravel()
    one = 1 << _AXIS_BITS
    top, left = row >> _AXIS_BITS, column >> _AXIS_BITS
    down, right = row & (one - 1), column & (one - 1)
    taps = [
        (top, left, (one - down) * (one - right)),
        (top, left + 1, (one - down) * right),
        (top + 1, left, down * (one - right)),
        (top + 1, left + 1, down * right),
    ]
    target = np.arange(size * size)
    entries = []
    for i, j, weight in taps:
        inside = (i >= 0) & (i < size) & (j >= 0) & (j < size) & (weight > 0)
        entries.append((weight[inside], target[inside], (i * size + j)[inside]))
    weights, targets, sources = (np.concatenate(parts) for parts in zip(*entries, strict=True))
    return sparse.csr_array((weights, (targets, sources)), shape=(size * size, size * size))
