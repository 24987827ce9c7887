"""Progress of long work, and messages to the user: the library reports, the command line shows."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
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

Say = Callable[[str], None]  # a callback that shows one line of text to the user

_LINE_EVERY = 30.0  # seconds between lines where there is no terminal to draw on
_SILENCE = 2.0  # seconds after which work of unknown length says that it goes on


class Advance(Protocol):
    """Reports progress within one piece of work."""

    def __call__(self, count: int, note: str = "") -> None:
        """Reports that `count` more are done; `note` describes the state."""


class Progress(Protocol):
    """Shows how far long work has come."""

    def bar(self, title: str, total: int, done: int = 0) -> AbstractContextManager[Advance]:
        """Opens the display of one piece of work: `done` of `total` are done at the start."""

    def stage(self, title: str) -> AbstractContextManager[None]:
        """Shows work whose length is not known, if it takes more than two seconds."""


class NoProgress:
    """Shows nothing."""

    @contextmanager
    def bar(self, title: str, total: int, done: int = 0) -> Iterator[Advance]:
        """Returns an `Advance` that does nothing."""
        yield lambda count, note="": None

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Shows nothing."""
        yield


class BarProgress:
    """Draws a bar on a terminal; elsewhere writes lines: at the start, every 30 s, at the end."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stderr)

    def bar(self, title: str, total: int, done: int = 0) -> AbstractContextManager[Advance]:
        """Opens a bar, or the lines that take its place where there is no terminal."""
        if self.console.is_terminal:
            return self._drawn(title, total, done)
        return self._written(title, total, done)

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Writes a line after two seconds, then every 30 s, and one at the end if it wrote any."""
        started, ended = time.monotonic(), threading.Event()

        def write(text: str) -> None:
            self.console.print(f"{title}: {text}", highlight=False, markup=False)

        def watch() -> None:
            wait = _SILENCE
            while not ended.wait(wait):
                write(f"{time.monotonic() - started:.0f} s so far")
                wait = _LINE_EVERY

        watcher = threading.Thread(target=watch, name=title, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
        if time.monotonic() - started > _SILENCE:
            write(f"done in {time.monotonic() - started:.0f} s.")

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
        started = written = time.monotonic()
        last = ""

        def write(text: str) -> None:
            self.console.print(f"{title}: {text}", highlight=False, markup=False)

        def advance(count: int, note: str = "") -> None:
            nonlocal done, last, written
            done, last = done + count, note or last
            now = time.monotonic()
            if now - written > _LINE_EVERY:
                written = now
                write(f"{done} of {total}, {now - started:.0f} s. {last}".rstrip())

        write(f"{done} of {total}")
        yield advance
        write(f"done in {time.monotonic() - started:.0f} s. {last}".rstrip())


def stderr_output(verbose: bool) -> tuple[Progress, Say]:
    """Returns what shows progress and messages on stderr; nothing is shown if not `verbose`."""
    if not verbose:
        return NoProgress(), lambda text: None
    # Without markup, since names of files and classes may contain square brackets.
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    return BarProgress(console), console.print
