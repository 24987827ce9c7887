"""Images out of a request: a raw body is one, a multipart form holds one or several."""

from typing import NamedTuple

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message

from solodg.serving.refusal import Refusal
from solodg.serving.settings import Settings

FORM, RAW = "multipart/form-data", "application/octet-stream"


class Upload(NamedTuple):
    name: str | None
    content: bytes


async def read_uploads(request: Request, settings: Settings) -> list[Upload]:
    kind = request.headers.get("content-type", RAW).partition(";")[0].strip().lower()
    if kind != FORM and kind != RAW and not kind.startswith("image/"):
        raise Refusal(
            415, f"content type {kind!r}: send {FORM}, or one image as image/... or {RAW}."
        )
    _check_length(request, settings.max_bytes)
    limited = _limited(request, settings.max_bytes)
    if kind == FORM:
        uploads = await _from_form(limited, settings.max_images)
    else:
        uploads = [Upload(None, await limited.body())]
    if not uploads:
        raise Refusal(400, "the form holds no file.")
    return uploads


async def _from_form(request: Request, max_images: int) -> list[Upload]:
    try:
        async with request.form(max_files=max_images, max_fields=0) as form:
            given = [file for _, file in form.multi_items() if isinstance(file, UploadFile)]
            return [Upload(file.filename or None, await file.read()) for file in given]
    except HTTPException as error:
        if "files" in str(error.detail):
            raise Refusal(413, f"a request may hold at most {max_images} images.") from error
        raise Refusal(400, f"the form cannot be read: {error.detail}") from error


def _check_length(request: Request, limit: int) -> None:
    """As announced: what is too long need not be read at all."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_long(limit)


def _limited(request: Request, limit: int) -> Request:
    """As received: a body may come without announcement."""
    received = 0

    async def receive() -> Message:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise _too_long(limit)
        return message

    return Request(request.scope, receive)


def _too_long(limit: int) -> Refusal:
    return Refusal(413, f"a request may hold at most {limit:,} bytes.")
