"""What reading ahead hides: TTFT of a stored prefix against computing alone and reading alone.

    python -m bench pipeline [--prefixes 4 --prefix-tokens 1500 --requests 24] [--json FILE]

The SSD is emulated at the bandwidth at which the policy `as`, which loads the whole prefix and here
reads nothing ahead, waits for it for --share of its TTFT. At that bandwidth the chosen policies
answer requests in turns: at the full speed of the drive; at the emulated one with reading ahead
off; and with it on. What of the first one's TTFT is not waiting for the drive is "compute".
"reading" is the time in which the emulated drive delivers what a request has read. A pipeline
without loss takes the longer of the two.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.core.client import Client
from bench.core.machine import describe_machine
from bench.core.servers import (
    REORDERING,
    SPARE_TOKENS,
    BenchFailed,
    Server,
    Setup,
    Tiers,
    server_environment,
)
from bench.core.session import interrupt_on_signals, load_tokenize, work_folder
from bench.core.zygote import Zygote
from bench.policies import report
from bench.policies.comparison import Comparison, step
from bench.policies.serving import read_data
from bench.policies.serving_options import DATASETS
from bench.policies.trace import Request, Trace, TraceOptions, make_trace
from demo.model import DemoModelMissing, model_path
from impress_sglang.config import ImpressConfig

# Requests at full speed after the warm-up, that fill what fills once.
SETTLE = 2


def main() -> int:
    """Run the benchmark; returns the exit status."""
    args = _parse_arguments()
    interrupt_on_signals()
    progress = Console(stderr=True, highlight=False)
    try:
        result = _run(args, progress)
    except KeyboardInterrupt:
        return 130
    except (BenchFailed, DemoModelMissing) as error:
        progress.print(f"benchmark failed: {error}", style="red", markup=False)
        return 1
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    Console(width=None if sys.stdout.isatty() else 150, highlight=False).print(_table(result))
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench pipeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--policies", default="impress", help="(default: %(default)s)")
    parser.add_argument("--prefixes", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--prefix-tokens", type=int, default=1500, help="(default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--requests", type=int, default=36, help="(default: %(default)s)")
    parser.add_argument("--retention", type=float, default=0.25, help="(default: %(default)s)")
    parser.add_argument("--share", type=float, default=0.7, help="I/O share of as (default: 0.7)")
    parser.add_argument(
        "--readahead", type=float, default=ImpressConfig().readahead, help="(default: %(default)s)"
    )
    parser.add_argument("--device-mb", type=float, default=0.0, help="(default: no device cache)")
    parser.add_argument("--host-mb", type=float, default=0.0, help="(default: no host cache)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--datasets", default=DATASETS)
    parser.add_argument(
        "--data", type=Path, help="folder of data sets, as for bench.policies.serving"
    )
    parser.add_argument("--model", type=Path, help="folder of a model (default: the demo model)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in this empty folder")
    return parser.parse_args()


def _run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    began = time.monotonic()
    model = (args.model or model_path()).resolve()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(work_folder(args.keep, "bench-pipeline"))
        zygote = Zygote(server_environment())
        stack.callback(zygote.close)
        trace = _make_trace(args, model)
        with step(console, "importing SGLang"):
            client = Client(1)
        pool_tokens = trace.longest_prompt + SPARE_TOKENS
        comparison = Comparison(
            Setup(model, args.dtype, args.retention, pool_tokens, 1),
            trace,
            zygote,
            client,
            folder,
            console,
            recompute_requests=0,
            keep_stores=False,
        )
        policies = ["as", *args.policies.split(",")]
        comparison.prepare(policies)
        bench = _Bench(args, comparison, client, trace, console)
        mbps = bench.calibrate()
        rows = [row for policy in policies for row in bench.measure(policy, mbps)]
    return {
        "command": " ".join(["python -m bench pipeline", *_options(args)]),
        "machine": describe_machine(),
        "model": model.name,
        "seconds": round(time.monotonic() - began),
        "trace": trace.describe(),
        "emulated_ssd_mbps": round(mbps, 2),
        "rows": rows,
    }


class _Bench:
    """Answers the trace with one variant after another."""

    def __init__(
        self,
        args: argparse.Namespace,
        comparison: Comparison,
        client: Client,
        trace: Trace,
        console: Console,
    ) -> None:
        self._args = args
        self._comparison = comparison
        self._client = client
        self._trace = trace
        self._console = console

    def calibrate(self) -> float:
        """The bandwidth in MB/s at which `as` without reading ahead waits for `share` of TTFT."""
        share = self._args.share
        with self._server("as") as server:
            server.set_readahead(0.0)
            self._ask(server, self._trace.settle[:SETTLE])
            before = server.stats()
            ttft = self._ask(server, self._trace.settle[SETTLE:])
            counted = report.difference(before, server.stats())
        compute = sum(ttft) - counted["wait_ms"]
        seconds = compute / 1e3 * share / (1.0 - share)
        return float(counted["ssd_bytes"] / 1e6 / seconds)

    def measure(self, policy: str, mbps: float) -> list[dict[str, Any]]:
        """The figures of one policy at an emulated bandwidth, reading ahead off and on."""
        share = self._args.readahead
        # Full speed, and slow without and with reading ahead, take turns.
        kinds = ((0.0, share), (mbps, 0.0), (mbps, share))
        sides = [_Side(), _Side(), _Side()]
        with self._server(policy) as server:
            self._warm_up(policy, server, mbps)
            requests = self._trace.measured
            with step(self._console, f"{policy}: measuring", len(requests)) as tick:
                for number, request in enumerate(requests):
                    turn = (number + number // len(kinds)) % len(kinds)
                    rate, ahead = kinds[turn]
                    server.emulate_ssd(rate)
                    server.set_readahead(ahead)
                    before = server.stats()
                    sides[turn].ttft += self._ask(server, [request])
                    sides[turn].counted.append(report.difference(before, server.stats()))
                    tick()
        fast, off, on = sides
        compute = statistics.mean(fast.ttft) - fast.mean("wait_ms")
        rows = [_row(policy, ahead, own, compute, mbps) for ahead, own in ((0.0, off), (share, on))]
        rows[1]["off_over_on"] = round(rows[0]["ttft_ms"] / rows[1]["ttft_ms"], 3)
        rows[1]["off_over_on_medians"] = round(
            rows[0]["ttft_ms_median"] / rows[1]["ttft_ms_median"], 3
        )
        rows[1]["ssd_bytes_on_over_off"] = round(rows[1]["ssd_mb"] / rows[0]["ssd_mb"], 3)
        rows[1]["all_ttft_ms_full_speed"] = [round(ms, 1) for ms in fast.ttft]
        return rows

    def _warm_up(self, policy: str, server: Server, mbps: float) -> None:
        with step(self._console, f"{policy}: warm-up"):
            self._ask(server, self._trace.warmup)
            if policy in REORDERING:
                server.reorder()
            server.emulate_ssd(mbps)
            self._ask(server, self._trace.settle)

    def _server(self, policy: str) -> contextlib.AbstractContextManager[Server]:
        args = self._args
        return self._comparison.serving(
            policy, Tiers(args.device_mb, args.host_mb, 0.0, args.readahead)
        )

    def _ask(self, server: Server, requests: Sequence[Request]) -> list[float]:
        prompts = [request.tokens for request in requests]
        return self._client.ask(server.url, prompts, lambda: None)


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


def _make_trace(args: argparse.Namespace, model: Path) -> Trace:
    options = TraceOptions(
        prefixes=args.prefixes,
        prefix_tokens=args.prefix_tokens,
        warmup=args.warmup,
        settle=2 * args.prefixes,
        requests=args.requests,
        sigma=max(1.0, args.prefixes / 2),
        seed=args.seed,
    )
    _, datasets = read_data(args)
    return make_trace(datasets, load_tokenize(model), options)


def _options(args: argparse.Namespace) -> list[str]:
    names = (
        "policies",
        "prefixes",
        "prefix_tokens",
        "warmup",
        "requests",
        "retention",
        "share",
        "readahead",
        "device_mb",
        "host_mb",
        "seed",
        "datasets",
        "dtype",
    )
    return [f"--{name.replace('_', '-')} {getattr(args, name)}" for name in names]


def _table(result: dict[str, Any]) -> Table:
    table = Table(
        title=f"SSD emulated at {result['emulated_ssd_mbps']:g} MB/s", title_justify="left"
    )
    columns = (
        ("policy", "policy"),
        ("read ahead", "readahead"),
        ("TTFT ms", "ttft_ms"),
        ("waiting", "wait_ms"),
        ("I/O share", "io_share"),
        ("compute ms", "compute_ms"),
        ("bytes/bandwidth ms", "reading_ms"),
        ("TTFT over the longer", "over_longer"),
        ("SSD MB", "ssd_mb"),
        ("ahead MB", "ahead_mb"),
        ("ahead hit", "ahead_hit_ratio"),
    )
    for heading, _ in columns:
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for row in result["rows"]:
        table.add_row(*("" if row[key] is None else str(row[key]) for _, key in columns))
    return table


if __name__ == "__main__":
    sys.exit(main())
