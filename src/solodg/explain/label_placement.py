"""Places names beside points without overlap; a name that finds no free place is left out."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Box = tuple[float, float, float, float]  # left, bottom, right, top in pixels

_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
_DISTANCES = (0.0, 5.0, 11.0, 19.0)  # in points, beyond the nearest place
_FAR = 11.0  # from here on a line leads to the name


class Name(NamedTuple):
    """A text to place beside its marker."""

    text: str
    point: NDArray[np.float64]  # (2,) of its marker
    colour: str
    weight: str = "normal"
    gap: float = 6.0  # points between the middle of the marker and the name


def place_names(
    axis: Any, names: Sequence[Name], markers: NDArray[np.float64], *, size: float = 7.5
) -> list[Any]:
    """Places `names`, the most important first, and returns those that found a place.

    Names never overlap each other, and cover as few `markers` (N, 2) as possible. The limits of the
    axes must be final.
    """
    figure = axis.figure
    renderer = figure.canvas.get_renderer()
    frame = axis.get_window_extent(renderer)
    points = axis.transData.transform(markers) if len(markers) else np.empty((0, 2))
    unit = figure.dpi / 72
    taken: list[Box] = []
    written = []
    for name in names:
        text = axis.text(0, 0, name.text, color=name.colour, fontsize=size, weight=name.weight,
                         transform=None, ha="left", va="bottom", parse_math=False)  # fmt: skip
        extent = text.get_window_extent(renderer)
        centre = axis.transData.transform(name.point)
        box = _free_place(
            centre, (extent.width, extent.height), name.gap, unit, frame, taken, points
        )
        if box is None:
            text.remove()
            continue
        taken.append(box)
        text.set_transform(axis.transData)
        text.set_position(axis.transData.inverted().transform(box[:2]))
        _draw_leader_line(axis, centre, box, (name.gap + _FAR) * unit, name.colour)
        written.append(text)
    return written


def _free_place(
    centre: NDArray[np.float64],
    size: tuple[float, float],
    gap: float,
    unit: float,
    frame: Any,
    taken: list[Box],
    points: NDArray[np.float64],
) -> Box | None:
    """Returns the first free place that covers no marker, or else the one that covers fewest."""
    width, height = size
    best, fewest = None, len(points) + 1
    for distance in _DISTANCES:
        for right, up in _DIRECTIONS:
            away = (gap + distance) * unit
            x = centre[0] + right * away - width * (1 - right) / 2
            y = centre[1] + up * away - height * (1 - up) / 2
            box = (x, y, x + width, y + height)
            if not _inside(box, frame) or any(_overlap(box, other) for other in taken):
                continue
            covered = int(_covered(box, points).sum())
            if covered < fewest:
                best, fewest = box, covered
            if fewest == 0:
                return best
    return best


def _draw_leader_line(
    axis: Any, centre: NDArray[np.float64], box: Box, far: float, colour: str
) -> None:
    """Draws a thin line to a name that had to go far from its marker."""
    near = np.clip(centre, box[:2], box[2:])
    if np.abs(near - centre).max() < far - 0.5:
        return
    ends = axis.transData.inverted().transform(np.stack([centre, near]))
    axis.plot(*ends.T, color=colour, lw=0.5, alpha=0.7, zorder=1)


def _inside(box: Box, frame: Any) -> bool:
    return bool(
        box[0] >= frame.x0 and box[1] >= frame.y0 and box[2] <= frame.x1 and box[3] <= frame.y1
    )


def _overlap(a: Box, b: Box, gap: float = 1.0) -> bool:
    return a[0] < b[2] + gap and b[0] < a[2] + gap and a[1] < b[3] + gap and b[1] < a[3] + gap


def _covered(box: Box, points: NDArray[np.float64]) -> NDArray[np.bool_]:
    gap = 3.0
    x, y = points[:, 0], points[:, 1]
    covered: NDArray[np.bool_] = (
        (x > box[0] - gap) & (x < box[2] + gap) & (y > box[1] - gap) & (y < box[3] + gap)
    )
    return covered
