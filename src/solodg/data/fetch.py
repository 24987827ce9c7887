"""Fetches files from several mirrors: continued after a break, and checked by their content.

A file whose checksum is not published is trusted the first time: its checksum is recorded, and a
later one that differs is refused.
"""

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin

from solodg.errors import UserError
from solodg.progress import Progress, Say
from solodg.storage import lock, read_json, write_json

RECORD = "fetched.json"  # of the data folder: SHA-256 of every file that was fetched
_CHUNK = 1024**2
_TRIES = 4  # at one mirror without a new byte in between
_SECONDS = 30.0  # without an answer


@dataclass(frozen=True)
class RemoteFile:
    """A file that is fetched: its name here, its addresses, and its checksum if it is published."""

    name: str
    mirrors: tuple[str, ...]
    checksum: str | None = None  # ALGORITHM:DIGITS, e.g. md5:f68b...


class _WrongFileError(Exception):
    """What a mirror sent is not the file."""


def fetch_file(
    file: RemoteFile,
    folder: Path,
    record: Path,
    progress: Progress,
    say: Say,
    *,
    base: str | None = None,
) -> Path:
    """Returns the path of a file in `folder`; fetches it if it is not there.

    A fetch that broke off is continued. `base` is an address below which the file lies, in place of
    its mirrors. Its SHA-256 is kept in the file `record`, and told to `say`.
    """
    path = folder / file.name
    mirrors = (urljoin(base.rstrip("/") + "/", file.name),) if base else file.mirrors
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / f".{file.name}.lock"):
        if path.is_file():
            _check(path, file, record)
            return path
        failures = []
        for address in mirrors:
            part = _part(path, address, file)
            try:
                _download(address, part, progress)
                _check(part, file, record)
            except _WrongFileError as error:
                part.unlink(missing_ok=True)
                failures.append(f"{address}: {error}")
            except (OSError, http.client.HTTPException, ValueError) as error:
                failures.append(f"{address}: {_reason(error)}")
            else:
                os.replace(part, path)
                break
        else:
            raise UserError(
                f"{file.name} cannot be fetched. {'; '.join(failures)}. Without a network, fetch "
                f"it elsewhere and put it at {path}; what has arrived is kept, and the same "
                "command goes on from there."
            )
        _note(path, file, record, say)
    return path


def _part(path: Path, address: str, file: RemoteFile) -> Path:
    """Returns where the bytes of an unfinished fetch lie.

    Mirrors share them only if the published checksum tells whether they belong together.
    """
    of = "" if file.checksum else hashlib.sha256(address.encode()).hexdigest()[:8] + "."
    return path.with_name(f".{path.name}.{of}part")


def _download(address: str, part: Path, progress: Progress) -> None:
    """Fetches an address into a file, from where it ends; tries again after a broken connection."""
    tries = 0
    while True:
        before = part.stat().st_size if part.is_file() else 0
        try:
            _attempt(address, part, before, progress)
            return
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException):
            now = part.stat().st_size if part.is_file() else 0
            tries = 0 if now > before else tries + 1
            if tries >= _TRIES or (now == 0 and tries):
                raise


def _attempt(address: str, part: Path, start: int, progress: Progress) -> None:
    request = urllib.request.Request(address, headers={"User-Agent": "solodg"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        answer = urllib.request.urlopen(request, timeout=_SECONDS)
    except urllib.error.HTTPError as error:
        size = error.headers.get("Content-Range", "").rpartition("/")[2]
        if error.code == 416 and size == str(start):
            return  # all of it is there
        if error.code == 416:
            part.unlink()  # longer than the file: of something else
            raise ConnectionError("another length than before") from error
        raise
    with answer:
        if answer.headers.get_content_type() == "text/html":
            raise _WrongFileError("it answers with a web page in place of the file")
        continued = answer.status == 206
        left = answer.headers.get("Content-Length")
        total = (start if continued else 0) + int(left or 0)
        with (
            part.open("ab" if continued else "wb") as file,
            progress.bar(f"Fetching {address.rpartition('/')[2]}", total) as advance,
        ):
            advance(start if continued else 0)
            while chunk := answer.read(_CHUNK):
                file.write(chunk)
                advance(len(chunk))
    if left is not None and part.stat().st_size != total:
        raise ConnectionError(f"the connection ended after {part.stat().st_size} of {total} bytes")


def _check(path: Path, file: RemoteFile, record: Path) -> None:
    """Raises an error if a file has another checksum than the published or the recorded one."""
    if file.checksum is not None:
        algorithm, _, digits = file.checksum.partition(":")
        found = _digest(path, algorithm)
        if found != digits:
            raise _wrong(path, file, f"its {algorithm} is {found}, published is {digits}")
        return
    known = _recorded(record).get(file.name)
    found = _digest(path, "sha256")
    if known is not None and found != known:
        raise _wrong(
            path, file, f"its SHA-256 is {found}, and was {known} when it was first fetched"
        )


def _wrong(path: Path, file: RemoteFile, reason: str) -> Exception:
    if path.name == file.name:  # not fetched now
        return UserError(f"{path} is damaged or another file: {reason}. Remove it to fetch it.")
    return _WrongFileError(reason)


def _note(path: Path, file: RemoteFile, record: Path, say: Say) -> None:
    found = _digest(path, "sha256")
    write_json(record, _recorded(record) | {file.name: found})
    if file.checksum is not None:
        how = f"checked by its published {file.checksum.partition(':')[0]}"
    else:
        how = (
            "no checksum is published, so it is trusted this once: compare this one with that of "
            "others; a later one that differs is refused"
        )
    say(f"{path}: {path.stat().st_size:,} bytes, SHA-256 {found} ({how}).")


def _recorded(record: Path) -> dict[str, str]:
    return read_json(record, dict[str, str]) if record.is_file() else {}


def _digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, algorithm).hexdigest()


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"status {error.code}"
    reason = getattr(error, "reason", error)
    return str(reason) or type(error).__name__
