"""Measuring on a noisy machine: alternate what is compared, take medians, show the spread."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple


class Timing(NamedTuple):
    """Seconds of each round."""

    rounds: list[float]

    @property
    def median(self) -> float:
        """The median over rounds, in seconds."""
        return statistics.median(self.rounds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and third quartile over rounds, in seconds."""
        if len(self.rounds) < 2:
            return self.rounds[0], self.rounds[0]
        low, _, high = statistics.quantiles(self.rounds, n=4, method="inclusive")
        return low, high


def alternate(
    candidates: dict[str, Callable[[], object]], *, rounds: int, warmup: int = 2
) -> dict[str, Timing]:
    """Measures all candidates in turn in every round, so that a slow minute slows all of them."""
    for _ in range(warmup):
        for work in candidates.values():
            work()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, work in candidates.items():
                started = time.perf_counter()
                work()
                seconds[name].append(time.perf_counter() - started)
    finally:
        gc.enable()
    return {name: Timing(values) for name, values in seconds.items()}


def milliseconds(timing: Timing) -> str:
    """Formats a median with its quartiles: `12.3 ms (11.2-16.2)`."""
    low, high = timing.quartiles
    return f"{1000 * timing.median:.1f} ms ({1000 * low:.1f}-{1000 * high:.1f})"


def ratio(slow: Timing, fast: Timing) -> str:
    """Returns the median over rounds of the ratio within a round: a slow minute is in both."""
    pairs = zip(slow.rounds, fast.rounds, strict=True)
    return f"{statistics.median(a / b for a, b in pairs):.2f}"


def table(title: str, header: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table with a title, ready for docs/performance.md."""
    lines = [f"### {title}", "", f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"
