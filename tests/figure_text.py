"""The text of a figure, and whether a reader can read it."""

import itertools

from matplotlib.figure import Figure
from matplotlib.text import Text


def disorder(figure: Figure) -> list[str]:
    """Texts that lie over another, or outside the figure."""
    width, height = figure.canvas.get_width_height()
    boxes = [(text.get_text(), text.get_window_extent()) for text in _visible(figure)]
    assert len(boxes) > 3
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


def _visible(figure: Figure) -> list:
    figure.canvas.draw()
    return [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()
            and not _hidden_tick(t)]  # fmt: skip


def _hidden_tick(text) -> bool:
    """Tick labels of axes that show none (shared, or switched off)."""
    axes = text.axes
    if axes is None:
        return False
    ticks = [*axes.xaxis.get_major_ticks(), *axes.yaxis.get_major_ticks()]
    own = {id(label): tick for tick in ticks for label in (tick.label1, tick.label2)}
    tick = own.get(id(text))
    if not axes.axison:
        return tick is not None
    return tick is not None and not (text.get_visible() and tick.get_visible())
