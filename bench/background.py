"""What reordering in the background costs requests: p99 of TTFT with and without it.

    python -m bench.background [--clients 8 --windows 6 --json FILE]

One server of policy `paper` with caches so small that chunks are evicted all the time. Windows of
the same requests alternate: in every second one, segments are reordered without pause, far more
often than a server would do it. The windows of both kinds are pooled, so that drift of the machine
hits both alike.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bench.client import Client
from bench.comparison import Comparison
from bench.examples import MADE, make_examples
from bench.machine import describe_machine
from bench.policies import store_kind
from bench.servers import (
    SPARE_TOKENS,
    Server,
    Setup,
    Tiers,
    policy_flags,
    running,
    server_environment,
)
from bench.session import load_tokenize
from bench.trace import Trace, TraceOptions, make_trace
from bench.zygote import Zygote
from demo.model import model_path

POLICY = "paper"


def main() -> None:
    args = _arguments()
    model = (args.model or model_path()).resolve()
    trace = _trace(args, model)
    with tempfile.TemporaryDirectory(prefix="bench-background-", dir=Path.cwd()) as folder:
        zygote = Zygote(server_environment())
        try:
            result = _run(args, model, trace, zygote, Path(folder))
        finally:
            zygote.close()
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def _run(
    args: argparse.Namespace, model: Path, trace: Trace, zygote: Zygote, folder: Path
) -> dict[str, Any]:
    pool = args.clients * trace.longest_prompt + SPARE_TOKENS
    setup = Setup(model, "float32", args.retention, pool, args.clients)
    client = Client(args.clients)
    comparison = Comparison(
        setup,
        trace,
        zygote,
        client,
        folder,
        Console(stderr=True),
        recompute_requests=0,
        keep_stores=True,
    )
    stored_mb = comparison.prepare([POLICY]) / 1e6
    tiers = Tiers(0.06 * stored_mb, 0.12 * stored_mb, 0)
    flags = policy_flags(POLICY, folder / f"prepared-{store_kind(POLICY)}", args.retention, tiers)
    with running(zygote, setup, folder / "server.log", flags) as server:
        _ask(client, server, trace)
        windows = []
        for number in range(args.windows):
            background = _Reordering(server) if number % 2 else None
            ttft_ms = _ask(client, server, trace)
            windows.append({"reordering": background is not None, "ttft_ms": ttft_ms})
            if background is not None:
                background.stop()
        stats = server.stats()
    quiet, busy = (
        [ms for window in windows if window["reordering"] is kind for ms in window["ttft_ms"]]
        for kind in (False, True)
    )
    return {
        "command": f"python -m bench.background --clients {args.clients} --windows {args.windows} "
        f"--requests {args.requests} --prefixes {args.prefixes} "
        f"--prefix-tokens {args.prefix_tokens} --retention {args.retention}",
        "machine": describe_machine(),
        "model": model.name,
        "clients": args.clients,
        "requests_of_each_kind": len(quiet),
        "without": _percentiles(quiet),
        "with_reordering": _percentiles(busy),
        "p99_ratio": round(float(np.percentile(busy, 99) / np.percentile(quiet, 99)), 3),
        "p50_ratio": round(float(np.percentile(busy, 50) / np.percentile(quiet, 50)), 3),
        "p99_of_windows": [
            {"reordering": w["reordering"], "p99_ms": round(float(np.percentile(w["ttft_ms"], 99)))}
            for w in windows
        ],
        "reorder": stats["reorder"],
        "chunks_dropped": stats["cache"]["dropped"],
        "integrity": stats["integrity"],
    }


class _Reordering:
    """Reorders all segments again and again until it is stopped."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """Wait until the last reordering is done."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._server.reorder()
            time.sleep(0.05)


def _ask(client: Client, server: Server, trace: Trace) -> list[float]:
    return client.ask(server.url, [request.tokens for request in trace.measured], lambda: None)


def _percentiles(ttft_ms: list[float]) -> dict[str, float]:
    named = {"p50_ms": 50, "p90_ms": 90, "p99_ms": 99}
    return {name: round(float(np.percentile(ttft_ms, q)), 1) for name, q in named.items()}


def _trace(args: argparse.Namespace, model: Path) -> Trace:
    count = args.prefix_tokens // 8 + 4 * args.requests
    options = TraceOptions(args.prefixes, args.prefix_tokens, 1, 1, args.requests, 50.0, 1)
    return make_trace(
        {MADE: make_examples(count, 1)},
        load_tokenize(model),
        options,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="default: the demo model")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--windows", type=int, default=6, help="half of them with reordering")
    parser.add_argument("--requests", type=int, default=40, help="of each window")
    parser.add_argument("--prefixes", type=int, default=6)
    parser.add_argument("--prefix-tokens", type=int, default=1000)
    parser.add_argument("--retention", type=float, default=0.25)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
