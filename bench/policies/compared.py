"""What is compared: policies by name, the stores that they read, their flags and their figures."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.core.report import Column, Row, ratio
from impress_sglang.options import PART_POLICIES
from impress_sglang.options import POLICIES as ALL_POLICIES

POLICIES = (
    "recompute",
    "as",
    "as+h2o+lru",
    "as+h2o+lfu",
    "paper+itf",
    "paper+itf+reorder",
    "paper",
    "impress",
)
BASELINES = POLICIES[:4]
REORDERING = ("paper+itf+reorder", "paper")
# Appended to a policy: the queue does not say what its server evicts.
NO_LOOKAHEAD = "-off"
# Stores differ by whether they have probe heads; each is written by a policy that reads it.
STORED_BY = {"codes": "impress", "paper": "paper"}
# Shorter than any prefix of a trace.
MIN_PREFIX_TOKENS = 128


def store_kind(policy: str) -> str:
    """A key of `STORED_BY`."""
    return "paper" if policy.startswith("paper") else "codes"


def ordinary(policy: str) -> str:
    """The same policy with look-ahead."""
    return policy.removesuffix(NO_LOOKAHEAD)


def policy(text: str) -> str:
    """A policy, perhaps with `NO_LOOKAHEAD`; for `Option.parse`."""
    if ordinary(text) not in ALL_POLICIES:
        names = ", ".join(ALL_POLICIES)
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {names}, or {NO_LOOKAHEAD} more")
    return text


@dataclasses.dataclass(frozen=True, slots=True)
class Tiers:
    """Caches in MB in front of the SSD."""

    device_mb: float
    host_mb: float


NO_TIERS = Tiers(0, 0)


def policy_flags(policy: str, store: Path, retention: float, tiers: Tiers) -> list[str]:
    """Arguments of the extension for one policy; `retention` is for those that use parts."""
    name = ordinary(policy)
    flags = ["--enable-impress", f"--impress-ssd-dir={store}", f"--impress-policy={name}"]
    if name == "recompute":
        return flags
    flags += [
        # What is compared is loading, so prefixes are stored at once and never computed instead.
        "--impress-write-after=1",
        "--impress-load=always",
        f"--impress-min-prefix-tokens={MIN_PREFIX_TOKENS}",
        f"--impress-retention={retention if name in PART_POLICIES else 1.0}",
        # A measured request leaves nothing behind.
        "--impress-approximation-depth=0",
        f"--impress-device-gb={tiers.device_mb / 1e3:.6f}",
        f"--impress-host-gb={tiers.host_mb / 1e3:.6f}",
    ]
    if policy.endswith(NO_LOOKAHEAD):
        flags.append("--impress-lookahead=off")
    if name in REORDERING:
        flags.append("--impress-reorder-interval=0")
    return flags


def make_row(policy: str, ttft_ms: Sequence[float], found: Mapping[str, float]) -> Row:
    """The figures of one policy, from counters of all its requests; a ratio of nothing is None."""
    accessed = found["chunks_accessed"]
    quantiles = dict(zip(("p50", "p99"), np.percentile(ttft_ms, [50, 99]), strict=True))
    layers = found["layers_by_probe"] + found["layers_by_fallback"]
    return {
        "policy": policy,
        "requests": len(ttft_ms),
        "ttft_ms_mean": round(float(np.mean(ttft_ms)), 2),
        **{f"ttft_ms_{name}": round(float(ms), 2) for name, ms in quantiles.items()},
        "io_share": ratio(found["wait_ms"], sum(ttft_ms)),
        "device_hit_ratio": ratio(found["device_chunks"], accessed),
        "host_hit_ratio": ratio(found["host_chunks"], accessed),
        "ssd_ratio": ratio(found["ssd_chunks"], accessed),
        "important_device_hit_ratio": ratio(
            found["important_device_bytes"], found["important_bytes"]
        ),
        "read_amplification": ratio(found["ssd_bytes"], found["ssd_needed_bytes"]),
        "ahead_share": ratio(found["ahead_used_bytes"], found["ssd_bytes"]),
        "fallback_share": ratio(found["layers_by_fallback"], layers),
        **{name: round(total, 2) for name, total in found.items()},
        "ttft_ms": [round(ms, 2) for ms in ttft_ms],
    }


def per_request(name: str, unit: float = 1.0) -> Any:
    """What a column shows of a counter; for `Column.value`."""
    return lambda row: row[name] / unit / row["requests"]


TIMES = (
    Column("policy", "policy"),
    Column("n", "requests"),
    Column("TTFT ms", "ttft_ms_mean", "{:,.1f}"),
    Column("p50", "ttft_ms_p50", "{:,.1f}"),
    Column("p99", "ttft_ms_p99", "{:,.1f}"),
    Column("speed-up", "speedup_over_best_baseline", "{:.2f}x"),
    Column("I/O", "io_share", "{:.0%}"),
)
LOADED = (
    Column("SSD MB", per_request("ssd_bytes", 1e6), "{:,.1f}"),
    Column("wanted", per_request("ssd_needed_bytes", 1e6), "{:,.1f}"),
    Column("amplif.", "read_amplification", "{:.2f}x"),
    Column("ahead", "ahead_share", "{:.0%}"),
    Column("h2d MB", per_request("h2d_bytes", 1e6), "{:,.1f}"),
    Column("chunks", per_request("chunks_loaded"), "{:,.0f}"),
    Column("device", "device_hit_ratio", "{:.0%}"),
    Column("host", "host_hit_ratio", "{:.0%}"),
    Column("SSD", "ssd_ratio", "{:.0%}"),
    Column("important", "important_device_hit_ratio", "{:.0%}"),
    Column("fallback", "fallback_share", "{:.0%}"),
)


def add_speedups(rows: Sequence[Row]) -> None:
    """Add to each row how many times faster it is than the fastest baseline of the run."""
    means = [row["ttft_ms_mean"] for row in rows if ordinary(row["policy"]) in BASELINES]
    for row in rows:
        row["speedup_over_best_baseline"] = ratio(min(means, default=0.0), row["ttft_ms_mean"])


def link_store(source: Path, target: Path) -> None:
    """Make a store with the same prefixes: segments, which never change, are hard links.

    The catalog is copied, since servers write to it; a lock belongs to one directory.
    """
    for path in sorted(source.rglob("*")):
        copy = target / path.relative_to(source)
        if path.is_dir():
            copy.mkdir(parents=True, exist_ok=True)
        elif "segments" in path.relative_to(source).parts:
            os.link(path, copy)
        elif path.name != "lock":
            shutil.copy2(path, copy)


def segment_sizes(store: Path) -> list[int]:
    """Bytes of each stored segment."""
    return [path.stat().st_size for path in store.glob("*/segments/*/*") if path.is_file()]
