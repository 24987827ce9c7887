"""The admission limit: how many images and bytes the server holds; further requests get a 429."""

from collections.abc import Iterator
from contextlib import contextmanager

from solodg.serving.request_error import RequestError


class AdmissionLimit:
    """Counts images and bytes from the arrival of their request until its response.

    It belongs to one event loop, so it needs no lock.
    """

    def __init__(self, capacity: int, max_bytes: int) -> None:
        self.capacity, self.used = capacity, 0
        self.max_bytes, self.used_bytes = max_bytes, 0

    @contextmanager
    def admit(self) -> Iterator["Slots"]:
        """Admits a request with one image, before its body is read; frees its slots at the end."""
        slots = Slots(self)
        try:
            slots.take(1)
            yield slots
        finally:
            self.used -= slots.count
            self.used_bytes -= slots.bytes


class Slots:
    """The slots that one request holds, one for each image, and the bytes that it has sent."""

    def __init__(self, limit: AdmissionLimit) -> None:
        self._limit, self.count, self.bytes = limit, 0, 0

    def take(self, count: int) -> None:
        """Takes `count` more slots; raises `RequestError` (429) where there are not enough."""
        if self._limit.used + count > self._limit.capacity:
            raise _full(f"{self._limit.used} images", f"{self._limit.capacity}")
        self._limit.used += count
        self.count += count

    def take_bytes(self, count: int) -> None:
        """Counts `count` more bytes; raises `RequestError` (429) where all requests have too many.

        A request that is alone is always admitted: other limits bound its bytes.
        """
        held = self._limit.used_bytes
        if held > self.bytes and held + count > self._limit.max_bytes:
            raise _full(f"{held:,} bytes of requests", f"{self._limit.max_bytes:,}")
        self._limit.used_bytes += count
        self.bytes += count


def _full(held: str, most: str) -> RequestError:
    return RequestError(
        429,
        f"the server holds {held} and admits at most {most} at once: try again later.",
        {"Retry-After": "1"},
    )
