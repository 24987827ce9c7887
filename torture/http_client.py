"""Requests as bytes over a socket: what a well-behaved client library would refuse to send."""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """What came back: a status, or 0 where the connection ended without a whole answer."""

    status: int
    body: bytes
    seconds: float

    def json(self) -> Any:
        """Returns the body as strict JSON: no NaN, no infinity."""
        return json.loads(self.body, parse_constant=_refuse)


class Piece(NamedTuple):
    """Bytes to send, and the seconds to wait after them."""

    content: bytes
    pause: float = 0.0


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def post(body: bytes, content_type: str = "image/png", path: str = "/predict") -> bytes:
    """Returns a well-formed request."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode("latin-1") + body


async def ask(
    host: str, port: int, pieces: Sequence[Piece], seconds: float, half_close: bool = False
) -> Answer:
    """Sends the pieces over a new connection, and returns the first answer.

    The answer is read while pieces are still being sent, since a server may refuse a request by
    its head. `half_close` ends the sending side after the last piece.
    """
    started = time.monotonic()
    status, body = 0, b""
    writer: asyncio.StreamWriter | None = None
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        reader, writer = await asyncio.open_connection(host, port)
        sending = asyncio.create_task(_send(writer, pieces, half_close))
        try:
            status, body = await asyncio.wait_for(_read(reader), seconds)
        except TimeoutError:
            pass
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await sending
    if writer is not None:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return Answer(status, body, time.monotonic() - started)


async def _send(writer: asyncio.StreamWriter, pieces: Sequence[Piece], half_close: bool) -> None:
    for content, pause in pieces:
        writer.write(content)
        await writer.drain()
        if pause:
            await asyncio.sleep(pause)
    if half_close:
        writer.write_eof()


async def _read(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Reads one answer, after any "100 Continue"."""
    status = 100
    head = b""
    while 100 <= status < 200:
        head = await reader.readuntil(b"\r\n\r\n")
        found = re.match(rb"HTTP/1\.1 (\d{3})", head)
        if found is None:
            return 0, head
        status = int(found[1])
    length = re.search(rb"(?i)content-length: *(\d+)", head)
    return status, await (reader.readexactly(int(length[1])) if length else reader.read())
