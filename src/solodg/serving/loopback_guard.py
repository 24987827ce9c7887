"""A server on loopback answers those who mean this machine.

A page from elsewhere can point its own name at 127.0.0.1 and ask in the visitor's browser; such a
request carries that name as its host, and is refused.
"""

import ipaddress

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send


def is_loopback(host: str) -> bool:
    name = host.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class OwnHost:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "localhost")
            if not is_loopback(_without_port(host)):
                answer = JSONResponse(
                    {"error": f"this server is for this machine alone, not for {host!r}."}, 403
                )
                await answer(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0]
    return host.partition(":")[0]
