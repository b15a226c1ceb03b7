"""Policies of the extension, compared in real SGLang servers on one model and one trace.

    python -m bench serving --quick
    python -m bench serving --json run.json --plot figures

Every shared prefix is computed once and stored on SSD. Then each policy gets a server of its own,
one after another, with the same stored prefixes, cache sizes and requests: a warm-up, reordering
for the policies that do it, a second short warm-up, and the measured part. TTFT is measured by
SGLang's own benchmark client; bytes, chunks and hits are what the server counted meanwhile.

Prefixes are few-shot examples of data sets, and which prefix a request takes follows a normal
distribution (section 6.1 of the IMPRESS paper). Without data sets, made text is used. By default
the SSD is emulated: reads are slowed down to --ssd-mbps, so that a small model on a CPU sees the
proportions of a large one on a GPU; the table, the JSON and the figures say so.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.core import plots
from bench.core.client import Client
from bench.core.machine import describe_machine
from bench.core.servers import (
    SPARE_TOKENS,
    BenchFailed,
    Setup,
    Tiers,
    server_environment,
)
from bench.core.session import interrupt_on_signals, load_tokenize, work_folder
from bench.core.zygote import Zygote
from bench.policies import report
from bench.policies.comparison import Comparison, step
from bench.policies.examples import MADE, Example, TraceError, make_examples, read_examples
from bench.policies.serving_options import (
    DEFAULT_DATA,
    DEVICE_SHARE,
    HOST_SHARE,
    command_of,
    parse_arguments,
)
from bench.policies.trace import Trace, TraceOptions, make_trace, write_for_bench_serving
from demo.model import DemoModelMissing, model_path

# The warm-up at the speed of the measured part, as a share of the one before.
SETTLE_SHARE = 0.1


def main() -> int:
    """Run the benchmark; returns the exit status."""
    args = parse_arguments(__doc__)
    interrupt_on_signals()
    out = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    progress = Console(stderr=True, highlight=False)
    try:
        result = _run(args, progress)
        _publish(args, result, out)
    except KeyboardInterrupt:
        progress.print("interrupted", style="red")
        return 130
    except (BenchFailed, TraceError, DemoModelMissing) as error:
        progress.print(f"benchmark failed: {error}", style="red", markup=False)
        return 1
    return 0


def _run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Everything but the output; servers and temporary files are gone when it returns."""
    if args.plot:
        plots.require_matplotlib()
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(work_folder(args.keep, "bench-serving"))
        zygote = Zygote(server_environment())
        stack.callback(zygote.close)
        with step(console, "building the trace"):
            model = (args.model or model_path()).resolve()
            options = _trace_options(args)
            data, datasets = read_data(args)
            trace = make_trace(datasets, load_tokenize(model), options)
        if args.write_trace:
            write_for_bench_serving(trace, args.write_trace)
        with step(console, "importing SGLang"):
            client = Client(args.concurrency)
        comparison = Comparison(
            _setup(args, model, trace),
            trace,
            zygote,
            client,
            folder,
            console,
            recompute_requests=args.recompute_requests,
            keep_stores=args.keep is not None,
            record=args.record,
        )
        stored_bytes = comparison.prepare(args.policies)
        tiers = _tiers(args, stored_bytes)
        rows = [comparison.measure(policy, tiers) for policy in args.policies]
    report.add_speedups(rows)
    return {
        "command": command_of(args),
        "machine": describe_machine(),
        "model": model.name,
        "seconds": round(time.monotonic() - began),
        "client": "sglang.benchmark.serving",
        "trace": {"data": data, **dataclasses.asdict(options), **trace.describe()},
        "stored_bytes": stored_bytes,
        "device_mb": tiers.device_mb,
        "host_mb": tiers.host_mb,
        "emulated_ssd_mbps": args.ssd_mbps or None,
        "policies": rows,
    }


def _trace_options(args: argparse.Namespace) -> TraceOptions:
    return TraceOptions(
        prefixes=args.prefixes,
        prefix_tokens=args.prefix_tokens,
        warmup=args.warmup,
        settle=max(1, round(args.warmup * SETTLE_SHARE)),
        requests=args.requests,
        sigma=args.sigma,
        seed=args.seed,
    )


def _setup(args: argparse.Namespace, model: Path, trace: Trace) -> Setup:
    # No more than the requests under way: prefixes of earlier ones have to be loaded.
    pool_tokens = args.concurrency * trace.longest_prompt + SPARE_TOKENS
    return Setup(model, args.dtype, args.retention, pool_tokens, args.concurrency)


def read_data(args: argparse.Namespace) -> tuple[str, dict[str, Sequence[Example]]]:
    """What the examples are, and examples by data set: those of --data, or made text."""
    folder = args.data or (DEFAULT_DATA if DEFAULT_DATA.is_dir() else None)
    if folder is None:
        count = args.prefix_tokens // 8 + 4 * (args.requests + args.warmup)
        return "made text", {MADE: make_examples(count, args.seed)}
    names = args.datasets.split(",")
    return "data sets", {name: read_examples(folder, name) for name in names}


def _tiers(args: argparse.Namespace, stored_bytes: int) -> Tiers:
    def size(given: float | None, share: float) -> float:
        return round(share * stored_bytes / 1e6, 1) if given is None else given

    return Tiers(size(args.device_mb, DEVICE_SHARE), size(args.host_mb, HOST_SHARE), args.ssd_mbps)


def _publish(args: argparse.Namespace, result: dict[str, Any], console: Console) -> None:
    rows = result["policies"]
    note = report.emulation_note(result["emulated_ssd_mbps"])
    trace = result["trace"]
    caption = (
        f"{trace['prefixes']} prefixes of about {trace['prefix_tokens']} tokens, "
        f"{trace['data']} ({', '.join(trace['datasets'])}), sigma {trace['sigma']:g}; {note}; "
        f"caches: device {result['device_mb']:g} MB, host {result['host_mb']:g} MB of "
        f"{result['stored_bytes'] / 1e6:,.0f} MB stored; {result['seconds']} s in all\n"
        "SSD MB, h2d MB and chunks are per request. bench/README.md explains the columns."
    )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    console.print(report.make_table(rows, caption))
    for warning in report.warnings_of(rows):
        console.print(f"warning: {warning}", style="yellow", markup=False)
    if args.plot:
        files, left_out = plots.write_figures(rows, note, args.plot)
        console.print(f"{len(files)} files in {args.plot}", markup=False)
        for reason in left_out:
            console.print(f"not drawn: {reason}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
