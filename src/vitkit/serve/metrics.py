"""What happens goes in, the text that Prometheus reads comes out."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Metrics:
    """The numbers of one server.

    >>> metrics = Metrics()
    >>> metrics.answered("/v1/predict", 200, 0.012)
    >>> b'vitkit_requests_total{route="/v1/predict",status="200"} 1.0' in metrics.text()
    True
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("vitkit_requests", "Requests answered.", ["route", "status"], registry=self.registry)
        self.seconds = Histogram(
            "vitkit_request_seconds",
            "Seconds from a request's headers to its answer.",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.refused = Counter("vitkit_refused", "Requests refused because there was no room.", registry=self.registry)
        self.waiting = Gauge("vitkit_queue_images", "Images accepted and not yet answered.", registry=self.registry)
        self.buffered = Gauge("vitkit_buffer_bytes", "Bytes of requests that are held.", registry=self.registry)
        self.images = Counter("vitkit_images", "Images computed.", registry=self.registry)
        self.batches = Histogram(
            "vitkit_batch_images", "Images in a batch.", buckets=(1, 2, 4, 8, 16, 32, 64), registry=self.registry
        )
        self.batch_seconds = Histogram(
            "vitkit_batch_seconds", "Seconds that a batch took.", buckets=SECONDS, registry=self.registry
        )
        self.restarts = Counter("vitkit_worker_restarts", "Workers that died or hung.", registry=self.registry)
        self.ready = Gauge("vitkit_ready", "1 where the models answer.", registry=self.registry)
        self.connections = Gauge("vitkit_connections", "Open connections.", registry=self.registry)
        self._by_route: dict[tuple[str, int], Counter] = {}
        self._seconds: dict[str, Histogram] = {}

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count an answer."""
        try:
            self._by_route[route, status].inc()
            self._seconds[route].observe(seconds)
        except KeyError:
            self._by_route[route, status] = self.requests.labels(route, str(status))
            self._seconds[route] = self.seconds.labels(route)
            self.answered(route, status, seconds)

    def computed(self, images: int, seconds: float) -> None:
        """Count a batch."""
        self.images.inc(images)
        self.batches.observe(images)
        self.batch_seconds.observe(seconds)

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self.registry)
