"""What planning the reads of a layer costs: microseconds for all requests of a batch.

    python -m bench.planning [--prefix 8000 --requests 3 --retention 0.25 --json FILE]

Stores a prefix of random KVs and lets several requests plan the reads of its layers as in a server:
where the chunks of the probe stream and of the selected rows stand, which blocks must be read, what
is read ahead, counters, and the moving averages. Nothing is read or computed inside the timed part.
Figures are medians over layers and repeats, with everything on SSD and with everything in the
device cache, for a layout with sketches (a lane per KV head) and one with probe heads (one lane).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.machine import describe_machine
from impress_sglang.config import EXACTLY, ImpressConfig
from impress_sglang.importance.selection import retained_tokens
from impress_sglang.management.store import PrefixStore
from impress_sglang.management.writing import Offer
from impress_sglang.storage.layout import KVShape
from impress_sglang.tiers.placement import Placement, Tier
from impress_sglang.transfer.plan import SourceSpan
from impress_sglang.transfer.planner import PrefixPlanner
from impress_sglang.transfer.slots import LayerSlots
from impress_sglang.transfer.source import Demand, SegmentSource

LAYERS = 8
SHAPES = {
    "SmolLM2-135M, sketches": KVShape(LAYERS, 9, 3, 64, 64, torch.float16, (), 4),
    "SmolLM2-135M, probe head": KVShape(LAYERS, 9, 3, 64, 64, torch.float16, (0,)),
    "Llama-3-8B, sketches": KVShape(LAYERS, 32, 8, 128, 128, torch.float16, (), 4),
    "Llama-3-8B, probe head": KVShape(LAYERS, 32, 8, 128, 128, torch.float16, (0,)),
}


def main() -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.planning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prefix", type=int, default=8000, help="tokens (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=3, help="in a batch (default: 3)")
    parser.add_argument("--retention", type=float, default=0.25)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        _measure(args, name, shape, cached)
        for name, shape in SHAPES.items()
        for cached in (False, True)
    ]
    result = {
        "command": " ".join(["python -m bench.planning", *sys.argv[1:]]),
        "machine": describe_machine(),
        "prefix_tokens": args.prefix,
        "requests": args.requests,
        "retention": args.retention,
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _measure(args: argparse.Namespace, name: str, shape: KVShape, cached: bool) -> dict[str, Any]:
    layer_gb = args.prefix * shape.num_kv_heads * 4 * shape.key_dim / 1e9
    with tempfile.TemporaryDirectory(prefix="bench-planning-", dir=Path.cwd()) as folder:
        store = PrefixStore(
            ImpressConfig(
                ssd_dir=folder,
                min_free_gb=0.0,
                bits=EXACTLY,
                device_gb=2 * LAYERS * layer_gb if cached else 0.0,
                host_gb=0.0,
                reorder_interval=0,
            ),
            "0" * 32,
            shape,
        )
        tokens = np.arange(args.prefix, dtype=np.int32)
        kvs = torch.zeros(args.prefix, shape.num_kv_heads, shape.key_dim, dtype=shape.dtype)
        store.offer(
            "bench",
            Offer(
                tokens,
                lambda start: lambda layer: (kvs[start:], kvs[start:]),
                lambda: None,
                lambda: None,
                min_tokens=1,
            ),
        )
        store.drain()
        stages = _plan_layers(args, store, shape, tokens, cached)
        store.close()
    # Reading ahead is decided once for all layers, so its share of a layer is a mean.
    medians = {
        stage: round((statistics.mean if stage == "read ahead" else statistics.median)(own), 1)
        for stage, own in stages.items()
    }
    return {
        "shape": name,
        "lanes": shape.num_lanes,
        "tokens_per_lane": retained_tokens(args.prefix, args.retention),
        "found": "device" if cached else "SSD",
        "microseconds": medians,
        "planning_us": round(sum(medians.values()) - medians["averages"], 1),
        "with_averages_us": round(sum(medians.values()), 1),
    }


def _plan_layers(
    args: argparse.Namespace, store: PrefixStore, shape: KVShape, tokens: np.ndarray, cached: bool
) -> dict[str, list[float]]:
    """Microseconds of each stage for all requests, once per layer and repeat."""
    match = store.match("bench", tokens)
    sources = [store.open_source(match, 0, len(tokens), Demand()) for _ in range(args.requests)]
    rng, k = np.random.default_rng(0), retained_tokens(len(tokens), args.retention)
    selected = [
        np.sort([rng.permutation(len(tokens))[:k] for _ in range(shape.num_lanes)], axis=1)
        for _ in sources
    ]
    if cached:
        slots = LayerSlots.fresh(len(tokens), shape, torch.device("cpu"))
        for layer in range(LAYERS):
            sources[0].read_probe(layer)
            sources[0].read(
                layer, None, keys=slots.keys.only(shape.other_kv_heads), values=slots.values
            )
            sources[0].note_whole(layer)
    stages: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.repeat):
        for layer in range(LAYERS):
            times: dict[str, float] = defaultdict(float)
            for source, own in zip(sources, selected, strict=True):
                _plan_layer(source, layer, own, times)
            for stage, seconds in times.items():
                stages[stage].append(seconds * 1e6)
    spans = _spans(sources[0])
    assert _found(store.cache.placement, spans) == ({Tier.DEVICE} if cached else {Tier.SSD})
    for source in sources:
        store.close_source(source)
    return stages


def _plan_layer(
    source: SegmentSource, layer: int, selected: np.ndarray, times: dict[str, float]
) -> None:
    planner = _planner(source)

    def timed(stage: str, action: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = action()
        times[stage] += time.perf_counter() - began
        return result

    probe = timed("probe stream", lambda: planner.plan_probe(layer))
    timed("counters", lambda: planner.count(probe))
    rows = timed("selected rows", lambda: planner.plan(layer, selected))
    timed("counters", lambda: planner.count(rows))
    # Once per request, for all layers.
    began = time.perf_counter()
    if layer == 0:
        for span in _spans(source):
            source.expect(0, span, 0.2)
    times["read ahead"] += time.perf_counter() - began
    timed("averages", lambda: planner.note_selection(layer, selected, None))


def _planner(source: SegmentSource) -> PrefixPlanner:
    return source._planner


def _spans(source: SegmentSource) -> tuple[SourceSpan, ...]:
    return source._spans


def _found(placement: Placement, spans: tuple[SourceSpan, ...]) -> set[int]:
    (span,) = spans
    return set(placement.tiers(span.base, span.segment.layout.total_chunks).tolist())


if __name__ == "__main__":
    sys.exit(main())
