"""What the server counts, for Prometheus."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_IMAGES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()  # of one server: tests start several
        ProcessCollector(registry=self.registry)  # memory and processor time
        self.requests = Counter(
            "solodg_requests", "Requests answered.", ["path", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "solodg_request_seconds", "From a request's first byte to its answer's last.", ["path"],
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.batch = Histogram(
            "solodg_batch_images", "Images that went through the model together.",
            buckets=_IMAGES, registry=self.registry,
        )  # fmt: skip
        self.again = Counter(
            "solodg_computed_alone", "Images computed again alone, so that no digit depends on "
            "company.", registry=self.registry,
        )  # fmt: skip
        self.inside = Gauge(
            "solodg_images_inside", "Images taken in and not yet answered.", registry=self.registry
        )

    def computed(self, images: int, again: int) -> None:
        self.batch.observe(images)
        self.again.inc(again)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Measured:
    """Times every request and counts it by path and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self.app, self.metrics, self.paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            # Unknown paths share a name: a stranger must not fill the memory with them.
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - started)
