"""What Prometheus is told, and when."""

from __future__ import annotations

import dataclasses
from typing import Any

from prometheus_client import CollectorRegistry

from impress_sglang.serving.metrics import PERIOD_SECONDS, PREFIX, ServingMetrics
from impress_sglang.serving.report import RequestTotals, new_report

LABELS = {"tp_rank": "0"}


class World:
    """Metrics, a clock, and what a server has counted."""

    def __init__(self) -> None:
        self.now = 10.0
        self.registry = CollectorRegistry()
        self.metrics = ServingMetrics(LABELS, lambda: self.now, registry=self.registry)
        self.totals = RequestTotals()
        self.store: dict[str, Any] | None = None
        self.suspended: str | None = None

    def tell(self, *, now: bool = False) -> None:
        self.metrics.tell(self.summarize, now=now)

    def summarize(self) -> dict[str, Any]:
        totals = dataclasses.asdict(self.totals)
        return {
            "totals": totals,
            "store": self.store,
            "cache": {"device": {"used_bytes": 7}},
            "suspended": self.suspended,
        }

    def value(self, name: str, **label: str) -> float | None:
        return self.registry.get_sample_value(PREFIX + name, LABELS | label)


def test_counters_follow_the_totals_once_a_second() -> None:
    world = World()
    world.totals.requests_ssd = 3
    world.totals.requests_not_served["lora_id"] = 2
    world.totals.wait_ms = 1500.0
    world.tell()
    assert world.value("requests_total", path="ssd") == 3.0
    assert world.value("requests_not_served_total", reason="lora_id") == 2.0
    assert world.value("request_seconds_total", stage="wait") == 1.5
    assert world.value("cache_used_bytes", tier="device") == 7.0

    world.totals.requests_ssd = 5
    world.tell()
    assert world.value("requests_total", path="ssd") == 3.0
    world.now += PERIOD_SECONDS
    world.tell()
    assert world.value("requests_total", path="ssd") == 5.0


def test_news_may_be_told_at_once() -> None:
    world = World()
    world.tell()
    assert not world.metrics.has_news
    world.totals.requests_computed = 1
    world.metrics.observe(new_report("impress", 0))
    world.tell()
    assert world.value("requests_total", path="computed") == 0.0 and world.metrics.has_news
    world.tell(now=True)
    assert world.value("requests_total", path="computed") == 1.0 and not world.metrics.has_news


def test_a_label_of_ours_is_ours() -> None:
    """Whatever --extra-metric-labels says."""
    registry = CollectorRegistry()
    metrics = ServingMetrics(LABELS | {"tier": "gold"}, lambda: 0.0, registry=registry)
    metrics.tell(World().summarize)
    found = LABELS | {"tier": "device"}
    assert registry.get_sample_value(f"{PREFIX}cache_used_bytes", found) == 7.0
    found = LABELS | {"tier": "gold", "path": "ssd"}
    assert registry.get_sample_value(f"{PREFIX}requests_total", found) == 0.0


def test_only_what_was_loaded_is_in_the_histograms() -> None:
    world = World()
    report = new_report("impress", 0)
    world.metrics.observe(report)
    report.update(path="ssd", wait_ms=20.0, load_ms=30.0, bits_mean=5.0)
    world.metrics.observe(report)
    assert world.value("wait_seconds_sum") == 0.02 and world.value("bits_sum") == 5.0
    assert world.value("wait_seconds_bucket", le="0.025") == world.value("bits_count") == 1.0


def test_another_store_counts_from_nothing() -> None:
    """As after new weights; what Prometheus was told before stays."""
    world = World()
    told = []
    for written in (10, None, 4, 6):
        world.store = (
            None if written is None else {"bytes_written": written, "health": {"state": "ok"}}
        )
        world.tell()
        world.now += PERIOD_SECONDS
        told.append(
            (world.value("ssd_written_bytes_total"), world.value("store_state", state="ok"))
        )
    assert told == [(10, 1), (10, 0), (14, 1), (16, 1)]
    world.suspended = "a reason"
    world.tell()
    assert world.value("store_state", state="suspended") == 1.0
    assert world.value("store_state", state="ok") == 0.0
