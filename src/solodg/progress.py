"""Progress of long work, shown or not: library code reports, the command line draws."""

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichBars

_LINE_EVERY = 30.0  # seconds between lines where there is no terminal to draw on


class Advance(Protocol):
    """How many more are done, and a word on the state."""

    def __call__(self, count: int, note: str = "") -> None: ...


class Progress(Protocol):
    def bar(self, title: str, total: int, done: int = 0) -> AbstractContextManager[Advance]: ...


class NoProgress:
    """Says nothing."""

    @contextmanager
    def bar(self, title: str, total: int, done: int = 0) -> Iterator[Advance]:
        yield lambda count, note="": None


class BarProgress:
    """A bar on a terminal; elsewhere a line at the start, now and then, and at the end."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stderr)

    def bar(self, title: str, total: int, done: int = 0) -> AbstractContextManager[Advance]:
        if self.console.is_terminal:
            return self._drawn(title, total, done)
        return self._written(title, total, done)

    @contextmanager
    def _drawn(self, title: str, total: int, done: int) -> Iterator[Advance]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with RichBars(*columns, console=self.console) as bars:
            task = bars.add_task(title, total=total, completed=done, note="")
            last = ""

            def advance(count: int, note: str = "") -> None:
                nonlocal last
                last = note or last
                bars.update(task, advance=count, note=last)

            yield advance

    @contextmanager
    def _written(self, title: str, total: int, done: int) -> Iterator[Advance]:
        started = spoken = time.monotonic()
        last = ""

        def say(text: str) -> None:
            self.console.print(f"{title}: {text}", highlight=False, markup=False)

        def advance(count: int, note: str = "") -> None:
            nonlocal done, last, spoken
            done, last = done + count, note or last
            now = time.monotonic()
            if now - spoken > _LINE_EVERY:
                spoken = now
                say(f"{done} of {total}, {now - started:.0f} s. {last}".rstrip())

        say(f"{done} of {total}")
        yield advance
        say(f"done in {time.monotonic() - started:.0f} s. {last}".rstrip())
