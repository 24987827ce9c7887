"""Files of JSON lines, which are only appended to. Each line holds its own checksum."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from solodg.errors import UserError
from solodg.progress import Say
from solodg.storage.files import locked, read_regular, write_atomically
from solodg.storage.json_files import object_text, parse_object

Line = dict[str, Any]


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Appends one JSON object as a line."""
    append_lines(path, [value])


def append_lines(path: Path, values: Sequence[Mapping[str, Any]]) -> None:
    """Appends JSON objects as consecutive lines, also while other processes append.

    If a crash has cut off the last line, a line break is added first, so that no other is damaged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = b"".join(object_text(value) for value in values)
    with path.open("ab+") as file, locked(file):
        torn = False
        if file.seek(0, os.SEEK_END) > 0:
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        file.write((b"\n" if torn else b"") + text)
        file.flush()
        os.fsync(file.fileno())


def write_lines(path: Path, values: Sequence[Mapping[str, Any]]) -> None:
    """Writes a file of JSON lines, atomically."""
    write_atomically(path, b"".join(object_text(value) for value in values))


def read_lines(
    path: Path,
    say: Say = lambda text: None,
    *,
    fits: Callable[[Line], bool] = lambda line: True,
) -> list[Line]:
    """Reads the lines of a file; a missing file has none.

    Lines that a crash cut off, that were changed since, or that `fits` refuses, are left out;
    `say` gets their number.
    """
    if not path.exists():
        return []
    found = [parse_line(line) for line in raw_lines(path)]
    values = [line for line in found if line is not None and fits(line)]
    if len(values) < len(found):
        say(f"{path}: {len(found) - len(values)} damaged line(s) of {len(found)} left out.")
    return values


def raw_lines(path: Path) -> list[bytes]:
    """Returns the lines of a file as they are, without empty ones at its end."""
    lines = read_regular(path).split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def parse_line(line: bytes) -> Line | None:
    """Returns the object on a line without its checksum; None for a damaged line."""
    try:
        return parse_object(line + b"\n", "the line")[0]
    except UserError:
        return None
