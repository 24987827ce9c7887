"""The records of plans: one file, only ever appended to, which several runners may share."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, PositiveInt, ValidationError

from solodg.errors import validation_error
from solodg.progress import Say
from solodg.storage import append_lines, read_lines
from solodg.types import Record

RECORDS = "results.jsonl"  # in the output folder of a bench
Key = str  # of a cell


class _Place(BaseModel):
    """The place of a record in its cell: `part` of `parts`."""

    key: Key
    part: int
    parts: PositiveInt


class Results:
    """The records of finished cells (`done`), and why other cells failed (`failed`), by key."""

    def __init__(self, lines: Iterable[dict[str, object]], where: str = "results") -> None:
        parts: dict[Key, dict[int, Record]] = {}
        expected: dict[Key, int] = {}  # number of records
        self.failed: dict[Key, str] = {}
        # Sorted by time, so that a shuffled file gives the same result.
        for line in sorted(lines, key=_time_and_content):
            if "failed" in line:
                self.failed[str(line.get("cell"))] = str(line["failed"])
                continue
            try:
                record = Record.model_validate(line)
                place = _Place.model_validate(record.cell) if record.cell else None
            except ValidationError as error:
                raise validation_error(f"{where}: a line is not a valid record", error) from error
            if place:
                parts.setdefault(place.key, {})[place.part] = record
                expected[place.key] = place.parts
        # A cell whose records are not all there, as after a crash, is run again.
        self.done: dict[Key, list[Record]] = {
            key: [found[i] for i in sorted(found)]
            for key, found in parts.items()
            if len(found) == expected[key]
        }
        self.failed = {key: why for key, why in self.failed.items() if key not in self.done}


def _time_and_content(line: dict[str, object]) -> tuple[str, str]:
    moment = line.get("time")
    return str(moment.get("at", "") if isinstance(moment, dict) else ""), repr(sorted(line.items()))


def read_results(path: Path, say: Say = lambda text: None) -> Results:
    """Reads a file of records; a missing file holds none.

    `say` gets how many damaged lines were left out.
    """
    return Results(read_lines(path, say), str(path))


def append_cell(path: Path, key: Key, records: Sequence[Record]) -> None:
    """Appends all records of a cell at once; each says how many there are."""
    count = len(records)
    append_lines(
        path,
        [
            r.model_copy(update={"cell": {"key": key, "part": i, "parts": count}}).model_dump()
            for i, r in enumerate(records)
        ],
    )


def append_failure(path: Path, key: Key, what: str, error: str) -> None:
    """Appends that a cell failed; `what` names the cell for a person, `error` is the reason."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    append_lines(path, [{"cell": key, "what": what, "failed": error, "time": {"at": at}}])
