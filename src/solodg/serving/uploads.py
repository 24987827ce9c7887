"""Reads images from a request: a raw body is one image, a multipart form holds several."""

from collections.abc import Callable
from typing import NamedTuple

from python_multipart.exceptions import FormParserError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message

from solodg.serving.request_error import RequestError
from solodg.serving.settings import ServerSettings

FORM, RAW = "multipart/form-data", "application/octet-stream"


class Upload(NamedTuple):
    """An image file of a request, not yet decoded."""

    name: str | None
    content: bytes


async def read_uploads(
    request: Request, settings: ServerSettings, count_bytes: Callable[[int], None]
) -> list[Upload]:
    """Reads the images of a request, within the limits on its bytes and images.

    `count_bytes` is called with the number of bytes of each piece that arrives.
    """
    kind = request.headers.get("content-type", RAW).partition(";")[0].strip().lower()
    if kind != FORM and kind != RAW and not kind.startswith("image/"):
        raise RequestError(
            415, f"content type {kind!r}: send {FORM}, or one image as image/... or {RAW}."
        )
    _check_length(request, settings.max_bytes)
    limited = _limited(request, settings.max_bytes, count_bytes)
    if kind == FORM:
        uploads = await _from_form(limited, settings.max_images)
    else:
        uploads = [Upload(None, await limited.body())]
    if not uploads:
        raise RequestError(400, "the form holds no file.")
    return uploads


async def _from_form(request: Request, max_images: int) -> list[Upload]:
    try:
        async with request.form(max_files=max_images, max_fields=0) as form:
            given = [file for _, file in form.multi_items() if isinstance(file, UploadFile)]
            return [Upload(file.filename or None, await file.read()) for file in given]
    except HTTPException as error:
        if "files" in str(error.detail):
            raise RequestError(413, f"a request may hold at most {max_images} images.") from error
        raise RequestError(400, f"the form cannot be read: {error.detail}") from error
    except FormParserError as error:  # which newer versions of Starlette turn into the above
        raise RequestError(400, f"the form cannot be read: {error}") from error


def _check_length(request: Request, limit: int) -> None:
    """Rejects a body by its Content-Length, before any of it is read."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise _too_long(limit)


def _limited(request: Request, limit: int, count_bytes: Callable[[int], None]) -> Request:
    """Returns the request with a body that stops at `limit` bytes, whatever its header says."""
    received = 0

    async def receive() -> Message:
        nonlocal received
        message = await request.receive()
        count = len(message.get("body", b""))
        received += count
        if received > limit:
            raise _too_long(limit)
        count_bytes(count)
        return message

    return Request(request.scope, receive)


def _too_long(limit: int) -> RequestError:
    return RequestError(413, f"a request may hold at most {limit:,} bytes.")
