"""What Prometheus is told, beside SGLang's own metrics and in its terms.

Counters and gauges follow what `GET /impress/stats` shows, so that both say the same. They are
written to once a second; only histograms are written to by each request.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

PREFIX = "sglang:impress_"
# Between two looks at what has been counted.
PERIOD_SECONDS = 1.0
WAIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BITS_BUCKETS = (4.0, 4.5, 5.0, 5.5, 6.0, 7.0, 8.0, 16.0)

Summary: TypeAlias = Mapping[str, Any]
"""Of `ServingRuntime.summary`; "store" and "cache" are None while no store is open."""


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """One metric: its name after `PREFIX`, and its values by those of its label, if it has one."""

    name: str
    help: str
    read: Callable[[Summary], Mapping[str, float]]
    label: str = ""


def _total(name: str) -> Callable[[Summary], Mapping[str, float]]:
    return lambda summary: {"": summary["totals"][name]}


def _totals(pattern: str, *values: str, scale: float = 1.0) -> Callable[..., Mapping[str, float]]:
    """Totals whose names differ by the value of a label, where the pattern has an asterisk."""
    return lambda summary: {
        value: summary["totals"][pattern.replace("*", value)] * scale for value in values
    }


def _store(**names: str) -> Callable[[Summary], Mapping[str, float]]:
    """Figures of the store by the values of a label; `_` stands for no label."""

    def read(summary: Summary) -> Mapping[str, float]:
        store = summary["store"] or {}
        return {value.strip("_"): store[name] for value, name in names.items() if name in store}

    return read


def _caches(summary: Summary) -> Mapping[str, float]:
    cache = summary["cache"] or {}
    return {tier: cache[tier]["used_bytes"] for tier in ("device", "host") if tier in cache}


def _state(summary: Summary) -> Mapping[str, float]:
    store = summary["store"]
    health = "suspended" if store is None or summary["suspended"] else store["health"]["state"]
    return {state: float(state == health) for state in STATES}


STATES = ("ok", "read-only", "degraded", "suspended")
COUNTERS = (
    Series(
        "requests_total",
        "Finished requests, by where their prefix was: on SSD, on the device, or nowhere.",
        _totals("requests_*", "ssd", "device", "computed"),
        "path",
    ),
    Series(
        "requests_prefetched_total",
        "Requests for which reading began while they waited.",
        _total("requests_prefetched"),
    ),
    Series(
        "requests_declined_total",
        "Requests whose stored prefix was computed because that was estimated to be faster.",
        _total("requests_declined"),
    ),
    Series(
        "requests_recomputed_total",
        "Requests whose stored prefix was computed because it could not be read.",
        _total("requests_recomputed"),
    ),
    Series(
        "requests_failed_total",
        "Requests that ended with status 503 because it could not be computed either.",
        _total("requests_failed"),
    ),
    Series(
        "requests_not_served_total",
        "Requests that may not be served from the store, by the field that stands against it.",
        lambda summary: summary["totals"]["requests_not_served"],
        "reason",
    ),
    Series(
        "requests_not_stored_total",
        "Requests that may not be stored, by the field that stands against it.",
        lambda summary: summary["totals"]["requests_not_stored"],
        "reason",
    ),
    Series(
        "requests_why_total",
        "Finished requests, by what decided about their prefix: see `why` of the API.",
        lambda summary: summary["totals"]["requests_why"],
        "reason",
    ),
    Series(
        "prefix_tokens_total",
        "Tokens of the prefixes of finished requests, resident and stored.",
        _total("prefix_tokens"),
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
        "tier",
    ),
    Series("ssd_read_bytes_total", "Bytes read from SSD for requests.", _total("ssd_bytes")),
    Series(
        "ssd_needed_bytes_total",
        "Bytes of the rows that were wanted of what was read from SSD.",
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
        "Time of requests for loading, by what it went to; waiting for the drive is part of it.",
        _totals("*_ms", "wait", "load", "probe", "attention", scale=1e-3),
        "stage",
    ),
    Series(
        "ssd_written_bytes_total", "Bytes of segments that were written.", _store(_="bytes_written")
    ),
    Series(
        "segments_total",
        "Segments, by what happened to them.",
        _store(
            **{
                event: f"segments_{event}"
                for event in (
                    "written",
                    "failed",
                    "abandoned",
                    "evicted",
                    "unreadable",
                    "quarantined",
                )
            }
        ),
        "event",
    ),
    Series(
        "offers_refused_total",
        "Prompts that were not stored: for want of space, because the disk takes nothing, or for "
        "want of a budget.",
        _store(
            no_space="offers_without_space",
            unavailable="offers_while_unavailable",
            budget="offers_above_budget",
        ),
        "reason",
    ),
)
GAUGES = (
    Series(
        "store_bytes",
        "Bytes on SSD: used, the quota, damaged files that were set aside, and other models'.",
        _store(
            used="used_bytes",
            quota="quota_bytes",
            quarantined="quarantined_bytes",
            other_models="other_models_bytes",
        ),
        "kind",
    ),
    Series("store_segments", "Segments on SSD.", _store(_="segments")),
    Series(
        "write_budget_bytes",
        "Bytes that may be written now, and per day (0: no limit).",
        _store(left="write_budget_left_bytes", day="write_budget_bytes"),
        "kind",
    ),
    Series("writes_pending", "Segments that are being written.", _store(_="writes_pending")),
    Series(
        "buffer_bytes",
        "Bytes of read buffers: used, and the limit.",
        _store(used="buffer_used_bytes", limit="buffer_bytes"),
        "kind",
    ),
    Series("cache_used_bytes", "Bytes used of the chunk caches.", _caches, "tier"),
    Series("store_state", "1 for the state in which the store is.", _state, "state"),
)
# Of requests that loaded a prefix: the field of their reports, name, meaning and buckets.
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
        """`labels` are SGLang's, of all metrics of this scheduler; `registry` if not the usual one.

        Nothing of Prometheus is imported before: it chooses how processes share values by the
        environment that it finds then.
        """
        from prometheus_client import Counter, Gauge, Histogram

        self._labels = dict(labels)
        self._clock = clock
        self._due = 0.0
        self.has_news = False
        """Whether requests have ended since anything was told."""
        self._told: dict[str, Mapping[str, float]] = {}

        def names(series: Series) -> list[str]:
            # Somebody may have given all metrics a label of this name: ours is what it says.
            return list(dict.fromkeys([*self._labels, *([series.label] if series.label else [])]))

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
        """A request has ended, with this report; see `report.new_report`."""
        self.has_news = True
        if report["path"] != "ssd":
            return
        for field, histogram in self._histograms.items():
            scale = 1e-3 if field.endswith("_ms") else 1.0
            histogram.labels(**self._labels).observe(report[field] * scale)

    def tell(self, summarize: Callable[[], Summary], *, now: bool = False) -> None:
        """Write what has been counted, once a second, or `now`."""
        time_now = self._clock()
        if time_now < self._due and not now:
            return
        self._due, self.has_news = time_now + PERIOD_SECONDS, False
        summary = summarize()
        for series, counter in self._counters:
            found, told = series.read(summary), self._told.get(series.name, {})
            self._told[series.name] = found
            for value, total in found.items():
                # Another store counts from nothing.
                more = total - told.get(value, 0.0)
                counter.labels(**self._with(series, value)).inc(more if more >= 0 else total)
        for series, gauge in self._gauges:
            for value, number in series.read(summary).items():
                gauge.labels(**self._with(series, value)).set(number)

    def _with(self, series: Series, value: str) -> dict[str, str]:
        return self._labels | ({series.label: value} if series.label else {})
