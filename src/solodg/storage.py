"""Files that survive a crash: atomic writes, locks, JSON lines that are only appended to."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from solodg.errors import UserError


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that a reader, also after a crash, finds the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes a value as indented JSON with sorted keys, atomically."""
    write_atomically(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def read_json(path: Path) -> Any:
    """Reads a JSON file; raises `UserError` if it cannot be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Appends one JSON object as a line."""
    append_lines(path, [value])


def append_lines(path: Path, values: Sequence[Mapping[str, Any]]) -> None:
    """Appends JSON objects as consecutive lines, also while other processes append.

    If a crash has cut off the last line, a line break is added first, so that no other is damaged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(value) + "\n" for value in values).encode()
    with path.open("ab+") as file, _locked(file):
        torn = False
        if file.seek(0, os.SEEK_END) > 0:
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        file.write((b"\n" if torn else b"") + text)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def try_lock(path: Path, *, remove: bool = False) -> Iterator[bool]:
    """Tries to lock a file; yields whether it worked. The end of the process releases the lock.

    With `remove`, the file is removed at the end. All who lock this file must say so then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        if remove and not _is_file_at(path, file):  # its last holder removed it just now
            yield False
            return
        try:
            yield True
        finally:
            if remove:
                path.unlink(missing_ok=True)


def _is_file_at(path: Path, file: BinaryIO) -> bool:
    """Returns whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def hold_lock(path: Path, until: ExitStack) -> bool:
    """Tries to lock a file until the end of `until`; returns whether it worked.

    If it did not, nothing is left open.
    """
    with ExitStack() as attempt:
        if not attempt.enter_context(try_lock(path)):
            return False
        until.push(attempt.pop_all())
        return True


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Waits for the lock of a file and holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file, _locked(file):
        yield


@contextmanager
def _locked(file: BinaryIO) -> Iterator[None]:
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a file of JSON lines without those that a crash cut off; a missing file has none."""
    if not path.is_file():
        return []
    values = []
    for line in path.read_bytes().splitlines():
        try:
            values.append(json.loads(line))
        except ValueError:
            continue
    return values


def write_lines(path: Path, values: list[dict[str, Any]]) -> None:
    """Writes a file of JSON lines, atomically."""
    write_atomically(path, "".join(json.dumps(value) + "\n" for value in values).encode())


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]
) -> None:
    """Writes a safetensors file with a JSON header, atomically."""
    ready = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    write_atomically(path, save(ready, metadata={"header": json.dumps(header)}))


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Reads a safetensors file: its tensors and its JSON header."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("header", "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
