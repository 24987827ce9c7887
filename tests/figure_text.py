"""The text of a figure, and whether a reader can read it."""

import itertools

from matplotlib.figure import Figure
from matplotlib.text import Text


def disorder(figure: Figure) -> list[str]:
    """Texts that lie over another, or outside the figure."""
    width, height = figure.canvas.get_width_height()
    boxes = [(text.get_text(), text.get_window_extent()) for text in _visible(figure)]
    assert len(boxes) >= 2
    found = [
        f"{name!r} is cut off"
        for name, b in boxes
        if b.x0 < -1 or b.y0 < -1 or b.x1 > width + 1 or b.y1 > height + 1
    ]
    for (name, a), (other, b) in itertools.combinations(boxes, 2):
        apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
        if not apart:
            found.append(f"{name!r} lies over {other!r}")
    return found


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in _visible(figure)]


def _visible(figure: Figure) -> list[Text]:
    figure.canvas.draw()
    undrawn = _undrawn(figure)
    return [
        text
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and id(text) not in undrawn
    ]


def _undrawn(figure: Figure) -> set[int]:
    """Labels of ticks that are not drawn: outside the view, or of axes that are switched off."""
    found = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            slack = 1e-6 * (high - low)
            for tick in (*axis.majorTicks, *axis.minorTicks):
                inside = low - slack <= tick.get_loc() <= high + slack
                if not (axes.axison and inside and tick.get_visible()):
                    found |= {id(tick.label1), id(tick.label2)}
    return found
