"""Reads the rest of a request's body before the response starts.

A server that responds and closes while the client is still sending resets the connection, and the
client sees the reset in place of the response.
"""

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SECONDS = 5.0


class BodyDrainingMiddleware:
    """Reads and drops up to `limit` bytes of unread body before a response starts.

    Not before a 408: its client was too slow already.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # A client that expects "100 Continue" sends no body before it is asked to.
        complete = any(name == b"expect" for name, _ in scope["headers"])

        async def watched() -> Message:
            nonlocal complete
            message = await receive()
            complete = complete or not message.get("more_body", False)
            return message

        async def drain() -> None:
            dropped = 0
            while not complete and dropped < self.limit:
                dropped += len((await watched()).get("body", b""))

        async def drained(message: Message) -> None:
            starts = message["type"] == "http.response.start" and message["status"] != 408
            if starts and not complete:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(drain(), _SECONDS)
            await send(message)

        await self.app(scope, watched, drained)
