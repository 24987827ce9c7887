"""Measuring on a noisy machine: alternate what is compared, take medians, show the spread."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple


class Timing(NamedTuple):
    """Seconds."""

    median: float
    low: float  # quartiles
    high: float


def alternate(
    candidates: dict[str, Callable[[], object]], *, rounds: int, warmup: int = 2
) -> dict[str, Timing]:
    """Each candidate once per round, in turn, so that a slow minute slows all of them."""
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
    return {name: _summary(values) for name, values in seconds.items()}


def _summary(values: list[float]) -> Timing:
    if len(values) < 2:
        return Timing(values[0], values[0], values[0])
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(statistics.median(values), low, high)


def milliseconds(timing: Timing) -> str:
    spread = f"{1000 * timing.low:.1f}-{1000 * timing.high:.1f}"
    return f"{1000 * timing.median:.1f} ms ({spread})"


def ratio(slow: Timing, fast: Timing) -> str:
    return f"{slow.median / fast.median:.2f}"


def table(title: str, header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, ready for docs/performance.md."""
    lines = [f"### {title}", "", f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"
