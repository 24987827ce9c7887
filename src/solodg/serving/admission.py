"""How many images may be inside at once, so that a crowd is sent away and not piled up."""

from collections.abc import Iterator
from contextlib import contextmanager

from solodg.serving.refusal import Refusal


class House:
    """Counts images from the moment a request comes in until it is answered.

    Belongs to one event loop, so it needs no lock.
    """

    def __init__(self, places: int) -> None:
        self.places, self.taken = places, 0

    @contextmanager
    def visit(self) -> Iterator["Visit"]:
        visit = Visit(self)
        try:
            visit.take(1)  # before its body is read
            yield visit
        finally:
            self.taken -= visit.places


class Visit:
    def __init__(self, house: House) -> None:
        self._house, self.places = house, 0

    def take(self, places: int) -> None:
        if self._house.taken + places > self._house.places:
            raise Refusal(
                429,
                f"{self._house.taken} images are being answered, and no more than "
                f"{self._house.places} are taken in at once: come again.",
                {"Retry-After": "1"},
            )
        self._house.taken += places
        self.places += places
