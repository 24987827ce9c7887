"""A refusal must reach who is still sending: what is left of the request is read and dropped.

A server that answers and closes while the client is sending cuts the connection, and the client
sees that in place of the reason.
"""

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SECONDS = 5.0


class Draining:
    """Before the first byte of an answer, reads the rest of the request, up to a limit.

    Not for who was too slow already.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        asks_first = any(name == b"expect" for name, _ in scope["headers"])  # sends nothing unasked
        whole = asks_first

        async def watched() -> Message:
            nonlocal whole
            message = await receive()
            whole = whole or not message.get("more_body", False)
            return message

        async def drain() -> None:
            dropped = 0
            while not whole and dropped < self.limit:
                dropped += len((await watched()).get("body", b""))

        async def drained(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] != 408 and not whole:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(drain(), _SECONDS)
            await send(message)

        await self.app(scope, watched, drained)
