"""Where the time of an SSD hit goes inside our own code, stage by stage, without a server.

    python -m bench.breakdown [--prefix 4000 --new 64 --retention 0.25 --caches small]

Stores random KVs of SmolLM2's shape in a temporary directory, then loads every layer as a request
does, and prints what its timeline says (best of several requests): waiting for bytes, probing,
selecting, planning, copying, and the Python between them. `overhead` is everything but bytes,
probe computing and copying. `--compute-ms` sleeps so long per layer, as the model's own work on a
GPU would take, so that what is read ahead can be hidden behind it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from bench.emulation import SlowFileSystem
from bench.machine import describe_machine
from impress_sglang.config import ImpressConfig
from impress_sglang.importance.identify import IdentificationRule, probe_kv_heads
from impress_sglang.importance.selection import retained_tokens
from impress_sglang.management.policies import make_policy
from impress_sglang.management.store import PrefixStore
from impress_sglang.management.writing import Offer
from impress_sglang.storage.layout import KVShape
from impress_sglang.timeline import PLAN, REST, SELECT, RequestTimeline, TimelineWriter
from impress_sglang.transfer.loader import LayerInputs, LoadStats, PrefixLoader
from impress_sglang.transfer.slots import LayerSlots
from impress_sglang.transfer.source import Demand

LAYERS, QUERY_HEADS, KV_HEADS, DIM = 30, 9, 3, 64
REPEATS = 7
# Device and host cache as shares of the prefix's KVs.
CACHE_SHARES = {"none": (0.0, 0.0), "small": (0.1, 0.2), "roomy": (1.5, 0.0)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefix", type=int, default=4000, help="tokens of the stored prefix")
    parser.add_argument("--new", type=int, default=64, help="new tokens")
    parser.add_argument("--retention", type=float, default=0.25)
    parser.add_argument(
        "--caches",
        choices=CACHE_SHARES,
        default="none",
        help="small ones evict all the time; roomy ones hold the whole prefix",
    )
    parser.add_argument("--policy", default="paper", choices=["paper", "as+h2o+lfu"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--readahead", type=float, default=0.2)
    parser.add_argument(
        "--ssd-mbps", type=float, default=0.0, help="emulated SSD (0: the real one)"
    )
    parser.add_argument("--compute-ms", type=float, default=0.0, help="pause after each layer")
    parser.add_argument("--trace", type=Path, help="folder for the timelines of all requests")
    args = parser.parse_args()
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    probes = probe_kv_heads(QUERY_HEADS, KV_HEADS, 3) if args.policy == "paper" else ()
    shape = KVShape(LAYERS, QUERY_HEADS, KV_HEADS, DIM, DIM, dtype, probes)
    with tempfile.TemporaryDirectory(dir=".") as directory:
        runs = _measure(args, shape, directory)
    best = min(runs, key=lambda run: run["wall"])
    result = {
        "command": " ".join(["python -m bench.breakdown", *sys.argv[1:]]),
        "machine": describe_machine(),
        "prefix_tokens": args.prefix,
        "new_tokens": args.new,
        "used_tokens": retained_tokens(args.prefix, args.retention),
        "milliseconds": {stage: round(value, 2) for stage, value in best.items()},
        "overhead_ms": round(sum(best[stage] for stage in (SELECT, PLAN, REST)), 2),
    }
    print(json.dumps(result, indent=1))


def _measure(args: argparse.Namespace, shape: KVShape, directory: str) -> list[dict[str, float]]:
    kv_gb = args.prefix * LAYERS * 2 * KV_HEADS * DIM * shape.dtype.itemsize / 1e9
    device, host = (share * kv_gb for share in CACHE_SHARES[args.caches])
    config = ImpressConfig(
        # Nobody has queries here to measure with.
        base_error=0.0,
        ssd_dir=directory,
        min_free_gb=0.0,
        policy=args.policy,
        device_gb=device,
        host_gb=host,
        reorder_interval=0,
        readahead=args.readahead,
    )
    files = SlowFileSystem()
    store = PrefixStore(config, "0" * 32, shape, files=files)
    tokens = np.arange(args.prefix, dtype=np.int32)
    kv = torch.randn(args.prefix, KV_HEADS, DIM).to(shape.dtype)
    store.offer(
        "bench",
        Offer(
            tokens,
            lambda start: lambda layer: (kv[start:], kv[start:]),
            lambda: None,
            lambda: None,
            min_tokens=1,
        ),
    )
    store.drain()
    files.set_rate(args.ssd_mbps)
    writer = TimelineWriter(args.trace) if args.trace else None
    rule = make_policy(config).identification_rule()
    runs = [_one_request(args, store, shape, rule, tokens, kv, writer) for _ in range(REPEATS)]
    store.close()
    return runs


def _one_request(
    args: argparse.Namespace,
    store: PrefixStore,
    shape: KVShape,
    rule: IdentificationRule,
    tokens: np.ndarray,
    kv: torch.Tensor,
    writer: TimelineWriter | None,
) -> dict[str, float]:
    prefix_loader = PrefixLoader(shape, rule)
    # Queries near one key, so that heads agree and layers take the probe path, as on real text.
    queries = kv[args.prefix // 2].repeat_interleave(3, 0) + 0.5 * torch.randn(
        args.new, QUERY_HEADS, DIM
    ).to(shape.dtype)
    inputs = LayerInputs(queries, kv[: args.new], kv[:0], DIM**-0.5)
    k = retained_tokens(args.prefix, args.retention)
    slots = LayerSlots.fresh(k, shape, torch.device("cpu"))
    stats = LoadStats()
    match = store.match("bench", tokens)
    demand = Demand(whole=k == args.prefix, probe=k < args.prefix or bool(shape.probe_kv_heads))
    timeline = RequestTimeline("breakdown")
    source = store.open_source(match, 0, args.prefix, demand, timeline)
    store.ahead.join(source)
    for layer in range(LAYERS):
        store.ahead.top_up()
        prefix_loader.load(layer, source, inputs, slots, stats)
        if args.compute_ms:
            with timeline.span("compute", layer):
                time.sleep(args.compute_ms / 1e3)
    store.close_source(source)
    timeline.finish()
    if writer is not None:
        writer.write(timeline)
    reads = source.stats
    return {
        **timeline.totals(),
        "wall": timeline.duration_ms,
        "ssd_mb": reads.ssd_bytes / 1e6,
        "ahead_mb": reads.ahead_bytes / 1e6,
        "ahead_used_mb": reads.ahead_used_bytes / 1e6,
    }


if __name__ == "__main__":
    main()
