"""The decode budget: how many pixels the server decodes at once, over all requests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class DecodeBudget:
    """Lets threads decode images as long as their pixels, taken together, stay within `capacity`.

    A larger image is decoded too, but alone.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, 0
        self._changed = threading.Condition()
        # Held while waiting, so that small images do not overtake a large one for ever.
        self._turn = threading.Lock()

    @contextmanager
    def reserve(self, pixels: int) -> Iterator[None]:
        """Waits until there is room for so many pixels, and takes it until the end of the block."""
        taken = min(pixels, self.capacity)
        with self._turn, self._changed:
            self._changed.wait_for(lambda: self.used + taken <= self.capacity)
            self.used += taken
        try:
            yield
        finally:
            with self._changed:
                self.used -= taken
                self._changed.notify_all()
