"""Exports metrics to Prometheus, beside SGLang's own metrics and in their terms.

Counters and gauges follow what `GET /impress/stats` shows, so that both say the same. They are
updated once a second; only histograms are updated by each request.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

PREFIX = "sglang:impress_"
# Between two updates of counters and gauges.
PERIOD_SECONDS = 1.0
WAIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BITS_BUCKETS = (4.0, 4.5, 5.0, 5.5, 6.0, 7.0, 8.0, 16.0)

Summary: TypeAlias = Mapping[str, Any]
"""The result of `ServingRuntime.summary`; "store" and "cache" are None while no store is open."""
Values: TypeAlias = Mapping[tuple[str, ...], float]
"""The values of a metric, by the values of its labels."""


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """One metric: its name after `PREFIX`, its labels, and how its values are read."""

    name: str
    help: str
    read: Callable[[Summary], Values]
    labels: tuple[str, ...] = ()


def _total(name: str) -> Callable[[Summary], Values]:
    return lambda summary: {(): summary["totals"][name]}


def _totals(pattern: str, *values: str, scale: float = 1.0) -> Callable[[Summary], Values]:
    """Totals whose names contain the value of a label where the pattern has an asterisk."""
    return lambda summary: {
        (value,): summary["totals"][pattern.replace("*", value)] * scale for value in values
    }


def _by_key(name: str) -> Callable[[Summary], Values]:
    """A total that is kept by the values of a label."""
    return lambda summary: {(key,): total for key, total in summary["totals"][name].items()}


def _store(name: str) -> Callable[[Summary], Values]:
    """A figure of the store, while one is open."""
    return lambda summary: {(): summary["store"][name]} if summary["store"] else {}


def _stores(**names: str) -> Callable[[Summary], Values]:
    """Figures of the store, by the values of a label."""
    return lambda summary: _named(summary["store"] or {}, names)


def _health(name: str) -> Callable[[Summary], Values]:
    return lambda summary: {(): summary["store"]["health"][name]} if summary["store"] else {}


def _pool(**names: str) -> Callable[[Summary], Values]:
    """Figures of the pool of slots that its owner has, by the values of a label."""

    def read(summary: Summary) -> Values:
        pool = summary["device_pool"]
        return {(value,): pool[name] for value, name in names.items() if name in pool}

    return read


def _named(found: Mapping[str, Any], names: Mapping[str, str]) -> Values:
    """The named figures by label value; empty if `found` is empty."""
    return {(value,): found[name] for value, name in names.items()} if found else {}


def _cache_bytes(summary: Summary) -> Values:
    cache = summary["cache"] or {}
    return {
        (tier, kind): cache[tier][f"{kind}_bytes"]
        for tier in TIERS
        if cache
        for kind in ("used", "capacity")
    }


def _evicted_scores(summary: Summary) -> Values:
    cache = summary["cache"] or {}
    scores = {(tier,): cache[tier]["evicted_score"] for tier in TIERS if cache}
    return {tier: score for tier, score in scores.items() if score is not None}


def _state(summary: Summary) -> Values:
    store = summary["store"]
    health = "suspended" if store is None or summary["suspended"] else store["health"]["state"]
    return {(state,): float(state == health) for state in STATES}


STATES = ("ok", "read-only", "degraded", "suspended")
TIERS = ("device", "host")
EVENTS = (
    *("written", "failed", "abandoned", "evicted", "purged", "expired"),
    *("unreadable", "cleared", "quarantined", "gone"),
)
COUNTERS = (
    Series(
        "requests_total",
        "Finished requests, by where their prefix was.",
        _totals("requests_*", "ssd", "device", "computed"),
        ("path",),
    ),
    Series(
        "requests_decision_total",
        "Finished requests, by what was decided about their stored prefix; none: nothing was.",
        _by_key("requests_decision"),
        ("decision",),
    ),
    Series(
        "requests_approximate_total",
        "Finished requests whose answer rests on approximate KVs.",
        _total("requests_approximate"),
    ),
    Series(
        "requests_prefetched_total",
        "Requests for which reading began while they waited.",
        _total("requests_prefetched"),
    ),
    Series(
        "requests_declined_total",
        "Requests whose stored prefix was computed, as was estimated to be faster.",
        _total("requests_declined"),
    ),
    Series(
        "requests_recomputed_total",
        "Requests whose stored prefix was computed, as it could not be read.",
        _total("requests_recomputed"),
    ),
    Series(
        "requests_not_served_total",
        "Requests that may not be served from the store, by the field that forbids it.",
        _by_key("requests_not_served"),
        ("reason",),
    ),
    Series(
        "requests_not_stored_total",
        "Requests that may not be stored, by the field that forbids it.",
        _by_key("requests_not_stored"),
        ("reason",),
    ),
    Series(
        "requests_why_total",
        "Finished requests, by `why` of their report.",
        _by_key("requests_why"),
        ("reason",),
    ),
    Series(
        "prompt_tokens_total",
        "Tokens of the prompts of finished requests, by `tokens` of their report.",
        _by_key("prompt_tokens"),
        ("source",),
    ),
    Series(
        "prefix_tokens_total",
        "Tokens of the prefixes of finished requests, resident and stored.",
        _total("prefix_tokens"),
    ),
    Series(
        "used_tokens_total",
        "Of these, tokens that attention saw.",
        _total("used_tokens"),
    ),
    Series(
        "truncated_tokens_total",
        "Tokens left out of over-long prompts.",
        _total("truncated_tokens"),
    ),
    Series(
        "loaded_tokens_total",
        "Tokens of stored prefixes that finished requests loaded themselves.",
        _total("loaded_tokens"),
    ),
    Series(
        "chunks_total",
        "Chunks that requests wanted, by the tier in which they were.",
        _totals("*_chunks", "device", "host", "ssd"),
        ("tier",),
    ),
    Series("ssd_read_bytes_total", "Bytes read from SSD for requests.", _total("ssd_bytes")),
    Series(
        "ssd_needed_bytes_total",
        "Of these, bytes that were wanted.",
        _total("ssd_needed_bytes"),
    ),
    Series("prefetched_bytes_total", "Bytes that were prefetched.", _total("ahead_bytes")),
    Series(
        "prefetched_used_bytes_total",
        "Bytes that were prefetched and then wanted.",
        _total("ahead_used_bytes"),
    ),
    Series("h2d_bytes_total", "Bytes copied to the device.", _total("h2d_bytes")),
    Series(
        "request_seconds_total",
        "Time that requests spent on loading, by stage.",
        _totals("*_ms", "wait", "load", "probe", "attention", scale=1e-3),
        ("stage",),
    ),
    Series(
        "ssd_written_bytes_total", "Bytes of segments that were written.", _store("bytes_written")
    ),
    Series(
        "segments_total",
        "Segments, by what happened to them.",
        _stores(**{event: f"segments_{event}" for event in EVENTS}),
        ("event",),
    ),
    Series(
        "disk_failures_total",
        "Failures of the disk.",
        _health("failures"),
    ),
    Series(
        "disk_recoveries_total",
        "Recoveries of the disk.",
        _health("recoveries"),
    ),
    Series(
        "offers_refused_total",
        "Prompts that were not stored, by reason.",
        _stores(
            no_space="offers_without_space",
            unavailable="offers_while_unavailable",
            budget="offers_above_budget",
        ),
        ("reason",),
    ),
)
GAUGES = (
    Series(
        "store_bytes",
        "Bytes on SSD.",
        _stores(
            used="used_bytes",
            quota="quota_bytes",
            quarantined="quarantined_bytes",
            other_models="other_models_bytes",
        ),
        ("kind",),
    ),
    Series("store_segments", "Segments on SSD.", _store("segments")),
    Series(
        "store_suspects",
        "Segments that could not be read, and wait for a second look.",
        _store("segments_suspect"),
    ),
    Series(
        "write_budget_bytes",
        "Bytes that may be written: left now, and per day (0: no limit).",
        _stores(left="write_budget_left_bytes", day="write_budget_bytes"),
        ("kind",),
    ),
    Series("writes_pending", "Segments that are being written.", _store("writes_pending")),
    Series(
        "buffer_bytes",
        "Bytes of read buffers.",
        _stores(used="buffer_used_bytes", limit="buffer_bytes"),
        ("kind",),
    ),
    Series(
        "cache_bytes",
        "Bytes of the chunk caches.",
        _cache_bytes,
        ("tier", "kind"),
    ),
    Series(
        "cache_evicted_score",
        "Score of the chunk that was evicted last.",
        _evicted_scores,
        ("tier",),
    ),
    Series(
        "pool_tokens",
        "Slots of SGLang's pool: all of them, and those being loaded or written.",
        _pool(
            size="tokens",
            loading="loading_tokens",
            private="private_tokens",
            held="held_tokens",
            writing="writing_tokens",
        ),
        ("kind",),
    ),
    Series("store_state", "1 for the state of the store.", _state, ("state",)),
)
# Of requests that loaded a prefix: field of the report, name, meaning and buckets.
HISTOGRAMS = (
    ("wait_ms", "wait_seconds", "Waiting of a request for the drive.", WAIT_BUCKETS),
    ("load_ms", "load_seconds", "Loading of a request's prefix.", WAIT_BUCKETS),
    ("bits_mean", "bits", "Bits per element of a loaded prefix.", BITS_BUCKETS),
)


class ServingMetrics:
    """The metrics of one scheduler; its thread writes to them."""

    def __init__(
        self,
        labels: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
        **registry: Any,
    ) -> None:
        """`labels` are those SGLang gives this scheduler's metrics; `registry`: if not the default.

        Prometheus is not imported before: when imported, it decides from the environment how
        processes share values.
        """
        from prometheus_client import Counter, Gauge, Histogram

        self._labels = dict(labels)
        self._clock = clock
        self._due = 0.0
        self.has_news = False
        """Whether requests have ended since the last update."""
        self._told: dict[str, Values] = {}

        def names(series: Series) -> list[str]:
            # An operator may have given all metrics a label of this name: our value replaces it.
            return list(dict.fromkeys([*self._labels, *series.labels]))

        mode: dict[str, Any] = {"multiprocess_mode": "mostrecent"}
        self._counters = [
            (own, Counter(PREFIX + own.name, own.help, names(own), **registry)) for own in COUNTERS
        ]
        self._gauges = [
            (own, Gauge(PREFIX + own.name, own.help, names(own), **mode, **registry))
            for own in GAUGES
        ]
        self._histograms = {
            field: Histogram(PREFIX + name, told, list(self._labels), buckets=buckets, **registry)
            for field, name, told, buckets in HISTOGRAMS
        }

    def observe(self, report: Mapping[str, Any]) -> None:
        """Observe a request that has ended, by its report; see `report.new_report`."""
        self.has_news = True
        if report["path"] != "ssd":
            return
        for field, histogram in self._histograms.items():
            scale = 1e-3 if field.endswith("_ms") else 1.0
            histogram.labels(**self._labels).observe(report[field] * scale)

    def tell(self, summarize: Callable[[], Summary], *, now: bool = False) -> None:
        """Update counters and gauges: at most once a second, or `now`."""
        time_now = self._clock()
        if time_now < self._due and not now:
            return
        self._due, self.has_news = time_now + PERIOD_SECONDS, False
        summary = summarize()
        for series, counter in self._counters:
            found, told = series.read(summary), self._told.get(series.name, {})
            self._told[series.name] = found
            for values, total in found.items():
                # A newly opened store counts from zero.
                more = total - told.get(values, 0.0)
                counter.labels(**self._with(series, values)).inc(more if more >= 0 else total)
        for series, gauge in self._gauges:
            for values, number in series.read(summary).items():
                gauge.labels(**self._with(series, values)).set(number)

    def _with(self, series: Series, values: tuple[str, ...]) -> dict[str, str]:
        return self._labels | dict(zip(series.labels, values, strict=True))
