"""What a run of `bench.engine.run` found: stage times, a row per system, tables."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from bench.core.machine import describe_machine
from impress_sglang.timeline import (
    ATTENTION,
    COPY,
    PLAN,
    PROBE_COMPUTE,
    PROBE_READ,
    REQUEST_TRACK,
    REST,
    SELECT,
    SSD_READ,
    RequestTimeline,
)
from impress_sglang.transfer.loader import LoadStats
from impress_sglang.transfer.planner import ReadStats

Row = dict[str, Any]

# Projections, norms and the feed-forward network: a stage beside those of `timeline`.
MODEL = "model"
IO_STAGES = (PROBE_READ, SSD_READ)
LOAD_STAGES = (*IO_STAGES, COPY)
PROBE_STAGES = (PROBE_READ, PROBE_COMPUTE, SELECT)
BASELINES = ("recompute", "as", "as+h2o+lru", "as+h2o+lfu")


class DeviceEvent(Protocol):
    """What is used of `torch.cuda.Event`."""

    def record(self) -> None:
        """Note the time at which the device has done what was asked of it before."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds until another event."""


class StageClock(Protocol):
    """A timeline of one request that can be read at its end."""

    @property
    def enabled(self) -> bool:
        """See `Timeline.enabled`."""

    @property
    def duration_ms(self) -> float:
        """From the construction to `finish`."""

    def span(self, stage: str, layer: int) -> AbstractContextManager[None]:
        """See `Timeline.span`."""

    def add(
        self, track: str, name: str, start: float, stop: float, layer: int | None = None
    ) -> None:
        """See `Timeline.add`."""

    def finish(self) -> None:
        """The request is done, and so is the device."""

    def totals(self) -> dict[str, float]:
        """Milliseconds per stage; they sum to the duration."""


class EventTimeline:
    """Stages of a request by the time at which an accelerator passes their bounds.

    On the host's clock a stage ends when it is queued, and whoever waits next gets its time. Here a
    stage lasts from when the device has done all before it until it has done the stage, waiting for
    the host included: of a read it is what is not hidden behind earlier computing. The device must
    be idle when a timeline begins, and when it ends.
    """

    enabled = True

    def __init__(self, rid: str, make_event: Callable[[], DeviceEvent]) -> None:
        self._make_event = make_event
        self._spans: list[tuple[str, int, DeviceEvent, DeviceEvent]] = []
        self._began = perf_counter()
        self._timeline = RequestTimeline(rid)
        self._origin = self._recorded()

    @property
    def duration_ms(self) -> float:
        """See `StageClock`; on the host's clock."""
        return self._timeline.duration_ms

    @contextmanager
    def span(self, stage: str, layer: int) -> Any:
        """See `Timeline.span`."""
        start = self._recorded()
        try:
            yield
        finally:
            self._spans.append((stage, layer, start, self._recorded()))

    def add(
        self, track: str, name: str, start: float, stop: float, layer: int | None = None
    ) -> None:
        """See `Timeline.add`."""
        self._timeline.add(track, name, start, stop, layer)

    def finish(self) -> None:
        """See `StageClock`."""
        self._timeline.finish()
        for stage, layer, *bounds in self._spans:
            start, stop = (self._began + self._origin.elapsed_time(bound) / 1e3 for bound in bounds)
            self._timeline.add(REQUEST_TRACK, stage, start, stop, layer)
        self._spans.clear()

    def totals(self) -> dict[str, float]:
        """See `StageClock`."""
        return self._timeline.totals()

    def _recorded(self) -> DeviceEvent:
        event = self._make_event()
        event.record()
        return event


def stage_clock(rid: str, device: torch.device) -> StageClock:
    """The clock for requests on a device: of its own where it works by itself."""
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        return EventTimeline(rid, lambda: _ModelEvent(stream))
    return RequestTimeline(rid)


