"""Counters and histograms of the server, for Prometheus."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_IMAGES = (1, 2, 4, 8, 16, 32, 64)


class ServerMetrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()  # a process may hold several servers
        ProcessCollector(registry=self.registry)  # memory and processor time
        self.requests = Counter(
            "solodg_requests", "Responses sent.", ["path", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "solodg_request_seconds", "Seconds from the start of a request to the end of its "
            "response.", ["path"], buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.batch = Histogram(
            "solodg_batch_images", "Images per micro-batch.",
            buckets=_IMAGES, registry=self.registry,
        )  # fmt: skip
        self.recomputed = Counter(
            "solodg_computed_alone", "Images computed again alone, so that no digit depends on "
            "the micro-batch.", registry=self.registry,
        )  # fmt: skip
        self.admitted = Gauge(
            "solodg_images_inside", "Images admitted and not yet answered.", registry=self.registry
        )

    def count_batch(self, images: int, recomputed: int) -> None:
        """Counts a micro-batch of so many images, and those of them computed again alone."""
        self.batch.observe(images)
        self.recomputed.inc(recomputed)

    def text(self) -> bytes:
        """Returns all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)


class MetricsMiddleware:
    """Times every request and counts it by path and status."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, paths: frozenset[str]) -> None:
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
            # Unknown paths share a label: made-up paths must not fill the memory.
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - started)
