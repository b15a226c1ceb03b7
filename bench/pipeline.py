"""What reading ahead hides: TTFT of a stored prefix against computing alone and reading alone.

    python -m bench.pipeline [--prefixes 4 --prefix-tokens 1500 --requests 24] [--json FILE]

The SSD is emulated at the bandwidth at which the policy `as`, which loads the whole prefix and here
reads nothing ahead, waits for it for --share of its TTFT. At that bandwidth the chosen policies
answer the same requests with reading ahead off and on. The first half of them is answered at the
full speed of the drive; what of its TTFT is not waiting for the drive is "compute". "reading"
is the time in which the drive delivers what the slow requests have read. A pipeline without loss
takes the longer of the two.
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

from bench import report
from bench.client import Client
from bench.comparison import Comparison, step
from bench.machine import describe_machine
from bench.servers import SPARE_TOKENS, BenchFailed, Server, Setup, Tiers, server_environment
from bench.serving import read_data
from bench.serving_options import DATASETS
from bench.session import interrupt_on_signals, load_tokenize, work_folder
from bench.trace import Request, Trace, TraceOptions, make_trace
from bench.zygote import Zygote
from impress_sglang.config import ImpressConfig
from impress_sglang.demo.model import DemoModelMissing, model_path

# Requests at full speed after the warm-up, that fill what fills once.
SETTLE = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """A policy with reading ahead (share of bytes that may be read in vain) or without (0)."""

    policy: str
    readahead: float

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.policy}, read ahead {f'{self.readahead:g}' if self.readahead else 'off'}"


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
        prog="python -m bench.pipeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--policies", default="impress,impress+itf", help="(default: %(default)s)")
    parser.add_argument("--prefixes", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--prefix-tokens", type=int, default=1500, help="(default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--requests", type=int, default=24, help="(default: %(default)s)")
    parser.add_argument("--retention", type=float, default=0.25, help="(default: %(default)s)")
    parser.add_argument("--share", type=float, default=0.7, help="I/O share of as (default: 0.7)")
    parser.add_argument(
        "--readahead", type=float, default=ImpressConfig().readahead, help="(default: %(default)s)"
    )
    parser.add_argument("--device-mb", type=float, default=0.0, help="(default: no device cache)")
    parser.add_argument("--host-mb", type=float, default=0.0, help="(default: no host cache)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--datasets", default=DATASETS)
    parser.add_argument("--data", type=Path, help="folder of data sets, as for bench.serving")
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
        comparison.prepare(["sketch"])
        bench = _Bench(args, comparison, client, trace, console)
        mbps = bench.calibrate()
        rows = [bench.measure(variant, mbps) for variant in _variants(args)]
    return {
        "command": " ".join(["python -m bench.pipeline", *_options(args)]),
        "machine": describe_machine(),
        "model": model.name,
        "seconds": round(time.monotonic() - began),
        "trace": trace.describe(),
        "emulated_ssd_mbps": round(mbps, 2),
        "rows": rows,
    }


def _variants(args: argparse.Namespace) -> list[Variant]:
    policies = ["as", *args.policies.split(",")]
    return [Variant(policy, ahead) for policy in policies for ahead in (0.0, args.readahead)]


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
        variant = Variant("as", 0.0)
        with self._server(variant) as server:
            self._ask(server, self._trace.measured[:SETTLE])
            before = server.stats()
            ttft = self._ask(server, self._trace.measured[SETTLE:][:8])
            counted = report.difference(before, server.stats())
        compute = sum(ttft) - counted["wait_ms"]
        seconds = compute / 1e3 * share / (1.0 - share)
        return float(counted["ssd_bytes"] / 1e6 / seconds)

    def measure(self, variant: Variant, mbps: float) -> dict[str, Any]:
        """The figures of one variant at an emulated bandwidth."""
        with self._server(variant) as server:
            self._warm_up(variant, server)
            half = len(self._trace.measured) // 2
            fast = self._side(variant, server, self._trace.measured[:half], 0.0)
            server.emulate_ssd(mbps)
            # How reads are cut follows the speed that is seen.
            self._ask(server, self._trace.settle)
            slow = self._side(variant, server, self._trace.measured[half:], mbps)
        return _row(variant, fast, slow, mbps)

    def _side(
        self, variant: Variant, server: Server, requests: Sequence[Request], mbps: float
    ) -> _Side:
        side = _Side()
        text = f"{variant.name}: measuring at {f'{mbps:.1f} MB/s' if mbps else 'full speed'}"
        with step(self._console, text, len(requests)) as tick:
            for request in requests:
                before = server.stats()
                side.ttft += self._ask(server, [request])
                side.counted.append(report.difference(before, server.stats()))
                tick()
        return side

    def _warm_up(self, variant: Variant, server: Server) -> None:
        with step(self._console, f"{variant.name}: warm-up"):
            self._ask(server, self._trace.warmup)
            if variant.policy in ("impress", "impress+itf+reorder"):
                server.reorder()
            self._ask(server, self._trace.settle)

    def _server(self, variant: Variant) -> contextlib.AbstractContextManager[Server]:
        args = self._args
        tiers = Tiers(args.device_mb, args.host_mb, 0.0, variant.readahead)
        return self._comparison.serving(variant.policy, tiers)

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


def _row(variant: Variant, fast: _Side, slow: _Side, mbps: float) -> dict[str, Any]:
    compute = statistics.mean(fast.ttft) - fast.mean("wait_ms")
    reading = slow.mean("ssd_bytes") / (mbps * 1e3)
    ttft, wait = statistics.mean(slow.ttft), slow.mean("wait_ms")
    ahead = slow.mean("ahead_bytes")
    return {
        "variant": variant.name,
        "policy": variant.policy,
        "readahead": variant.readahead,
        "requests": len(slow.ttft),
        "ttft_ms": round(ttft, 1),
        "ttft_ms_median": round(statistics.median(slow.ttft), 1),
        "wait_ms": round(wait, 1),
        "io_share": round(wait / ttft, 3),
        "compute_ms": round(compute, 1),
        "reading_ms": round(reading, 1),
        "over_longer": round(ttft / max(compute, reading), 3),
        "ssd_mb": round(slow.mean("ssd_bytes") / 1e6, 3),
        "ahead_mb": round(ahead / 1e6, 3),
        "ahead_hit_ratio": round(slow.mean("ahead_used_bytes") / ahead, 3) if ahead else None,
        "all_ttft_ms": [round(ms, 1) for ms in slow.ttft],
        "all_ttft_ms_full_speed": [round(ms, 1) for ms in fast.ttft],
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
        ("variant", "variant"),
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
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for row in result["rows"]:
        table.add_row(*("" if row[key] is None else str(row[key]) for _, key in columns))
    return table


if __name__ == "__main__":
    sys.exit(main())
