"""What a run of `bench serving` found: a row per policy from two snapshots of a server's totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from bench.core.servers import BASELINES, BenchFailed

Row = dict[str, Any]

COUNTERS = (
    "requests",
    "requests_ssd",
    "ssd_bytes",
    "ssd_needed_bytes",
    "h2d_bytes",
    "chunks_accessed",
    "device_chunks",
    "host_chunks",
    "ssd_chunks",
    "chunks_loaded",
    "selected_chunks",
    "important_bytes",
    "important_device_bytes",
    "probe_ms",
    "load_ms",
    "wait_ms",
    "ahead_bytes",
    "ahead_used_bytes",
    "attention_ms",
)


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """What was counted between two answers of `GET /impress/stats`.

    Raises:
        BenchFailed: a total is missing.
    """
    return {name: _total(after, name) - _total(before, name) for name in COUNTERS}


def make_row(policy: str, ttft_ms: Sequence[float], counted: Mapping[str, float]) -> Row:
    """The figures of one policy; a ratio of nothing is None.

    Raises:
        BenchFailed: the server counted other requests than those that were measured.
    """
    if counted["requests"] != len(ttft_ms):
        raise BenchFailed(
            f"{policy}: the server counted {counted['requests']:g} requests, not {len(ttft_ms)}"
        )
    accessed = counted["chunks_accessed"]
    return {
        "policy": policy,
        "ttft_ms_mean": round(float(np.mean(ttft_ms)), 1),
        "ttft_ms_p50": round(float(np.percentile(ttft_ms, 50)), 1),
        "ttft_ms_p99": round(float(np.percentile(ttft_ms, 99)), 1),
        "io_share": _ratio(counted["wait_ms"], sum(ttft_ms)),
        "device_hit_ratio": _ratio(counted["device_chunks"], accessed),
        "host_hit_ratio": _ratio(counted["host_chunks"], accessed),
        "ssd_ratio": _ratio(counted["ssd_chunks"], accessed),
        "important_device_hit_ratio": _ratio(
            counted["important_device_bytes"], counted["important_bytes"]
        ),
        "read_amplification": _ratio(counted["ssd_bytes"], counted["ssd_needed_bytes"]),
        **{name: _tidy(counted[name]) for name in COUNTERS},
        "ttft_ms": [round(ms, 1) for ms in ttft_ms],
    }


def add_speedups(rows: Sequence[Row]) -> None:
    """Add to each row how many times faster it is than the fastest baseline of the run."""
    baselines = [row["ttft_ms_mean"] for row in rows if row["policy"] in BASELINES]
    best = min(baselines) if baselines else None
    for row in rows:
        row["speedup_over_best_baseline"] = best and round(best / row["ttft_ms_mean"], 3)


def warnings_of(rows: Sequence[Row]) -> list[str]:
    """What a reader must know of requests that did not take the path that is compared."""
    return [
        f"{row['policy']}: only {row['requests_ssd']} of {row['requests']} requests used a "
        "stored prefix"
        for row in rows
        if row["policy"] != "recompute" and row["requests_ssd"] != row["requests"]
    ]


def emulation_note(ssd_mbps: float | None) -> str:
    """One sentence on the SSD, for tables and figures."""
    if ssd_mbps is None:
        return "SSD: the real one"
    return f"SSD: emulated, {ssd_mbps:g} MB/s"


def make_table(rows: Sequence[Row], caption: str) -> Table:
    """The table for the terminal; bytes and chunks are per request."""
    table = Table(box=box.SIMPLE, caption=caption, caption_justify="left", padding=(0, 1))
    table.add_column("policy", no_wrap=True)
    for heading in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row["policy"], *(cell(row) for cell in _COLUMNS.values()))
    return table


def _total(stats: Mapping[str, Any], name: str) -> float:
    try:
        return float(stats["totals"][name])
    except KeyError as error:
        raise BenchFailed(f"GET /impress/stats has no total {error}, asked {name!r}") from error


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _tidy(value: float) -> float:
    return int(value) if value == int(value) else round(value, 1)


def _ms(name: str) -> Any:
    return lambda row: f"{row[name]:,.0f}"


def _mb_each(name: str) -> Any:
    return lambda row: f"{row[name] / 1e6 / row['requests']:,.1f}"


def _percent(name: str) -> Any:
    return lambda row: "-" if row[name] is None else f"{row[name]:.0%}"


def _times(name: str) -> Any:
    return lambda row: "-" if row[name] is None else f"{row[name]:.2f}x"


_COLUMNS = {
    "n": lambda row: str(row["requests"]),
    "TTFT ms": _ms("ttft_ms_mean"),
    "p50": _ms("ttft_ms_p50"),
    "p99": _ms("ttft_ms_p99"),
    "I/O": _percent("io_share"),
    "SSD MB": _mb_each("ssd_bytes"),
    "h2d MB": _mb_each("h2d_bytes"),
    "chunks": lambda row: f"{row['chunks_loaded'] / row['requests']:,.0f}",
    "device": _percent("device_hit_ratio"),
    "host": _percent("host_hit_ratio"),
    "SSD": _percent("ssd_ratio"),
    "important": _percent("important_device_hit_ratio"),
    "amplif.": _times("read_amplification"),
    "speed-up": _times("speedup_over_best_baseline"),
}
