"""The error of a request that is rejected: sent to the client as JSON, never as a traceback."""


class RequestError(Exception):
    """Rejects a request with an HTTP status, a reason for the client and extra headers."""

    def __init__(self, status: int, reason: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.headers = status, reason, headers or {}