class _ModelEvent:
    """An event on the stream on which the model runs, whichever is current.

    What is copied beside computing is a part of no stage.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        """See `DeviceEvent`."""
        self._event.record(self._stream)

    def elapsed_time(self, end_event: _ModelEvent) -> float:
        """See `DeviceEvent`."""
        return float(self._event.elapsed_time(end_event._event))


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """A request that was answered; `reads` and `loads` only with a stored prefix.

    `logits` [vocabulary] of the first token, on the device. `estimated_ms` is what loading was
    estimated to take, None before anything was known.
    """

    ttft_ms: float
    stage_ms: dict[str, float]
    logits: Tensor
    reads: ReadStats | None = None
    loads: LoadStats | None = None
    estimated_ms: float | None = None


def make_row(system: str, policy: str, served: Sequence[Served]) -> Row:
    """The figures of a system; times in ms per request, bytes and chunks of all, None: of nothing.

    `io_ms` is waiting for the drive, `load_ms` that and copying, `probe_ms` reading and scoring
    what important tokens are found from.
    """
    ttft = [own.ttft_ms for own in served]
    mean = float(np.mean(ttft))
    names = dict.fromkeys(name for own in served for name in own.stage_ms)
    stages = {
        name: float(np.mean([own.stage_ms.get(name, 0.0) for own in served])) for name in names
    }

    def spent(chosen: Sequence[str]) -> float:
        return sum(stages.get(name, 0.0) for name in chosen)

    return {
        "system": system,
        "policy": policy,
        "requests": len(served),
        "ttft_ms_mean": round(mean, 2),
        "ttft_ms_p50": round(float(np.percentile(ttft, 50)), 2),
        "ttft_ms_p99": round(float(np.percentile(ttft, 99)), 2),
        "io_ms": round(spent(IO_STAGES), 2),
        "io_share": _ratio(spent(IO_STAGES), mean),
        "load_ms": round(spent(LOAD_STAGES), 2),
        "load_share": _ratio(spent(LOAD_STAGES), mean),
        "probe_ms": round(spent(PROBE_STAGES), 2),
        "probe_share": _ratio(spent(PROBE_STAGES), mean),
        "stage_ms": {name: round(value, 2) for name, value in stages.items()},
        **_counted(served),
        "ttft_ms": [round(own, 2) for own in ttft],
    }


def add_speedups(rows: Sequence[Row]) -> None:
    """Add to each row how many times faster it is than the fastest baseline of the cell."""
    means = [row["ttft_ms_mean"] for row in rows if row["policy"] in BASELINES]
    for row in rows:
        row["speedup_over_best_baseline"] = _ratio(min(means, default=0.0), row["ttft_ms_mean"])


def describe_device(device: torch.device) -> dict[str, object]:
    """The machine and versions, and the accelerator if there is one."""
    found = describe_machine()
    for package in ("numpy", "xxhash", "triton", "numba"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    found["device"] = "cpu"
    found["threads"] = torch.get_num_threads()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = properties.name
        found["device_memory_gib"] = round(properties.total_memory / 2**30)
        found["cuda"] = torch.version.cuda
    return found


def format_tables(rows: Sequence[Row]) -> str:
    """Two tables of one cell: times, and where bytes came from; per request."""
    return "\n\n".join(_table(columns, rows) for columns in (_TIMES, _BYTES))


def _counted(served: Sequence[Served]) -> Row:
    """Counters of loading, summed, and ratios of them."""
    reads, loads = ReadStats(), LoadStats()
    for own in served:
        if own.reads is not None:
            reads.add(own.reads)
        if own.loads is not None:
            for name in ("layers_by_probe", "layers_by_fallback", "layers_whole"):
                setattr(loads, name, getattr(loads, name) + getattr(own.loads, name))
    estimates = [own.estimated_ms for own in served if own.estimated_ms is not None]
    chosen = loads.layers_by_probe + loads.layers_by_fallback
    accessed = reads.chunks_accessed
    return {
        **reads.as_dict(),
        "device_hit_ratio": _ratio(reads.device_chunks, accessed),
        "host_hit_ratio": _ratio(reads.host_chunks, accessed),
        "ssd_ratio": _ratio(reads.ssd_chunks, accessed),
        "important_device_hit_ratio": _ratio(reads.important_device_bytes, reads.important_bytes),
        "read_amplification": _ratio(reads.ssd_bytes, reads.ssd_needed_bytes),
        "ahead_share": _ratio(reads.ahead_used_bytes, reads.ssd_bytes),
        "layers_by_probe": loads.layers_by_probe,
        "layers_by_fallback": loads.layers_by_fallback,
        "layers_whole": loads.layers_whole,
        "fallback_share": _ratio(loads.layers_by_fallback, chosen),
        "estimated_ms": round(float(np.mean(estimates)), 2) if estimates else None,
    }


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _ms(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name]:,.1f}"


def _stage(*names: str) -> Callable[[Row], str]:
    return lambda row: f"{sum(row['stage_ms'].get(name, 0.0) for name in names):,.1f}"


def _percent(name: str) -> Callable[[Row], str]:
    return lambda row: "-" if row[name] is None else f"{row[name]:.0%}"


def _times(name: str) -> Callable[[Row], str]:
    return lambda row: "-" if row[name] is None else f"{row[name]:.2f}x"


def _mb(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name] / 1e6 / row['requests']:,.1f}"


_SYSTEM: dict[str, Callable[[Row], str]] = {"system": lambda row: str(row["system"])}
_TIMES: Mapping[str, Callable[[Row], str]] = {
    **_SYSTEM,
    "n": lambda row: str(row["requests"]),
    "TTFT ms": _ms("ttft_ms_mean"),
    "p50": _ms("ttft_ms_p50"),
    "p99": _ms("ttft_ms_p99"),
    "speed-up": _times("speedup_over_best_baseline"),
    PROBE_READ: _stage(PROBE_READ),
    PROBE_COMPUTE: _stage(PROBE_COMPUTE),
    SELECT: _stage(SELECT),
    PLAN: _stage(PLAN),
    SSD_READ: _stage(SSD_READ),
    COPY: _stage(COPY),
    ATTENTION: _stage(ATTENTION),
    MODEL: _stage(MODEL),
    REST: _stage(REST),
    "I/O": _percent("io_share"),
    "probing": _percent("probe_share"),
}
_BYTES: Mapping[str, Callable[[Row], str]] = {
    **_SYSTEM,
    "load ms": _ms("load_ms"),
    "SSD MB": _mb("ssd_bytes"),
    "wanted": _mb("ssd_needed_bytes"),
    "amplif.": _times("read_amplification"),
    "ahead": _percent("ahead_share"),
    "h2d MB": _mb("h2d_bytes"),
    "device": _percent("device_hit_ratio"),
    "host": _percent("host_hit_ratio"),
    "SSD": _percent("ssd_ratio"),
    "important": _percent("important_device_hit_ratio"),
    "fallback": _percent("fallback_share"),
}


def _table(columns: Mapping[str, Callable[[Row], str]], rows: Sequence[Row]) -> str:
    """Columns padded to their widest cell, the first to the left and others to the right."""
    lines = [list(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        )
        for line in lines
    )
