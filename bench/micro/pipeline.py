"""What reading ahead hides: TTFT of a stored prefix against computing alone and reading alone.

The SSD is emulated at the bandwidth at which the policy `as`, which loads the whole prefix and here
reads nothing ahead, waits for it for --share of its TTFT. At that bandwidth the chosen policies
answer requests in turns: at the full speed of the drive; at the emulated one with reading ahead
off; and with it on. What of the first one's TTFT is not waiting for the drive is "compute".
"reading" is the time in which the emulated drive delivers what a request has read. A pipeline
without loss takes the longer of the two.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

from bench.core.options import DATA, DTYPE, KEEP, MODEL, SEED, Option
from bench.core.report import Result, Row, Table, plain
from bench.core.servers import servers
from bench.core.session import step
from bench.policies.compared import Tiers, policy
from bench.policies.serving import DATASETS, RETENTION, Comparison, counted
from bench.policies.trace import TraceOptions
from impress_sglang.config import ImpressConfig

OPTIONS = (
    Option("policies", ("impress",), "beside as", parse=policy),
    Option("prefixes", 4, "number of shared prefixes", quick=2),
    Option("prefix-tokens", 1500, "tokens of each, about", quick=512),
    Option("warmup", 32, "requests that fill the caches first", quick=4),
    Option("requests", 36, "measured requests, a third at each speed", quick=9),
    Option("share", 0.7, "I/O share of as"),
    Option("readahead", ImpressConfig().readahead, "where it is on"),
    Option("device-mb", 0.0, "device cache"),
    Option("host-mb", 0.0, "host cache"),
    RETENTION,
    DATASETS,
    DATA,
    MODEL,
    DTYPE,
    SEED,
    KEEP,
)
# Requests at full speed after the warm-up, that fill what fills once.
SETTLE = 2


def run(args: argparse.Namespace) -> Result:
    """Find the bandwidth, and measure all policies at it."""
    options = TraceOptions(
        prefixes=args.prefixes,
        prefix_tokens=args.prefix_tokens,
        warmup=args.warmup,
        settle=2 * args.prefixes,
        requests=args.requests,
        sigma=max(1.0, args.prefixes / 2),
        seed=args.seed,
    )
    policies = ["as", *args.policies]
    with servers(args) as pool:
        comparison = Comparison(args, pool, options)
        comparison.prepare(policies)
        mbps = _calibrate(args, comparison)
        rows = [row for name in policies for row in _measure(args, comparison, name, mbps)]
    figures = {
        "model": comparison.model.name,
        "trace": comparison.trace.describe(),
        "emulated_ssd_mbps": round(mbps, 2),
        "rows": rows,
    }
    columns = plain(*(name for name in rows[0] if not name.startswith("all_")))
    return Result(figures, [Table(columns, rows, f"SSD emulated at {mbps:.4g} MB/s")])


def _calibrate(args: argparse.Namespace, comparison: Comparison) -> float:
    """The bandwidth in MB/s at which `as` without reading ahead waits for `share` of TTFT."""
    settle = comparison.trace.settle
    with comparison.serving("as", _tiers(args)) as server:
        server.set_readahead(0.0)
        comparison.ask(server, settle[:SETTLE])
        before = server.stats()
        ttft = comparison.ask(server, settle[SETTLE:])
        found = counted(before, server.stats())
    compute = sum(ttft) - found["wait_ms"]
    return found["ssd_bytes"] / 1e3 / compute * (1.0 - args.share) / args.share


def _measure(args: argparse.Namespace, comparison: Comparison, name: str, mbps: float) -> list[Row]:
    """The figures of one policy at an emulated bandwidth, reading ahead off and on."""
    # Full speed, and slow without and with reading ahead, take turns.
    kinds = ((0.0, args.readahead), (mbps, 0.0), (mbps, args.readahead))
    fast, off, on = sides = [_Side(), _Side(), _Side()]
    with comparison.serving(name, _tiers(args)) as server, step(f"{name}: measuring"):
        comparison.warm_up(server, name, mbps)
        for number, request in enumerate(comparison.trace.measured):
            turn = (number + number // len(kinds)) % len(kinds)
            rate, ahead = kinds[turn]
            server.emulate_ssd(rate)
            server.set_readahead(ahead)
            before = server.stats()
            sides[turn].ttft += comparison.ask(server, [request])
            sides[turn].counted.append(counted(before, server.stats()))
    compute = statistics.mean(fast.ttft) - fast.mean("wait_ms")
    rows = [_row(name, share, own, compute, mbps) for share, own in ((0.0, off), (kinds[2][1], on))]
    for key in ("ttft_ms", "ttft_ms_median"):
        rows[1][f"off_over_on_{key}"] = round(rows[0][key] / rows[1][key], 3)
    rows[1]["all_ttft_ms_full_speed"] = [round(ms, 1) for ms in fast.ttft]
    return rows


def _tiers(args: argparse.Namespace) -> Tiers:
    return Tiers(args.device_mb, args.host_mb, args.readahead)


@dataclasses.dataclass(slots=True)
class _Side:
    """Requests at one speed of the drive: TTFT in milliseconds, and what was counted for each."""

    ttft: list[float] = dataclasses.field(default_factory=list)
    counted: list[dict[str, float]] = dataclasses.field(default_factory=list)

    def mean(self, name: str) -> float:
        return statistics.mean(own[name] for own in self.counted)


def _row(policy: str, readahead: float, side: _Side, compute: float, mbps: float) -> dict[str, Any]:
    reading = side.mean("ssd_bytes") / (mbps * 1e3)
    ttft, wait = statistics.mean(side.ttft), side.mean("wait_ms")
    ahead = side.mean("ahead_bytes")
    return {
        "policy": policy,
        "readahead": readahead,
        "requests": len(side.ttft),
        "ttft_ms": round(ttft, 1),
        "ttft_ms_median": round(statistics.median(side.ttft), 1),
        "wait_ms": round(wait, 1),
        "io_share": round(wait / ttft, 3),
        "compute_ms": round(compute, 1),
        "reading_ms": round(reading, 1),
        "over_longer": round(ttft / max(compute, reading), 3),
        "ssd_mb": round(side.mean("ssd_bytes") / 1e6, 3),
        "ahead_mb": round(ahead / 1e6, 3),
        "ahead_hit_ratio": round(side.mean("ahead_used_bytes") / ahead, 3) if ahead else None,
        "all_ttft_ms": [round(ms, 1) for ms in side.ttft],
    }
