"""Numbers for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30)


class Metrics:
    """One registry per app, so that several may live in a process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "gare_requests",
            "Requests by route and status.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "gare_request_seconds",
            "Time to the first byte of an answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.in_work = Gauge("gare_requests_in_work", "Requests being answered.", registry=self.registry)
        self.waiting = Gauge("gare_searches_waiting", "Searches in the queue.", registry=self.registry)
        self.batch = Histogram(
            "gare_search_batch",
            "Searches answered together.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self.registry,
        )
        self.search_seconds = Histogram(
            "gare_search_seconds", "Time of a batch.", buckets=_SECONDS, registry=self.registry
        )
        self.refused = Counter(
            "gare_refused", "Requests refused, by reason.", ["reason"], registry=self.registry
        )
        self.uploads = Counter("gare_uploads", "Uploads by outcome.", ["outcome"], registry=self.registry)
        self.items = Gauge("gare_library_items", "Items of the library.", registry=self.registry)
        self.job_running = Gauge("gare_job_running", "1 while a job runs.", registry=self.registry)
