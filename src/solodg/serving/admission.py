"""The admission limit: how many images the server holds at once; further requests get a 429."""

from collections.abc import Iterator
from contextlib import contextmanager

from solodg.serving.request_error import RequestError


class AdmissionLimit:
    """Counts images from the arrival of their request until its response.

    It belongs to one event loop, so it needs no lock.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, 0

    @contextmanager
    def admit(self) -> Iterator["Slots"]:
        """Admits a request with one image, before its body is read; frees its slots at the end."""
        slots = Slots(self)
        try:
            slots.take(1)
            yield slots
        finally:
            self.used -= slots.count


class Slots:
    """The slots that one request holds, one for each image."""

    def __init__(self, limit: AdmissionLimit) -> None:
        self._limit, self.count = limit, 0

    def take(self, count: int) -> None:
        """Takes `count` more slots; raises `RequestError` (429) where there are not enough."""
        if self._limit.used + count > self._limit.capacity:
            raise RequestError(
                429,
                f"the server holds {self._limit.used} images and admits at most "
                f"{self._limit.capacity} at once: try again later.",
                {"Retry-After": "1"},
            )
        self._limit.used += count
        self.count += count
