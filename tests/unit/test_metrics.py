"""Reports of requests, their totals, the last of them, and what Prometheus is told."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from impress_sglang.serving import report as report_module
from impress_sglang.serving.metrics import COUNTERS, GAUGES, PERIOD_SECONDS, PREFIX, ServingMetrics
from impress_sglang.serving.report import SOURCES, RecentRequests, new_report, split_tokens
from impress_sglang.store.store import PrefixStore


def split(*numbers: int) -> dict[str, int]:
    return dict(zip(SOURCES, numbers, strict=True))


@pytest.mark.parametrize(
    ("num_tokens", "found", "expected"),
    [
        (10, {}, split(0, 0, 0, 0, 0, 10)),
        (10, {"resident": 3, "loaded": 4}, split(3, 0, 4, 0, 0, 3)),
        (10, {"shared": 2, "blended": 3, "unused": 1}, split(0, 2, 0, 3, 1, 4)),
        # What was put back has computed some of its answer.
        (10, {"resident": 12}, split(10, 0, 0, 0, 0, 0)),
        (10, {"resident": 8, "loaded": 7, "unused": 1}, split(8, 0, 2, 0, 0, 0)),
    ],
)
def test_tokens_are_split_by_their_sources(
    num_tokens: int, found: dict[str, int], expected: dict[str, int]
) -> None:
    assert split_tokens(num_tokens, **found) == expected


def test_prompts_are_told_apart_and_not_shown() -> None:
    prompt = [*range(100, 400)]

    def note(recent: RecentRequests, tokens: list[int], namespace: str = "n") -> Any:
        report = new_report("impress", 0, len(tokens))
        recent.record("r" * 500, namespace, tokens, report, waited=0.25, computing=0.06)
        return recent.since_number(0)[0]["begins"]

    recent = RecentRequests()
    first, same = note(recent, prompt), note(recent, [*prompt[:64], 7])
    later, other = note(recent, prompt[1:]), note(recent, prompt, "other")
    assert first == same and len({first, later, other}) == 3 and note(recent, prompt[:63]) == ""
    assert len(recent.since_number(0)) == 5 and not any(
        row["words"] for row in recent.since_number(0)
    )
    assert note(RecentRequests(), prompt) != first, "nobody can look a prompt up"


LABELS = {"tp_rank": "0"}
TIER = {"used_bytes": 7, "capacity_bytes": 9, "evicted_score": None}


class World:
    """What a server sums up, and what Prometheus is told of it."""

    def __init__(self, labels: dict[str, str] = LABELS) -> None:
        self.now, self.registry = 10.0, CollectorRegistry()
        self.metrics = ServingMetrics(labels, lambda: self.now, registry=self.registry)
        self.totals = report_module.RequestTotals()
        self.cache = {"device": TIER, "host": TIER | {"used_bytes": 1}}
        self.pool: dict[str, int] = {}
        self.store: dict[str, Any] | None = None
        self.suspended: str | None = None

    def tell(self, *, now: bool = False) -> None:
        self.metrics.publish(self.summarize, now=now)

    def summarize(self) -> dict[str, Any]:
        return {
            "totals": dict(self.totals),
            "store": self.store,
            "cache": self.cache,
            "device_pool": self.pool,
            "suspended": self.suspended,
        }

    def value(self, name: str, **label: str) -> float | None:
        return self.registry.get_sample_value(PREFIX + name, LABELS | label)


def test_counters_follow_the_totals_once_a_second() -> None:
    world = World()
    world.totals["requests_ssd"] = 3
    world.totals["requests_not_served"]["lora_id"] = 2
    world.totals["wait_ms"] = 1500.0
    world.tell()
    assert world.value("requests_total", path="ssd") == 3.0
    assert world.value("requests_not_served_total", reason="lora_id") == 2.0
    assert world.value("request_seconds_total", stage="wait") == 1.5
    assert world.value("cache_bytes", tier="device", kind="used") == 7.0
    assert world.value("cache_bytes", tier="host", kind="capacity") == 9.0

    world.totals["requests_ssd"] = 5
    world.tell()
    assert world.value("requests_total", path="ssd") == 3.0
    world.now += PERIOD_SECONDS
    world.tell()
    assert world.value("requests_total", path="ssd") == 5.0


def test_a_label_of_ours_is_ours() -> None:
    """Whatever --extra-metric-labels says."""
    world = World(LABELS | {"tier": "gold"})
    world.tell()
    assert world.value("cache_bytes", tier="device", kind="used") == 7.0
    assert world.value("requests_total", tier="gold", path="ssd") == 0.0


def test_another_store_counts_from_nothing(store: PrefixStore) -> None:
    """As after new weights; what Prometheus was told before stays."""
    world, told = World(), []
    for written in (10, None, 4, 6, 2):
        store.stats.bytes_written = written or 0
        world.store = None if written is None else store.summary()
        world.tell(now=True)
        told.append(
            (world.value("ssd_written_bytes_total"), world.value("store_state", state="ok"))
        )
    assert told == [(10, 1), (10, 0), (14, 1), (16, 1), (18, 1)]
    world.suspended = "a reason"
    world.tell(now=True)
    assert world.value("store_state", state="suspended") == 1.0
    assert world.value("store_state", state="ok") == 0.0


def test_all_is_told_of_a_store_that_is_open(store: PrefixStore) -> None:
    """What a value is not known of is left out, not said to be 0."""
    world = World()
    world.tell()
    assert world.value("store_segments") is None and world.value("disk_failures_total") is None
    assert world.value("pool_tokens", kind="size") is None
    assert world.value("cache_evicted_score", tier="device") is None

    for _ in range(2):
        store.health.report_failure("a read", OSError("EIO"), reading=True)
    store.health.on_probed(None, readable=True)
    store.stats.segments_purged, store.stats.segments_expired = 3, 4
    world.store = store.summary() | {"segments_suspect": 2}
    world.cache["device"] = TIER | {"evicted_score": 0.25}
    names = ("loading", "private", "held", "writing")
    world.pool = {"tokens": 100, **{f"{kind}_tokens": len(kind) for kind in names}}
    world.tell(now=True)
    assert world.value("segments_total", event="purged") == 3
    assert world.value("segments_total", event="expired") == 4
    assert world.value("store_suspects") == 2
    assert world.value("disk_failures_total") == 2 and world.value("disk_recoveries_total") == 1
    assert world.value("cache_evicted_score", tier="device") == 0.25
    assert world.value("cache_evicted_score", tier="host") is None
    assert world.value("pool_tokens", kind="size") == 100
    assert world.value("pool_tokens", kind="private") == len("private")
    told = {metric.name: set(metric.read(world.summarize())) for metric in (*COUNTERS, *GAUGES)}
    reasons = {"requests_not_served_total", "requests_not_stored_total"}
    assert {name for name, values in told.items() if not values} == reasons


def test_totals_are_sums_of_reports_and_told() -> None:
    world = World()
    totals = world.totals
    assert totals["prompt_tokens"] == split(0, 0, 0, 0, 0, 0)
    assert totals["requests_decision"] == dict.fromkeys(report_module.DECISIONS, 0)
    second = new_report("impress", 0, 30) | {
        "tokens": split_tokens(30, loaded=20, unused=5),
        "path": "ssd",
        "decision": "load",
        "approximate": True,
        "prefix_tokens": 25,
        "used_tokens": 20,
        "truncated_tokens": 100,
    }
    third = new_report("impress", 0, 7) | {"decision": "recompute"}
    for report in (new_report("impress", 4, 10), second, third):
        totals.add(report)
    world.tell()
    tokens, decisions = split(4, 0, 20, 0, 5, 18), {"none": 1, "load": 1, "recompute": 1}
    assert totals["prompt_tokens"] == tokens and totals["requests_decision"] == decisions
    assert {kind: world.value("prompt_tokens_total", source=kind) for kind in tokens} == tokens
    for decision, count in decisions.items():
        assert world.value("requests_decision_total", decision=decision) == count
    names = ("requests", "requests_approximate", "requests_declined", "requests_ssd")
    assert [totals[name] for name in names] == [3, 1, 1, 1]
    assert world.value("requests_approximate_total") == 1
    for name, count in (("prefix", 29), ("used", 24), ("truncated", 100)):
        assert totals[f"{name}_tokens"] == world.value(f"{name}_tokens_total") == count
