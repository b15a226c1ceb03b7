"""What finding stored text anywhere in a prompt takes of the scheduler's thread, and of memory.

Segments of random tokens are indexed (`management.content`); then prompts are scanned that have
nothing in common with them, consist of pieces of them in another order, or are the worst that
somebody could send. Each prompt is another one, so that what the table has of it is in no cache of
the processor. Times are on the clock of the thread, which does not count what other work takes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from bench.core.options import SEED, Option
from bench.core.report import Result, Table, plain
from impress_sglang.management.content import SAME_WINDOWS, WINDOW_TOKENS, ContentIndex
from impress_sglang.management.stored import SegmentState, StoredSegment
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.segment import SegmentInfo, Tokens

OPTIONS = (
    Option("windows", 1_000_000, "that are indexed", quick=50_000),
    Option("tokens", 10_000, "of a prompt"),
    Option("piece", 512, "tokens of a piece that is stored"),
    Option("prompts", 100, "of each kind", quick=10),
    SEED,
)
SEGMENT_TOKENS = 4096
VOCABULARY = 50_000
# Llama-3-8B in 16 bits.
SHAPE = KVShape(32, 32, 8, 128, 128, torch.bfloat16, (), True)


def run(args: argparse.Namespace) -> Result:
    """Index, and scan."""
    rng, index, adding = np.random.default_rng(args.seed), ContentIndex(), []
    segments = []
    for number in range(args.windows * WINDOW_TOKENS // SEGMENT_TOKENS):
        segment = _segment(str(number), _tokens(rng, SEGMENT_TOKENS))
        segments.append(segment.info.tokens)
        began = time.thread_time()
        index.add(segment)
        adding.append((time.thread_time() - began) * 1e3)

    def pieces() -> Tokens:
        starts = rng.integers(0, SEGMENT_TOKENS - args.piece, args.tokens // args.piece + 1)
        own = [segments[rng.integers(len(segments))][at : at + args.piece] for at in starts]
        return np.concatenate(own)[: args.tokens]

    def shuffled() -> Tokens:
        lengths = rng.integers(WINDOW_TOKENS, 2 * WINDOW_TOKENS, args.tokens // WINDOW_TOKENS)
        starts = rng.integers(0, SEGMENT_TOKENS // WINDOW_TOKENS - 1, len(lengths)) * WINDOW_TOKENS
        own = [segments[0][at:][:length] for at, length in zip(starts, lengths, strict=True)]
        return np.concatenate(own)[: args.tokens]

    for number in range(SAME_WINDOWS):
        index.add(_segment(f"short {number}", np.zeros(WINDOW_TOKENS, np.int32)))
        unready = _segment(f"unready {number}", np.ones(args.tokens, np.int32))
        unready.state = SegmentState.PENDING
        index.add(unready)
    kinds: dict[str, Callable[[], Tokens]] = {
        "nothing stored": lambda: _tokens(rng, args.tokens),
        "all in pieces": pieces,
        "one text in short pieces": shuffled,
        "one token, stored in windows": lambda: np.zeros(args.tokens, np.int32),
        "one token, not ready": lambda: np.ones(args.tokens, np.int32),
    }
    rows = []
    for name, make in kinds.items():
        times, runs = [], 0
        for prompt in [make() for _ in range(args.prompts)]:
            began = time.thread_time()
            runs = len(index.find("", prompt).runs)
            times.append((time.thread_time() - began) * 1e3)
        slowest = round(max(times), 3)
        rows.append(
            {"prompt": name, "runs": runs, "ms": round(statistics.median(times), 3), "max": slowest}
        )
    window_bytes = WINDOW_TOKENS * SHAPE.num_layers * SHAPE.num_kv_heads * 2 * SHAPE.key_dim * 2
    memory = {
        "windows": len(index),
        "table_bytes": index.num_bytes,
        "share_of_kvs": index.num_bytes / (len(index) * window_bytes),
        "add_ms": round(statistics.median(adding), 4),
        "add_max_ms": round(max(adding), 3),
    }
    note = (
        f"{len(index)} windows in {index.num_bytes / 1e6:.0f} MB, "
        f"{memory['share_of_kvs']:.4%} of KVs as of Llama-3-8B; a segment of {SEGMENT_TOKENS} "
        f"tokens is added in {memory['add_ms']} ms, {memory['add_max_ms']} at most"
    )
    table = Table(plain("prompt", "runs", "ms", "max"), rows)
    return Result({"rows": rows, **memory}, [table], notes=[note])


def _tokens(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(0, VOCABULARY, count, dtype=np.int32)


def _segment(name: str, tokens: Tokens) -> StoredSegment:
    return StoredSegment(SegmentInfo(name, "", "", "", 0, tokens, SHAPE, 64), 0)
