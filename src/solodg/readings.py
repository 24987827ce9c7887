"""Readings: the ways in which a backbone reads one image.

A reading is a view of the image (models/views.py) and the source pixels of image norm
(models/image_norm.py). It is written as `300`, or with its view as `line:300`.
"""

from typing import Any, NamedTuple

from solodg.inference import MAX_READINGS

PLAIN = "plain"
VIEW_NAMES = (PLAIN, "line", "zoom", "flip", "grey")  # models/views.py has a function for each

# How image norm is given and stored: one reading or several; None or 0: off.
ReadingValue = float | str
ImageNorm = ReadingValue | tuple[ReadingValue, ...] | None


class Reading(NamedTuple):
    """One way to read an image."""

    source_pixels: float = 0.0
    view: str = PLAIN

    @classmethod
    def parse(cls, value: ReadingValue) -> "Reading":
        """Reads `300`, "300" or "line:300"; raises `ValueError` for anything else."""
        view, _, number = value.rpartition(":") if isinstance(value, str) else ("", "", value)
        view = view.strip() or PLAIN
        if view not in VIEW_NAMES:
            raise ValueError(f"{value!r}: the views are {', '.join(VIEW_NAMES)}, e.g. line:300")
        try:
            source_pixels = float(number)
        except ValueError:
            raise ValueError(f"{value!r}: a reading is e.g. 300 or line:300") from None
        if not 0 <= source_pixels < float("inf"):
            raise ValueError(f"{value!r}: source pixels must be 0 or more")
        return cls(source_pixels, view)

    @property
    def value(self) -> ReadingValue:
        """Returns the reading as it is stored: a number where the view is plain, else a text."""
        return self.source_pixels if self.view == PLAIN else str(self)

    def __str__(self) -> str:
        number = f"{self.source_pixels:g}"
        return number if self.view == PLAIN else f"{self.view}:{number}"


def parse_readings(value: Any) -> ImageNorm:
    """Reads one reading, or several in a list or in one text: "0,300,line:300".

    Raises `ValueError` for anything else, for the same reading twice, and for too many.
    """
    several = value.split(",") if isinstance(value, str) else value
    if not isinstance(several, list | tuple):
        several = [several]
    readings = [Reading.parse(one) for one in several]
    if not readings or len(set(readings)) < len(readings):
        raise ValueError("give at least one reading, and each once")
    if len(readings) > MAX_READINGS:
        raise ValueError(f"{len(readings)} readings, at most {MAX_READINGS} are allowed")
    values = tuple(reading.value for reading in readings)
    return values[0] if len(values) == 1 else values


def readings_of(image_norm: ImageNorm) -> tuple[Reading, ...]:
    """Returns each reading; an empty tuple where image norm is off."""
    if isinstance(image_norm, tuple):
        return tuple(Reading.parse(value) for value in image_norm)
    return (Reading.parse(image_norm),) if image_norm else ()
