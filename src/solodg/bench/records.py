"""The records of plans: one append-only file that several runners may share."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import ValidationError

from solodg.errors import UserError
from solodg.storage import append_lines, read_lines
from solodg.types import Record

Key = str


class Results:
    """What is done and what failed, by the key of a cell."""

    def __init__(self, lines: Iterable[dict[str, object]], where: str = "results") -> None:
        parts: dict[Key, dict[int, Record]] = {}
        self.failed: dict[Key, str] = {}
        # In an order of their own, so that a shuffled file says the same.
        for line in sorted((x for x in lines if isinstance(x, dict)), key=_order):
            if "failed" in line:
                self.failed[str(line["cell"])] = str(line["failed"])
                continue
            try:
                record = Record.model_validate(line)
            except ValidationError as error:
                reason = error.errors()[0]
                raise UserError(
                    f"{where}: a line is no record: {reason['loc'][0]}: {reason['msg'].lower()}."
                ) from error
            if record.cell:
                parts.setdefault(record.cell["key"], {})[record.cell["part"]] = record
        # A crash in mid-write may have cut a cell in two: it is run again.
        self.done: dict[Key, list[Record]] = {
            key: [found[i] for i in sorted(found)]
            for key, found in parts.items()
            if len(found) == next(iter(found.values())).cell["parts"]
        }
        self.failed = {key: why for key, why in self.failed.items() if key not in self.done}


def _order(line: dict[str, object]) -> tuple[str, str]:
    moment = line.get("time")
    return str(moment.get("at", "") if isinstance(moment, dict) else ""), repr(sorted(line.items()))


def read_results(path: Path) -> Results:
    return Results(read_lines(path), str(path))


def append_cell(path: Path, key: Key, records: Sequence[Record]) -> None:
    """All records of a cell at once, each saying how many there are."""
    count = len(records)
    append_lines(
        path,
        [
            r.model_copy(update={"cell": {"key": key, "part": i, "parts": count}}).model_dump()
            for i, r in enumerate(records)
        ],
    )


def append_failure(path: Path, key: Key, what: str, error: str) -> None:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    append_lines(path, [{"cell": key, "what": what, "failed": error, "time": {"at": at}}])
