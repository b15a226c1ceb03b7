"""Replays a recorded workload through the management code alone: no model, no files, no KVs.

    python -m bench replay [--shape opt-6.7b] [--accesses 1000000] [--shift] [--json FILE]

Each request takes a prefix by a normal distribution over the prefixes and one of that prefix's
recorded questions: which tokens each layer selected, and where it read all keys. Planning of reads,
scores, heaps, placement and reordering are those of the server; what would be read or copied is
counted. Every policy sees the same requests. `as+h2o` policies replay a recording made under that
policy. What `impress` reads of codes is no selection, and not replayed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.core.machine import describe_machine
from bench.policies.recording import RecordedSelection, Recording, load_recording
from impress_sglang.config import ImpressConfig
from impress_sglang.importance.history import TokenHistory
from impress_sglang.management import reorder
from impress_sglang.management.policies import Policy, Wish, make_policy
from impress_sglang.storage.layout import BLOCK_BYTES, KVShape, SegmentLayout
from impress_sglang.storage.segment import MappingLists
from impress_sglang.tiers.placement import Placement
from impress_sglang.tiers.slab import PageShape
from impress_sglang.transfer.expectation import BlockHistory, first_shares
from impress_sglang.transfer.plan import SourceSpan, runs_of
from impress_sglang.transfer.planner import PlannedRead, PrefixPlanner, ReadStats

RECORDINGS = Path(__file__).parents[1] / "recordings"
SHAPES = {
    "smollm2-135m": KVShape(30, 9, 3, 64, 64, torch.float32, (0,)),
    "llama-3-8b": KVShape(32, 32, 8, 128, 128, torch.bfloat16, (0,)),
    "opt-6.7b": KVShape(32, 32, 32, 128, 128, torch.float16, (0, 1, 2)),
}
POLICIES = (
    "as",
    "as+h2o+lru",
    "as+h2o+lfu",
    "paper+itf",
    "paper+itf+reorder",
    "paper",
)
CHUNK_TOKENS = 64
RETENTION = 0.25


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """Which prefix, and which of its recorded questions."""

    prefix: int
    question: int


@dataclasses.dataclass(slots=True)
class ReplaySegment:
    """What planning needs of an open segment."""

    layout: SegmentLayout
    mapping: MappingLists | None = None


@dataclasses.dataclass(slots=True)
class StoredPrefix:
    """A prefix: its present version, chunk ids and averages."""

    segment: ReplaySegment
    base: int
    history: TokenHistory
    blocks: BlockHistory

    @property
    def span(self) -> SourceSpan:
        """All of it."""
        stop = self.segment.layout.num_tokens
        return SourceSpan(
            self.segment,  # type: ignore[arg-type]
            0,
            stop,
            self.base,
            self.history,
            self.blocks,
        )


class Replay:
    """One policy over one trace."""

    def __init__(
        self,
        policy: Policy,
        shape: KVShape,
        recording: Recording,
        num_prefixes: int,
        *,
        device_share: float,
        host_share: float,
        gap_bytes: int,
    ) -> None:
        self._policy, self._shape, self._gap_bytes = policy, shape, gap_bytes
        self._exact = policy.exact(Wish(RETENTION))
        recorded = recording.questions
        self._questions = [recorded[i % len(recorded)] for i in range(num_prefixes)]
        page = PageShape.of(shape, CHUNK_TOKENS)
        layouts = [
            SegmentLayout(shape, CHUNK_TOKENS, own[0].selected.shape[2], BLOCK_BYTES)
            for own in self._questions
        ]
        self.kv_bytes = sum(layout.file_bytes - BLOCK_BYTES for layout in layouts)
        self.placement = Placement(
            policy.replacement(),
            device_pages=int(device_share * self.kv_bytes) // page.page_bytes,
            host_pages=int(host_share * self.kv_bytes) // page.page_bytes,
            max_chunk_pages=page.max_chunk_pages(shape),
        )
        self._page = page
        self.stored = [
            StoredPrefix(
                ReplaySegment(layout),
                self.placement.attach(page.chunk_pages(layout)),
                TokenHistory(shape.num_layers, shape.num_lanes, layout.num_tokens),
                BlockHistory(layout, first_shares(layout, RETENTION, ordered=False)),
            )
            for layout in layouts
        ]

    @property
    def management_bytes(self) -> int:
        """Tables, heaps, averages, chances of blocks and mapping lists."""
        mappings = (s.segment.mapping for s in self.stored if s.segment.mapping is not None)
        averages = sum(own.history.num_bytes + own.blocks.num_bytes for own in self.stored)
        return self.placement.num_bytes + averages + sum(m.nbytes for m in mappings)

    def run(self, requests: Sequence[Request]) -> ReadStats:
        """Serve requests; returns what reading took."""
        total = ReadStats()
        for request in requests:
            questions = self._questions[request.prefix]
            total.add(self._serve(self.stored[request.prefix], questions[request.question]))
        return total

    def reorder(self) -> None:
        """Give every prefix that was read the best order known."""
        if not self._policy.reorders:
            return
        for stored in self.stored:
            if stored.history.accesses.any():
                self._reorder_one(stored)

    def _serve(self, stored: StoredPrefix, question: RecordedSelection) -> ReadStats:
        self.placement.advance()
        planner = PrefixPlanner(self._shape, [stored.span], self.placement, self._page.page_bytes)
        for layer in range(self._shape.num_layers):
            if self._exact:
                if self._shape.probe_kv_heads:
                    self._count(planner, planner.plan_probe(layer))
                self._count(planner, planner.plan(layer, None))
                planner.note_whole(layer)
            else:
                self._read_selection(planner, layer, question)
        return planner.stats

    def _read_selection(
        self, planner: PrefixPlanner, layer: int, question: RecordedSelection
    ) -> None:
        """As `PrefixLoader` does it; layers and lanes are repeated where too few were recorded."""
        shape = self._shape
        recorded = layer % len(question.selected)
        lanes = question.selected[recorded]
        selected = np.stack(
            [np.flatnonzero(lanes[lane % len(lanes)]) for lane in range(shape.num_lanes)]
        )
        all_keys = bool(question.all_keys[recorded])
        if shape.probe_kv_heads:
            self._count(planner, planner.plan_probe(layer))
        if all_keys:
            self._count(planner, planner.plan(layer, None, values=False))
        self._count(planner, planner.plan(layer, selected, keys=not all_keys))
        planner.note_selection(layer, selected, None)

    def _count(self, planner: PrefixPlanner, plan: PlannedRead) -> None:
        """As `SegmentSource` reads it, where nothing was read ahead."""
        for own in plan.spans:
            if own.blocks is not None:
                starts, stops = runs_of(own.blocks, self._gap_bytes)
                planner.stats.ssd_bytes += int((stops - starts).sum()) * BLOCK_BYTES
                if own.rows is not None:
                    own.span.history.ssd_bytes += int(own.blocks.sum()) * BLOCK_BYTES
        planner.count(plan)

    def _reorder_one(self, stored: StoredPrefix) -> None:
        layout = stored.segment.layout
        mapping = reorder.mapping_lists(stored.history.order_key, [0])
        shares = reorder.chunk_shares(stored.history.average, mapping, layout)
        base = self.placement.attach(self._page.chunk_pages(layout))
        ids = np.arange(layout.total_chunks)
        expected = reorder.expected_shares(layout, shares)
        self.placement.inherit(base + ids, stored.base + ids, expected)
        self.placement.detach(stored.base, layout.total_chunks)
        stored.base, stored.segment = base, ReplaySegment(layout, mapping)
        stored.blocks = BlockHistory(layout, expected)


def shape_of(name: str, policy: Policy) -> KVShape:
    """A known shape, as a policy stores it."""
    shape = SHAPES[name]
    return shape if policy.probes else dataclasses.replace(shape, probe_kv_heads=())


def draw_requests(
    recording: Recording,
    num_prefixes: int,
    count: int,
    sigma: float,
    seed: int,
    *,
    shift: bool = False,
) -> list[Request]:
    """Requests by a normal distribution over the prefixes; `shift` moves its mean half-way."""
    generator = np.random.default_rng(seed)
    questions = [len(own) for own in recording.questions]
    requests = []
    for number in range(count):
        mean = num_prefixes * (0.75 if shift and number < count // 2 else 0.25 if shift else 0.5)
        prefix = int(np.clip(generator.normal(mean, sigma * num_prefixes), 0, num_prefixes - 1))
        question = int(generator.integers(questions[prefix % len(questions)]))
        requests.append(Request(prefix, question))
    return requests


def replay_policy(
    config: ImpressConfig, args: argparse.Namespace, recording: Recording, gap_bytes: int
) -> dict[str, Any]:
    """Figures of one policy."""
    policy = make_policy(config)
    replay = Replay(
        policy,
        shape_of(args.shape, policy),
        recording,
        args.prefixes,
        device_share=args.device_share,
        host_share=args.host_share,
        gap_bytes=gap_bytes,
    )
    warm, measured = _trace(args, recording)
    began = time.process_time()
    if not args.shift:
        replay.run(warm)
        replay.reorder()
        replay.run(warm)
    warm_seconds = time.process_time() - began
    windows, total = [], ReadStats()
    began = time.process_time()
    for part in _windows(measured, args.windows):
        stats = replay.run(part)
        if args.shift:
            replay.reorder()
        windows.append(_hit_ratio(stats))
        total.add(stats)
    seconds = time.process_time() - began
    replay.placement.check_integrity()
    count = total.chunks_accessed
    return {
        "policy": config.policy,
        "half_life": config.half_life if config.policy == "paper" else None,
        "requests": len(measured),
        **total.as_dict(),
        "device_hit_ratio": round(total.device_chunks / count, 4),
        "host_hit_ratio": round(total.host_chunks / count, 4),
        "important_device_hit_ratio": round(_hit_ratio(total), 4),
        "read_amplification": round(total.ssd_bytes / max(total.ssd_needed_bytes, 1), 3),
        "windows": [round(ratio, 4) for ratio in windows],
        "cpu_seconds": round(seconds, 2),
        "warmup_cpu_seconds": round(warm_seconds, 2),
        "seconds_per_million_accesses": round(seconds / count * 1e6, 1),
        "kv_bytes": replay.kv_bytes,
        "management_bytes": replay.management_bytes,
        "management_share": round(replay.management_bytes / replay.kv_bytes, 5),
    }


def _trace(
    args: argparse.Namespace, recording: Recording
) -> tuple[Sequence[Request], Sequence[Request]]:
    """Requests of the warm-up and of the measured part."""
    if args.as_recorded:
        requests = [Request(prefix, question) for prefix, question in recording.order]
        half = len(requests) // 2
        return requests[:half], requests[half:]
    draw = functools.partial(draw_requests, recording, args.prefixes)
    return (
        draw(args.warmup, args.sigma, args.seed),
        draw(args.requests, args.sigma, args.seed + 1, shift=args.shift),
    )


def main() -> None:
    args = _arguments()
    recordings = {
        "paper": load_recording(args.recording),
        "as+h2o": load_recording(args.recording_h2o),
    }
    gap_bytes = int(args.ssd_mbps * 1e6 * args.ssd_piece_us * 1e-6)
    rows = []
    for config in _configs(args):
        h2o = config.policy.startswith("as+h2o")
        row = replay_policy(config, args, recordings["as+h2o" if h2o else "paper"], gap_bytes)
        rows.append(row)
        print(_line(row), flush=True)
    result = {
        "command": _command(),
        "machine": describe_machine(),
        "shape": args.shape,
        "prefixes": args.prefixes,
        "sigma": args.sigma,
        "device_share": args.device_share,
        "host_share": args.host_share,
        "gap_bytes": gap_bytes,
        "shift": args.shift,
        "policies": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def _command() -> str:
    """This command without the path of its output."""
    options = sys.argv[1:]
    if "--json" in options:
        position = options.index("--json")
        del options[position : position + 2]
    return " ".join(["python -m bench replay", *options])


def _configs(args: argparse.Namespace) -> Iterator[ImpressConfig]:
    for policy in args.policies:
        for half_life in args.half_lives if policy == "paper" else args.half_lives[:1]:
            yield ImpressConfig(policy=policy, half_life=half_life)


def _windows(requests: Sequence[Request], count: int) -> Iterator[Sequence[Request]]:
    edges = np.linspace(0, len(requests), count + 1).astype(int)
    for start, stop in itertools.pairwise(edges):
        yield requests[start:stop]


def _hit_ratio(stats: ReadStats) -> float:
    return stats.important_device_bytes / max(stats.important_bytes, 1)


def _line(row: dict[str, Any]) -> str:
    name = row["policy"]
    if row["half_life"] is not None:
        name += f" (half-life {row['half_life']:g})"
    text = (
        f"{name:26} SSD {row['ssd_bytes'] / 1e9:.2f} GB, "
        f"to device {row['h2d_bytes'] / 1e9:.2f} GB, "
        f"chunks: {row['chunks_accessed'] / 1e3:.0f}k accessed, "
        f"{row['selected_chunks'] / 1e3:.0f}k for selections, "
        f"{row['chunks_loaded'] / 1e3:.0f}k loaded; hits: device {row['device_hit_ratio']:.1%}, "
        f"host {row['host_hit_ratio']:.1%}, important {row['important_device_hit_ratio']:.1%}; "
        f"{row['seconds_per_million_accesses']:.1f} s per million accesses, "
        f"management {row['management_share']:.2%} of the KVs"
    )
    if len(row["windows"]) > 1:
        text += "  windows " + " ".join(f"{ratio:.0%}" for ratio in row["windows"])
    return text


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--recording", type=Path, default=RECORDINGS / "impress.npz")
    add("--recording-h2o", type=Path, default=RECORDINGS / "as+h2o.npz")
    add("--shape", choices=SHAPES, default="opt-6.7b")
    add("--policies", type=lambda text: text.split(","), default=list(POLICIES))
    add("--prefixes", type=int, default=64, help="stored prefixes; recorded ones are repeated")
    add("--requests", type=int, default=400, help="measured requests")
    add("--warmup", type=int, default=200, help="requests before reordering, and again after it")
    add("--sigma", type=float, default=0.15, help="of the popularity, as a share of the prefixes")
    add("--device-share", type=float, default=0.06, help="device cache as a share of all KVs")
    add("--host-share", type=float, default=0.12, help="host cache as a share of all KVs")
    add("--ssd-mbps", type=float, default=3000.0, help="modelled bandwidth")
    add("--ssd-piece-us", type=float, default=5.0, help="modelled time of one more piece")
    half_life = [ImpressConfig().half_life]
    add("--half-lives", type=_floats, default=half_life, help="of paper, in requests, 0 = never")
    add("--shift", action="store_true", help="popularity moves to other prefixes half-way")
    add("--windows", type=int, default=1, help="parts of the trace to give hit ratios for")
    add("--seed", type=int, default=1)
    add("--json", type=Path)
    add(
        "--as-recorded",
        action="store_true",
        help="the recorded requests in their order; the first half is the warm-up",
    )
    args = parser.parse_args()
    if args.as_recorded:
        args.prefixes = len(load_recording(args.recording).questions)
    return args


def _floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
