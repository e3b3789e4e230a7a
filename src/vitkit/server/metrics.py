"""Prometheus metrics of the server."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """Counters, gauges and histograms of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, buckets=SECONDS, registry=registry)
        self.requests = counter("vitkit_requests", "Responses by route and status.", ["route", "status"])
        self.seconds = histogram(
            "vitkit_request_seconds", "Seconds from the request headers to the response.", ["route"]
        )
        self.rejected = counter("vitkit_rejected", "Requests rejected with 429.")
        self.queue_images = gauge("vitkit_queue_images", "Images accepted and not yet answered.")
        self.queue_seconds = histogram("vitkit_queue_seconds", "Seconds a request waited in the queue.")
        self.buffered = gauge("vitkit_buffer_bytes", "Bytes of request bodies in memory.")
        self.images = counter("vitkit_images", "Images processed.")
        self.batches = histogram("vitkit_batch_images", "Images per batch.", buckets=BATCH_SIZES)
        self.batch_seconds = histogram("vitkit_batch_seconds", "Seconds per batch.")
        self.restarts = counter("vitkit_worker_restarts", "Workers that died or hung.")
        self.ready = gauge("vitkit_ready", "1 while the models are ready.")
        self.connections = gauge("vitkit_connections", "Open connections.")
        self._children: dict[tuple[str, int], tuple[Counter, Histogram]] = {}

    def record_response(self, route: str, status: int, seconds: float) -> None:
        """Count a response."""
        if status == 429:
            self.rejected.inc()
        children = self._children.get((route, status))
        if children is None:
            children = self.requests.labels(route, str(status)), self.seconds.labels(route)
            self._children[route, status] = children
        children[0].inc()
        children[1].observe(seconds)

    def record_batch(self, images: int, seconds: float) -> None:
        """Count a batch that the worker has processed."""
        self.images.inc(images)
        self.batches.observe(images)
        self.batch_seconds.observe(seconds)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
