"""Rejects requests to a loopback server whose Host header names another machine.

A web page can point its own host name at 127.0.0.1 and send requests from its visitor's browser
(DNS rebinding). Such a request carries the page's name as its host.
"""

import ipaddress

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send


def is_loopback(host: str) -> bool:
    """Returns whether a host name or address refers to this machine only."""
    name = host.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class LoopbackGuard:
    """Middleware that responds 403 to requests for any host but this machine."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "localhost")
            if not is_loopback(_without_port(host)):
                reason = f"this server only answers requests to this machine, not to {host!r}."
                response = JSONResponse({"error": reason}, 403)
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0]
    return host.partition(":")[0]
