"""A request that is not answered, with the reason: JSON for the client, never a traceback."""


class Refusal(Exception):
    def __init__(self, status: int, reason: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.headers = status, reason, headers or {}
