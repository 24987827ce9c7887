"""Shifts between domains, made by code: each changes a batch of images in one way.

A shift is a function of square images (N, H, H, 3) uint8 and a generator, which draws a strength
for every image. All arithmetic is on integers, so that the same seed gives the same bits on every
processor; only JPEG compression is Pillow's.
"""

import io
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from solodg.data.resampling import Resampling, resizing, rotation
from solodg.data.splits import Ints

Pixels = NDArray[np.uint8]  # (N, H, H, 3)
Shift = Callable[[Pixels, np.random.Generator], Pixels]


def unchanged(images: Pixels, generator: np.random.Generator) -> Pixels:
    """Returns the images as they are."""
    return images


def rotated(degrees: int) -> Shift:
    """Returns a shift that rotates counter-clockwise, by up to 5 degrees more or less.

    Corners get the mean colour of the image's border.
    """

    def shift(images: Pixels, generator: np.random.Generator) -> Pixels:
        angles = degrees + generator.integers(-5, 6, len(images))
        size = images.shape[1]
        result = np.empty_like(images)
        for angle in np.unique(angles):
            rotate = rotation(size, size, int(angle), size)
            rows = np.flatnonzero(angles == angle)
            inside = rotate(np.full((1, size, size), 255, dtype=np.uint8))[..., None]
            fill = _border_colours(images[rows]) * (255 - inside.astype(np.int64)) // 255
            result[rows] = _clipped(_each_colour(rotate, images[rows]) + fill)
        return result

    return shift


def resized(percent: int, offset: int = 0) -> Shift:
    """Returns a shift that scales about the centre, then moves by up to `offset` pixels.

    What is outside the image gets the mean colour of its border.
    """

    def shift(images: Pixels, generator: np.random.Generator) -> Pixels:
        full = images.shape[1]
        sizes = full * (percent + generator.integers(-4, 5, len(images))) // 100
        offsets = generator.integers(-offset, offset + 1, (len(images), 2))
        result = np.empty_like(images)
        for size in np.unique(sizes):
            rows = np.flatnonzero(sizes == size)
            small = _each_colour(resizing(full, full, int(size)), images[rows])
            edge = full  # as much room on each side as an image may need
            room = np.empty((len(rows), size + 2 * edge, size + 2 * edge, 3), dtype=np.uint8)
            room[:] = _border_colours(images[rows])
            room[:, edge : edge + size, edge : edge + size] = small
            corner = edge + (size - full) // 2 - offsets[rows]  # (N, 2) of what is seen
            places = corner[:, :, None] + np.arange(full)  # (N, 2, H)
            each = np.arange(len(rows))[:, None, None]
            result[rows] = room[each, places[:, 0, :, None], places[:, 1, None, :]]
        return result

    return shift


def inverted(images: Pixels, generator: np.random.Generator) -> Pixels:
    """Returns the negatives of the images."""
    return 255 - images


def low_contrast(images: Pixels, generator: np.random.Generator) -> Pixels:
    """Returns the images with a quarter to two fifths of the contrast, on a grey floor."""
    factor = generator.integers(64, 103, (len(images), 1, 1, 1))
    floor = generator.integers(60, 121, (len(images), 1, 1, 1))
    return _clipped((images * factor >> 8) + floor)


def tinted(images: Pixels, generator: np.random.Generator) -> Pixels:
    """Returns the images with a random gain and a random floor for each colour."""
    gain = generator.integers(76, 257, (len(images), 1, 1, 3))
    floor = generator.integers(0, 61, (len(images), 1, 1, 3))
    return _clipped((images * gain >> 8) + floor)


def blurred(images: Pixels, generator: np.random.Generator) -> Pixels:
    """Returns the images after one to three binomial blurs, each over five pixels."""
    times = generator.integers(1, 4, len(images))
    blurs = [images.astype(np.int64)]
    for _ in range(3):
        blurs.append(_smoothed(blurs[-1]))
    return np.stack(blurs)[times, np.arange(len(images))].astype(np.uint8)


def noisy(images: Pixels, generator: np.random.Generator) -> Pixels:
    """Adds noise, a sum of four uniform numbers, with a standard deviation of 30 to 50."""
    reach = generator.integers(26, 44, (len(images), 1, 1, 1))
    noise = generator.integers(-256, 257, (4, *images.shape)).sum(0)
    return _clipped(images + (noise * reach >> 8))


def compressed(images: Pixels, generator: np.random.Generator) -> Pixels:
    """Returns the images after JPEG compression of quality 5 to 11."""
    qualities = generator.integers(5, 12, len(images))
    result = np.empty_like(images)
    for row, quality in enumerate(qualities):  # the codec takes one image at a time
        file = io.BytesIO()
        Image.fromarray(images[row]).save(file, "JPEG", quality=int(quality))
        result[row] = np.asarray(Image.open(file).convert("RGB"))
    return result


