"""The mean over seeds with its 95% interval."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

LEVEL = 0.95


class MeanInterval(NamedTuple):
    """A mean over seeds with the half width of its 95% interval by Student t."""

    mean: float
    half: float | None  # None: one seed has no interval
    n: int

    @property
    def low(self) -> float:
        """Returns the lower end of the interval."""
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        """Returns the upper end of the interval."""
        return self.mean + (self.half or 0.0)

    def text(self, digits: int = 1) -> str:
        """Formats the mean with the half width of its interval, e.g. `70.2 ± 2.6`."""
        text = f"{self.mean:.{digits}f}"
        return text if self.half is None else f"{text} ± {self.half:.{digits}f}"


def mean_interval(values: Sequence[float]) -> MeanInterval | None:
    """Returns the mean of the values with its interval; None where there is no value."""
    from scipy.special import stdtrit  # late: scipy takes a moment to import

    if not values:
        return None
    n = len(values)
    if n == 1:
        return MeanInterval(values[0], None, 1)
    quantile = float(stdtrit(n - 1, 0.5 + LEVEL / 2))
    half = quantile * statistics.stdev(values) / n**0.5
    return MeanInterval(statistics.mean(values), half, n)
