"""Files that are whole or absent: atomic writes, and JSON lines that survive a crash."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from solodg.errors import UserError


def write_atomically(path: Path, content: bytes) -> None:
    """A reader, or the next run after a crash, finds the old content or the new, never a part."""
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
    write_atomically(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """One JSON object more."""
    append_lines(path, [value])


def append_lines(path: Path, values: Sequence[Mapping[str, Any]]) -> None:
    """JSON objects more, side by side even if several processes write at once.

    A line cut off by a crash is closed first, so that it stays alone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(value) + "\n" for value in values).encode()
    with path.open("ab+") as file, _alone(file):
        torn = False
        if file.seek(0, os.SEEK_END) > 0:
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        file.write((b"\n" if torn else b"") + text)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Whether this process holds the lock now; it is given back even by a killed process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Wait for the lock and hold it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file, _alone(file):
        yield


@contextmanager
def _alone(file: BinaryIO) -> Iterator[None]:
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines; a line cut off by a crash is left out."""
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
    write_atomically(path, "".join(json.dumps(value) + "\n" for value in values).encode())


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]
) -> None:
    """A safetensors file with a JSON header."""
    ready = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    write_atomically(path, save(ready, metadata={"header": json.dumps(header)}))


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("header", "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