def coarse(pixels: int) -> Shift:
    """Returns a shift that leaves a resolution of so many pixels a side."""

    def shift(images: Pixels, generator: np.random.Generator) -> Pixels:
        full = images.shape[1]
        small = _each_colour(resizing(full, full, pixels), images)
        return _each_colour(resizing(pixels, pixels, full), small)

    return shift


def on_gradient(images: Pixels, generator: np.random.Generator) -> Pixels:
    """Puts the object on a gradient between two colours, in one of eight directions."""
    ramp = _slopes(images, generator)
    ramp = ramp - ramp.min((1, 2), keepdims=True)
    share = (ramp * 256 // ramp.max((1, 2), keepdims=True))[..., None]  # (N, H, W, 1)
    ends = generator.integers(0, 201, (2, len(images), 1, 1, 3))
    return _composed(images, (ends[0] * share + ends[1] * (256 - share)) >> 8)


def on_stripes(images: Pixels, generator: np.random.Generator) -> Pixels:
    """Puts the object on coloured stripes, in one of eight directions."""
    width, phase = generator.integers((5, 0), (13, 12), (len(images), 2)).T[:, :, None, None]
    bright = (_slopes(images, generator) + phase) // width % 2  # (N, H, W)
    colour = generator.integers(60, 201, (len(images), 1, 1, 3))
    return _composed(images, bright[..., None] * colour)


def on_texture(images: Pixels, generator: np.random.Generator) -> Pixels:
    """Puts the object on smooth random blobs of colour."""
    grids = generator.integers(0, 256, (len(images), 10, 10, 3)).astype(np.uint8)
    return _composed(images, _each_colour(resizing(10, 10, images.shape[1]), grids))


def _each_colour(change: Resampling, images: Pixels) -> Pixels:
    """Resamples the three colours of images (N, H, H, 3)."""
    grey = np.ascontiguousarray(images.transpose(0, 3, 1, 2)).reshape(-1, *images.shape[1:3])
    changed = change(grey)
    return changed.reshape(len(images), 3, change.size, change.size).transpose(0, 2, 3, 1)


def _border_colours(images: Pixels) -> Ints:
    """Returns the mean colour of the outermost pixels of each image, (N, 1, 1, 3)."""
    sides = [images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1]]
    border = np.concatenate(sides, axis=1).astype(np.int64)  # (N, 4 H, 3)
    means: Ints = border.sum(1) // border.shape[1]
    return means[:, None, None]


def _smoothed(images: Ints) -> Ints:
    """Blurs (N, H, W, C) by the binomial filter 1 4 6 4 1 in both directions."""
    for axis in (1, 2):
        edges = [(2, 2) if a == axis else (0, 0) for a in range(4)]
        wide = np.moveaxis(np.pad(images, edges, mode="edge"), axis, 0)
        size = images.shape[axis]
        parts = [wide[i : i + size] * w for i, w in enumerate((1, 4, 6, 4, 1))]
        images = np.moveaxis(np.sum(parts, axis=0) + 8 >> 4, 0, axis)
    return images


def _composed(images: Pixels, background: NDArray[np.integer]) -> Pixels:
    """Puts the bright parts of dark images, or the middle of others, on a background."""
    if images[:, [0, 0, -1, -1], [0, -1, 0, -1]].mean() < 16:  # dark corners: ink on black
        share = np.minimum(images.max(3, keepdims=True).astype(np.int64) * 3 // 2, 256)
    else:
        size = images.shape[1]
        squares = _axis(size)[:, None] ** 2 + _axis(size)[None, :] ** 2  # in half pixels
        share = np.clip((3 * size // 4) ** 2 - squares + 128, 0, 256)[None, ..., None]
    return _clipped((images * share + background * (256 - share)) >> 8)


def _slopes(images: Pixels, generator: np.random.Generator) -> Ints:
    """Draws a plane for each image, rising in one of eight directions, (N, H, W)."""
    choices = np.array([(0, 2), (1, 2), (2, 2), (2, 1), (2, 0), (2, -1), (2, -2), (1, -2)])
    down, right = choices[generator.integers(0, len(choices), len(images))].T[:, :, None, None]
    axis = _axis(images.shape[1])
    slopes: Ints = down * axis[:, None] + right * axis
    return slopes


def _axis(size: int) -> Ints:
    """Returns the places (size,) of pixels from the middle, in half pixels."""
    return 2 * np.arange(size) - (size - 1)


def _clipped(values: Ints) -> Pixels:
    return np.clip(values, 0, 255).astype(np.uint8)
