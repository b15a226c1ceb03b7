"""Exports metrics to Prometheus, with SGLang's metrics and labels.

Counters and gauges are derived from `GET /impress/stats`, so that both agree. They are updated
once a second; only histograms are updated by each request.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

PREFIX = "sglang:impress_"
# Seconds between two updates of counters and gauges.
PERIOD_SECONDS = 1.0
WAIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BITS_BUCKETS = (4.0, 4.5, 5.0, 5.5, 6.0, 7.0, 8.0, 16.0)
STATES = ("ok", "read-only", "degraded", "suspended")

Summary: TypeAlias = Mapping[str, Any]
"""The result of `Service.summary`; "store" and "cache" are None while no store is open."""
Values: TypeAlias = Mapping[tuple[str, ...], float]
"""The values of a metric, by the values of its labels."""


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """One metric: its name after `PREFIX`, its labels, its help text, and the path of its values.

    `path` leads to a figure of the summary, or to figures by the value of a label. If the label's
    values are `named`, each (or the part after its "=") replaces the asterisk in the path.
    """

    name: str
    labels: tuple[str, ...]
    path: str
    named: tuple[str, ...]
    help: str

    def read(self, summary: Summary) -> Values:
        """Return all values that are not None."""
        if self.path == "state":
            state = _find(summary, "store.health.state")
            state = "suspended" if state is None or summary["suspended"] else state
            return {(name,): float(name == state) for name in STATES}
        values: dict[tuple[str, ...], Any]
        if self.named:
            values = {
                tuple((label or name).split(",")): _find(summary, self.path.replace("*", name))
                for label, _, name in (column.rpartition("=") for column in self.named)
            }
        else:
            whole = _find(summary, self.path)
            values = {(key,): value for key, value in whole.items()} if self.labels else {(): whole}
        scale = 1e-3 if self.path.endswith("_ms") else 1.0
        return {labels: value * scale for labels, value in values.items() if value is not None}


def _find(summary: Any, path: str) -> Any:
    for part in path.split("."):
        summary = (summary or {}).get(part)
    return summary


def _series(*rows: tuple[str, str, str, str, str]) -> tuple[Series, ...]:
    return tuple(
        Series(name, tuple(labels.split(",") if labels else ()), path, tuple(named.split()), text)
        for name, labels, path, named, text in rows
    )


# Name, labels, path, names and help text of each; see `Series`.
# fmt: off
COUNTERS = _series(
    ("requests_total", "path", "totals.requests_*", "ssd device computed",
     "Finished requests, by where their prefix was."),
    ("requests_decision_total", "decision", "totals.requests_decision", "",
     "Finished requests, by what was decided about their stored prefix; none: nothing was."),
    ("requests_approximate_total", "", "totals.requests_approximate", "",
     "Finished requests whose answer rests on approximate KVs."),
    ("requests_prefetched_total", "", "totals.requests_prefetched", "",
     "Requests for which reading began while they waited."),
    ("requests_declined_total", "", "totals.requests_declined", "",
     "Requests whose stored prefix was computed, as was estimated to be faster."),
    ("requests_not_served_total", "reason", "totals.requests_not_served", "",
     "Requests that may not be served from the store, by the field that forbids it."),
    ("requests_not_stored_total", "reason", "totals.requests_not_stored", "",
     "Requests that may not be stored, by the field that forbids it."),
    ("requests_why_total", "reason", "totals.requests_why", "",
     "Finished requests, by `why` of their report."),
    ("prompt_tokens_total", "source", "totals.prompt_tokens", "",
     "Tokens of the prompts of finished requests, by `tokens` of their report."),
    ("prefix_tokens_total", "", "totals.prefix_tokens", "",
     "Tokens of the prefixes of finished requests, resident and stored."),
    ("used_tokens_total", "", "totals.used_tokens", "", "Of these, tokens that attention saw."),
    ("truncated_tokens_total", "", "totals.truncated_tokens", "",
     "Tokens left out of over-long prompts."),
    ("loaded_tokens_total", "", "totals.loaded_tokens", "",
     "Tokens of stored prefixes that finished requests loaded themselves."),
    ("chunks_total", "tier", "totals.*_chunks", "device host ssd",
     "Chunks that requests wanted, by the tier in which they were."),
    ("ssd_read_bytes_total", "", "totals.ssd_bytes", "", "Bytes read from SSD for requests."),
    ("ssd_needed_bytes_total", "", "totals.ssd_needed_bytes", "",
     "Of these, bytes that were wanted."),
    ("prefetched_bytes_total", "", "totals.ahead_bytes", "", "Bytes that were prefetched."),
    ("prefetched_used_bytes_total", "", "totals.ahead_used_bytes", "",
     "Bytes that were prefetched and then wanted."),
    ("h2d_bytes_total", "", "totals.h2d_bytes", "", "Bytes copied to the device."),
    ("request_seconds_total", "stage", "totals.*_ms", "wait load probe attention",
     "Time that requests spent on loading, by stage."),
    ("ssd_written_bytes_total", "", "store.bytes_written", "",
     "Bytes of segments that were written."),
    ("segments_total", "event", "store.segments_*",
     "written failed abandoned evicted purged expired unreadable cleared quarantined gone",
     "Segments, by what happened to them."),
    ("disk_failures_total", "", "store.health.failures", "", "Failures of the disk."),
    ("disk_recoveries_total", "", "store.health.recoveries", "", "Recoveries of the disk."),
    ("offers_refused_total", "reason", "store.offers_*",
     "no_space=without_space unavailable=while_unavailable budget=above_budget",
     "Prompts that were not stored, by reason."),
)
GAUGES = _series(
    ("store_bytes", "kind", "store.*_bytes", "used quota quarantined other_models other_servers",
     "Bytes on SSD."),
    ("store_segments", "", "store.segments", "", "Segments on SSD."),
    ("store_suspects", "", "store.segments_suspect", "",
     "Segments that could not be read, and wait for a second look."),
    ("write_budget_bytes", "kind", "store.write_budget_*", "left=left_bytes day=bytes",
     "Bytes that may be written: left now, and per day (0: no limit)."),
    ("writes_pending", "", "store.writes_pending", "", "Segments that are being written."),
    ("buffer_bytes", "kind", "store.buffer_*", "used=used_bytes limit=bytes",
     "Bytes of read buffers."),
    ("cache_bytes", "tier,kind", "cache.*_bytes",
     "device,used=device.used device,capacity=device.capacity host,used=host.used "
     "host,capacity=host.capacity",
     "Bytes of the chunk caches."),
    ("cache_evicted_score", "tier", "cache.*.evicted_score", "device host",
     "Score of the chunk that was evicted last."),
    ("pool_tokens", "kind", "device_pool.*tokens",
     "size= loading=loading_ private=private_ writing=writing_",
     "Slots of SGLang's pool: all of them, and those being loaded or written."),
    ("store_state", "state", "state", "", "1 for the state of the store."),
)
# fmt: on
# For requests that loaded a prefix: field of the report, name, help text and buckets.
HISTOGRAMS = (
    ("wait_ms", "wait_seconds", "Waiting of a request for the drive.", WAIT_BUCKETS),
    ("load_ms", "load_seconds", "Loading of a request's prefix.", WAIT_BUCKETS),
    ("bits_mean", "bits", "Bits per element of a loaded prefix.", BITS_BUCKETS),
)


class ServingMetrics:
    """Metrics of one scheduler. Thread: scheduler."""

    def __init__(
        self,
        labels: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
        **registry: Any,
    ) -> None:
        """`labels`: labels of SGLang's metrics of this scheduler; `registry`: if not the default.

        Prometheus is imported only here: on import, it decides from the environment how processes
        share values.
        """
        from prometheus_client import Counter, Gauge, Histogram

        self._labels = dict(labels)
        self._clock = clock
        self._next_publication = 0.0
        self.has_changed = False
        """Whether requests have ended since the last update."""
        self._published: dict[str, Values] = {}

        def metric(kind: Any, series: Series, **more: Any) -> tuple[Series, Any]:
            # An operator may have set a label of this name for all metrics: our value replaces it.
            names = list(dict.fromkeys([*labels, *series.labels]))
            return series, kind(PREFIX + series.name, series.help, names, **more, **registry)

        self._counters = [metric(Counter, series) for series in COUNTERS]
        self._gauges = [metric(Gauge, series, multiprocess_mode="mostrecent") for series in GAUGES]
        self._histograms = {
            field: Histogram(PREFIX + name, help_text, list(labels), buckets=buckets, **registry)
            for field, name, help_text, buckets in HISTOGRAMS
        }

    def observe(self, report: Mapping[str, Any]) -> None:
        """Observe a finished request by its report; see `report.new_report`."""
        self.has_changed = True
        if report["path"] != "ssd":
            return
        for field, histogram in self._histograms.items():
            scale = 1e-3 if field.endswith("_ms") else 1.0
            histogram.labels(**self._labels).observe(report[field] * scale)

    def publish(self, summarize: Callable[[], Summary], *, now: bool = False) -> None:
        """Update counters and gauges: at most once a second, or `now`."""
        time_now = self._clock()
        if time_now < self._next_publication and not now:
            return
        self._next_publication, self.has_changed = time_now + PERIOD_SECONDS, False
        summary = summarize()
        for series, counter in self._counters:
            totals, previous = series.read(summary), self._published.get(series.name, {})
            self._published[series.name] = totals
            for values, total in totals.items():
                # A newly opened store counts from zero.
                more = total - previous.get(values, 0.0)
                counter.labels(**self._with(series, values)).inc(more if more >= 0 else total)
        for series, gauge in self._gauges:
            for values, number in series.read(summary).items():
                gauge.labels(**self._with(series, values)).set(number)

    def _with(self, series: Series, values: tuple[str, ...]) -> dict[str, str]:
        return self._labels | dict(zip(series.labels, values, strict=True))
