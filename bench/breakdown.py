"""Where the time of an SSD hit goes inside our own code, layer by layer, without a server.

    python -m bench.breakdown [--prefix 4000 --new 64 --retention 0.25]

Stores random KVs of SmolLM2's shape in a temporary directory, then loads every layer as a request
does, with timers around reading, score computation (matrix work), selection, planning and copying.
What is left of the wall clock is Python between them. `overhead` is everything but reading, scores
and copying of KVs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.machine import describe_machine
from impress_sglang.config import ImpressConfig
from impress_sglang.importance.identify import PaperRule, probe_kv_heads
from impress_sglang.importance.selection import retained_tokens
from impress_sglang.management.store import PrefixStore
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.reader import ChunkReader
from impress_sglang.transfer import loader, source
from impress_sglang.transfer.loader import LayerInputs, LoadStats, PrefixLoader

LAYERS, QUERY_HEADS, KV_HEADS, DIM = 30, 9, 3, 64
REPEATS = 7


class Timers:
    """Milliseconds per stage of one request."""

    def __init__(self) -> None:
        self.total: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, name: str, stage: str) -> None:
        """Time every call of `owner.name` as `stage`."""
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*arguments, **keywords)
            finally:
                self.total[stage] += (time.perf_counter() - began) * 1e3

        setattr(owner, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefix", type=int, default=4000, help="tokens of the stored prefix")
    parser.add_argument("--new", type=int, default=64, help="new tokens")
    parser.add_argument("--retention", type=float, default=0.25)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    probes = probe_kv_heads(QUERY_HEADS, KV_HEADS, 3)
    shape = KVShape(LAYERS, QUERY_HEADS, KV_HEADS, DIM, DIM, dtype, probes)
    with tempfile.TemporaryDirectory(dir=".") as directory:
        runs = _measure(args, shape, directory)
    best = min(runs, key=lambda run: run["wall"])
    overhead = sum(best[stage] for stage in ("select", "plan", "python"))
    result = {
        "command": "python -m bench.breakdown",
        "machine": describe_machine(),
        "prefix_tokens": args.prefix,
        "new_tokens": args.new,
        "used_tokens": retained_tokens(args.prefix, args.retention),
        "dtype": args.dtype,
        "milliseconds": {stage: round(value, 2) for stage, value in best.items()},
        "overhead_ms": round(overhead, 2),
    }
    print(json.dumps(result, indent=1))


def _measure(args: argparse.Namespace, shape: KVShape, directory: str) -> list[dict[str, float]]:
    config = ImpressConfig(ssd_dir=directory, min_free_gb=0.0)
    store = PrefixStore(config, "bench", shape)
    tokens = np.arange(args.prefix, dtype=np.int32)
    kv = torch.randn(args.prefix, KV_HEADS, DIM).to(shape.dtype)
    store.offer(
        "bench",
        tokens,
        lambda start: lambda layer: (kv[start:], kv[start:]),
        lambda: None,
        approximate=False,
        min_tokens=1,
    )
    store.drain()
    timers = _install_timers()
    runs = [_one_request(args, store, shape, tokens, kv, timers) for _ in range(REPEATS)]
    store.close()
    return runs


def _install_timers() -> Timers:
    timers = Timers()
    timers.wrap(ChunkReader, "read", "read")
    timers.wrap(loader, "column_sums", "scores")
    timers.wrap(PaperRule, "judge", "select")
    timers.wrap(PaperRule, "fall_back", "select")
    timers.wrap(source.SegmentSource, "_plan", "plan")
    timers.wrap(source, "_chunk_runs", "plan")
    timers.wrap(source.SegmentSource, "_rows", "copy")
    timers.wrap(PrefixLoader, "_join", "copy")
    return timers


def _one_request(
    args: argparse.Namespace,
    store: PrefixStore,
    shape: KVShape,
    tokens: np.ndarray,
    kv: torch.Tensor,
    timers: Timers,
) -> dict[str, float]:
    prefix_loader = PrefixLoader(shape, PaperRule(0.6))
    # Queries near one key, so that heads agree and layers take the probe path, as on real text.
    queries = kv[args.prefix // 2].repeat_interleave(3, 0) + 0.5 * torch.randn(
        args.new, QUERY_HEADS, DIM
    ).to(shape.dtype)
    inputs = LayerInputs(queries, kv[: args.new], kv[:0], DIM**-0.5)
    k = retained_tokens(args.prefix, args.retention)
    timers.total.clear()
    stats = LoadStats()
    began = time.perf_counter()
    match = store.match("bench", tokens, allow_approximate=False)
    opened = store.open_source(match, 0, args.prefix)
    for layer in range(LAYERS):
        prefix_loader.load(layer, opened, inputs, k, stats)
    store.close_source(opened)
    wall = (time.perf_counter() - began) * 1e3
    measured = dict(timers.total)
    return {
        **measured,
        "python": wall - sum(measured.values()),
        "wall": wall,
        "layers_by_probe": stats.layers_by_probe,
    }


if __name__ == "__main__":
    main()
