"""Files as a whole: read within a limit, written so that a crash leaves the old content or the new.

Locks end with the process that holds them.
"""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from solodg.errors import UserError


def read_regular(path: Path, limit: int | None = None) -> bytes:
    """Reads a file of at most `limit` bytes; raises `UserError` if it cannot be read.

    A pipe or a device is refused before it is opened: it may have no end, or wait forever.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"cannot read {path}: it is not a regular file.")
        if limit is not None and found.st_size > limit:
            raise UserError(
                f"cannot read {path}: it has {found.st_size:,} bytes, at most {limit:,} are "
                "expected."
            )
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:  # a null character in the path
        raise UserError(f"cannot read {path}: {error}.") from error


def read_text(path: Path, limit: int | None = None) -> str:
    """Reads a UTF-8 file of at most `limit` bytes; raises `UserError` if it cannot be read."""
    try:
        return read_regular(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}): save it as UTF-8.") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that a reader, also after a crash, finds the old content or the new."""
    with open_atomically(path) as file:
        file.write(content)


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing, which takes the place of `path` at the end.

    Until then, and after an error, a reader finds the old content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
    with path.open("ab") as file, locked(file):
        yield


@contextmanager
def locked(file: BinaryIO) -> Iterator[None]:
    """Waits for the lock of an open file and holds it."""
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
