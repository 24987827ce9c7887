"""JSON files: the one place where JSON is parsed and validated."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

from pydantic import TypeAdapter, ValidationError

from solodg.errors import UserError, validation_error
from solodg.storage.checksum import PLACEHOLDER, damaged, is_sealed, sealed
from solodg.storage.files import read_regular, write_atomically

CHECKSUM = "checksum"  # the key of the checksum in an object
Kind = TypeVar("Kind")
_MAX_BYTES = 64 * 1024**2
_MAX_DEPTH = 64  # lists and objects inside each other


def parse_json(text: str | bytes, name: str) -> Any:
    """Parses JSON; raises `UserError` where it is none, or nested too deeply.

    `name` is what errors call the text.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise UserError(f"{name} is damaged: nested too deeply.") from error
    except ValueError as error:  # also of text that is not UTF-8
        raise UserError(f"{name} is not valid JSON: {error}") from error
    if _is_deep(value):
        raise UserError(f"{name} is damaged: nested more than {_MAX_DEPTH} deep.")
    return value


def parse_object(content: bytes, name: str) -> tuple[dict[str, Any], bool]:
    """Parses a JSON object and verifies its checksum.

    Returns the object without the checksum, and whether it had one.
    """
    has_checksum = is_sealed(content, name)
    value = parse_json(content, name)
    if not isinstance(value, dict):
        raise UserError(f"{name} is damaged: expected an object {{...}}, found {_shown(value)}.")
    if not has_checksum and CHECKSUM in value:
        raise damaged(name)
    return {key: entry for key, entry in value.items() if key != CHECKSUM}, has_checksum


def object_text(value: Mapping[str, Any], *, indent: int | None = None) -> bytes:
    """Returns an object as JSON with a checksum; the keys of an indented one are sorted."""
    entries = {**value, CHECKSUM: PLACEHOLDER}
    text = json.dumps(entries, indent=indent, sort_keys=indent is not None, allow_nan=False)
    return sealed(text.encode() + b"\n")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes an object as indented JSON with sorted keys and a checksum, atomically."""
    write_atomically(path, object_text(value, indent=2))


@overload
def read_json(path: Path, *, checksum_required: bool = False) -> dict[str, Any]: ...
@overload
def read_json(path: Path, kind: type[Kind], *, checksum_required: bool = False) -> Kind: ...


def read_json(path: Path, kind: Any = dict[str, Any], *, checksum_required: bool = False) -> Any:
    """Reads a JSON object, verifies its checksum and validates it as `kind`.

    Raises `UserError` for a file that cannot be read, is damaged, or holds something else. A file
    without a checksum is accepted, as written by earlier versions, unless `checksum_required`.
    """
    value, has_checksum = parse_object(read_regular(path, _MAX_BYTES), str(path))
    if checksum_required and not has_checksum:
        raise damaged(str(path), "it has no checksum")
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        what = f"{path} is damaged or of another version of solodg"
        raise validation_error(what, error) from error


def _is_deep(value: Any) -> bool:
    """Returns whether lists and objects are nested deeper than allowed."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        containers = [entry for entry in level if isinstance(entry, list | dict)]
        if not containers:
            return False
        level = [
            inner
            for entry in containers
            for inner in (entry.values() if isinstance(entry, dict) else entry)
        ]
    return any(isinstance(entry, list | dict) for entry in level)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
