"""Runs the parts of the torture, prints a line for each, and fails if any of them does."""

import argparse
import contextlib
import importlib
import os
import platform
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torture.tally import Tally

# Seconds after which a part is ended and has failed: half an hour for all of them.
LIMITS = {"kills": 350, "files": 460, "disk": 180, "requests": 500, "load": 80, "large": 150,
          "sigterm": 80}  # fmt: skip
START, END = "<!-- torture: figures of the last run -->", "<!-- torture: end -->"


class Outcome(NamedTuple):
    """What came of one part."""

    name: str
    tally: Tally
    seconds: float

    @property
    def verdict(self) -> str:
        """Returns PASS or FAIL."""
        return "FAIL" if self.tally.failures else "PASS"

    def line(self) -> str:
        """Returns the summary of the part."""
        checks, failed = self.tally.checks, len(self.tally.failures)
        figures = "; ".join(self.tally.figures)
        return (
            f"{self.verdict} {self.name}: {checks} checks, {failed} failed, "
            f"{self.seconds:.0f} s. {figures}"
        )


def main(given: Sequence[str] | None = None) -> int:
    """Runs the given parts, or all; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(given)
    if unknown := set(options.parts) - set(LIMITS):
        parser.error(f"no part {min(unknown)!r}: choose from {', '.join(LIMITS)}.")
    os.environ.pop("SOLODG_TOKEN", None)  # a server would ask for it
    started = time.monotonic()
    print(f"Seed {options.seed}; details of failures go to {options.log}", flush=True)
    options.log.parent.mkdir(parents=True, exist_ok=True)
    from torture.forked import preload

    preload()
    outcomes = []
    options.log.write_text("")
    with options.log.open("a") as Tally.log:
        for name in options.parts or LIMITS:
            print(f"# {name}", file=Tally.log, flush=True)
            outcome = _run(name, options.seed, options.count)
            outcomes.append(outcome)
            print(outcome.line(), flush=True)
    Tally.log = None
    failed = sum(outcome.verdict == "FAIL" for outcome in outcomes)
    total = time.monotonic() - started
    print(f"{'FAIL' if failed else 'PASS'}: {len(outcomes)} parts, {failed} failed, {total:.0f} s.")
    table = figures_table(outcomes, options.seed, total)
    print(f"\n{table}")
    if options.write:
        write_table(options.write, table)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torture", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(LIMITS)}; all")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is random")
    parser.add_argument(
        "--count", type=int, help="kills, flips of a file, levels of a disk, requests, seconds of "
        "load, large requests or stops, by the part; those of the docs without it",
    )  # fmt: skip
    parser.add_argument("--log", type=Path, default=Path("runs/torture.log"), help="of failures")
    parser.add_argument("--write", type=Path, help="a page whose table is replaced by this run's")
    return parser


def _run(name: str, seed: int, count: int | None) -> Outcome:
    part = importlib.import_module(f"torture.{name}")
    tally = Tally()
    started = time.monotonic()
    with _scratch() as scratch:
        try:
            with _time_limit(LIMITS[name]):
                part.torture(tally, scratch, seed, count or part.DEFAULT_COUNT)
        except TimeoutError as error:
            tally.check(False, f"{error}: {traceback.format_exc()}")
        except Exception:
            tally.check(False, f"the torture itself failed: {traceback.format_exc()}")
    return Outcome(name, tally, time.monotonic() - started)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Makes a folder for one part; neither data nor caches of the user are read or written."""
    with tempfile.TemporaryDirectory(prefix="solodg-torture-") as folder:
        os.environ["SOLODG_CACHE"] = os.environ["SOLODG_DATA"] = f"{folder}/user"
        yield Path(folder)


@contextlib.contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in this process once the time is up."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not finished within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def figures_table(outcomes: Sequence[Outcome], seed: int, seconds: float) -> str:
    """Returns the figures of a run in Markdown."""
    from importlib.metadata import version

    day = time.strftime("%Y-%m-%d", time.gmtime())
    rows = [
        f"| {o.name} | {o.verdict} | {o.tally.checks:,} | {len(o.tally.failures):,} | "
        f"{o.seconds:.0f} | {'; '.join(o.tally.figures)} |"
        for o in outcomes
    ]
    where = f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}"
    return "\n".join([
        f"Run of {day} with seed {seed}: {seconds / 60:.0f} minutes on {where}.",
        "",
        "| part | verdict | checks | failed | seconds | figures |",
        "|---|---|---|---|---|---|",
        *rows,
    ])  # fmt: skip


def write_table(page: Path, table: str) -> None:
    """Replaces what stands between the two markers of a page."""
    text = page.read_text()
    if text.count(START) != 1 or text.count(END) != 1:
        raise SystemExit(f"{page} must hold {START!r} and {END!r} once each.")
    head, rest = text.split(START)
    page.write_text(f"{head}{START}\n\n{table}\n\n{END}{rest.split(END)[1]}")
