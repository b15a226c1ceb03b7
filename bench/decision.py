"""A prefix that loads slower than it computes: the server should compute it, at no extra cost.

    python -m bench.decision [--prefix-tokens 400 --ssd-mbps 2 --requests 24] [--json FILE]

Two servers answer the same requests for short stored prefixes, in turns: `recompute`, which
never stores anything, and `impress` as it is by default, in front of an emulated slow SSD, without
caches. The first requests of the second server teach it how fast it computes and reads; they are
not counted. The two servers take turns, so that a machine that becomes slower does so for both.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.client import Client
from bench.comparison import Comparison, step
from bench.machine import describe_machine
from bench.servers import SPARE_TOKENS, BenchFailed, Server, Setup, Tiers, server_environment
from bench.serving import read_data
from bench.serving_options import DATASETS
from bench.session import interrupt_on_signals, load_tokenize, work_folder
from bench.trace import Request, TraceOptions, make_trace
from bench.zygote import Zygote
from demo.model import DemoModelMissing, model_path


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
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.decision",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prefixes", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--prefix-tokens", type=int, default=400, help="(default: %(default)s)")
    parser.add_argument("--ssd-mbps", type=float, default=2.0, help="(default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--requests", type=int, default=24, help="(default: %(default)s)")
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
        folder = stack.enter_context(work_folder(args.keep, "bench-decision"))
        zygote = Zygote(server_environment())
        stack.callback(zygote.close)
        _, datasets = read_data(args)
        options = TraceOptions(
            args.prefixes,
            args.prefix_tokens,
            args.warmup,
            1,
            args.requests,
            max(1.0, args.prefixes / 2),
            args.seed,
        )
        trace = make_trace(datasets, load_tokenize(model), options)
        client = Client(1)
        setup = Setup(model, args.dtype, 0.25, trace.longest_prompt + SPARE_TOKENS, 1)
        comparison = Comparison(
            setup,
            trace,
            zygote,
            client,
            folder,
            console,
            recompute_requests=0,
            keep_stores=False,
        )
        comparison.prepare(["impress"])
        tiers = Tiers(0.0, 0.0, args.ssd_mbps, load="faster")
        servers = {
            policy: stack.enter_context(comparison.serving(policy, tiers))
            for policy in ("recompute", "impress")
        }
        servers["impress"].emulate_ssd(args.ssd_mbps)

        def ask(server: Server, request: Request) -> float:
            (ttft,) = client.ask(server.url, [request.tokens], lambda: None)
            return ttft

        # A prompt that no prefix begins: before it has computed one, a server always loads.
        unknown = dataclasses.replace(trace.warmup[0], tokens=trace.warmup[0].tokens[::-1])
        for server in servers.values():
            ask(server, unknown)
        with step(console, "warm-up", len(trace.warmup)) as tick:
            for request in trace.warmup:
                for server in servers.values():
                    ask(server, request)
                tick()
        before = servers["impress"].stats()["totals"]
        ttft: dict[str, list[float]] = {policy: [] for policy in servers}
        with step(console, "measuring", len(trace.measured)) as tick:
            for number, request in enumerate(trace.measured):
                order = list(servers)[:: 1 if number % 2 else -1]
                for policy in order:
                    ttft[policy].append(ask(servers[policy], request))
                tick()
        after = servers["impress"].stats()["totals"]
    means = {policy: statistics.mean(own) for policy, own in ttft.items()}
    return {
        "command": f"python -m bench.decision --prefixes {args.prefixes} --prefix-tokens "
        f"{args.prefix_tokens} --ssd-mbps {args.ssd_mbps:g} --requests {args.requests}",
        "machine": describe_machine(),
        "model": model.name,
        "seconds": round(time.monotonic() - began),
        "trace": trace.describe(),
        "requests": len(trace.measured),
        "declined": after["requests_declined"] - before["requests_declined"],
        "ttft_ms_mean": {policy: round(mean, 1) for policy, mean in means.items()},
        "ttft_ms_median": {
            policy: round(statistics.median(own), 1) for policy, own in ttft.items()
        },
        "impress_over_recompute": round(means["impress"] / means["recompute"], 3),
        "impress_over_recompute_medians": round(
            statistics.median(ttft["impress"]) / statistics.median(ttft["recompute"]), 3
        ),
        "ttft_ms": {policy: [round(ms, 1) for ms in own] for policy, own in ttft.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
