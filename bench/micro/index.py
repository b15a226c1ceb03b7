"""What the store's index costs: to open it, and of the scheduler's thread at each request.

Stores of --segments are made by the store itself, of a model whose KVs take 16 bytes per token:
turns of conversations below system prompts, and prompts that leave an earlier one anywhere. The
index depends on tokens and files, not on KVs. Nothing is synced, and all is in the page cache.
Times of one thread, in milliseconds but for those of opening; of requests the median and the 99th
percentile, and the same on the thread's clock, which other work on the machine does not move:

    open      files and index are there, in seconds
    rebuild   the same without the index, in seconds: all headers are read
    collect   Python looks for garbage in all of the process; requests wait for that
    match     of a stored prompt and a question
    offer     of a prompt, while there is room
    evict     of a prompt to a store that is full: others are evicted first

Then what the caches remember of --read segments of 8,192 tokens of Llama-3-8B in codes. Each is
read whole, but for its bytes; the caches hold 4 GB of them:

    attach    the longest time until the chunks of a segment have their ids
    access    the longest time to place the chunks of a layer
    bytes     resident memory per chunk
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from bench.core.options import KEEP, SEED, Option
from bench.core.report import Result, Table, plain
from bench.core.session import BenchFailed, step, work_folder
from impress_sglang.config import ImpressConfig
from impress_sglang.management.store import PrefixStore
from impress_sglang.management.writing import Offer, StoreOutcome
from impress_sglang.precision.layout import CodeLayout
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import BLOCK_BYTES, KVShape
from impress_sglang.storage.segment import Tokens
from impress_sglang.tiers.placement import Placement
from impress_sglang.tiers.rules import ImportanceScore
from impress_sglang.transfer.coded_span import cached_pages, most_pages

OPTIONS = (
    Option("segments", (1000, 10000, 100000), "of the stores", quick=(200,)),
    Option("requests", 2000, "of each kind that are measured", quick=20),
    Option("read", (300, 600), "segments that the caches remember", quick=(3,)),
    SEED,
    KEEP,
)
SHAPE = KVShape(1, 1, 1, 4, 4, torch.float16, ())
IDENTITY = "0" * 32
PLENTY_GB = 1000.0
VOCAB = 32000
SYSTEM_PROMPTS, CONVERSATIONS = 20, 200
SHORTEST, LONGEST = 64, 400
QUESTION_TOKENS = 32
# Of Llama-3-8B, and what its caches hold.
LAYERS, READ = 32, CodeLayout(8192, 8, 128, 128, BLOCK_BYTES)
CACHED_PAGES = 500_000
# Offers between two waits for the writer.
TOGETHER = 500


class _Unsynced(FileSystem):
    """Files need not outlive the machine's next failure."""

    def supports_direct_io(self, path: Path) -> bool:
        """Not to wait for the drive."""
        return False

    def sync(self, descriptor: int) -> None:
        """Leave it in the page cache."""

    def sync_directory(self, path: Path) -> None:
        """Leave it in the page cache."""


def run(args: argparse.Namespace) -> Result:
    """Measure stores of all sizes."""
    torch.set_num_threads(1)
    with work_folder(args.keep) as folder:
        rows = [_measure(args, folder / str(count), count) for count in args.segments]
    read = [measure_chunks(count) for count in args.read]
    tables = [Table(plain(*own[0]), own) for own in (rows, read)]
    return Result({"rows": rows, "read": read}, tables)


def measure_chunks(count: int) -> dict[str, float]:
    """What the placement takes for chunks of so many segments, which are all read once."""
    pages = cached_pages((READ,) * LAYERS)
    whole = np.ones(len(pages) // LAYERS)
    placement = Placement(
        ImportanceScore(ImpressConfig().half_life),
        device_pages=CACHED_PAGES,
        host_pages=CACHED_PAGES,
        max_chunk_pages=most_pages(READ),
    )
    process, attach, access = psutil.Process(), 0.0, 0.0
    before = process.memory_info().rss
    for number in range(count):
        attach = max(attach, _time(lambda: placement.attach(pages)))
        placement.advance()
        for ids in np.split(np.arange(len(pages)) + number * len(pages), LAYERS):
            access = max(access, _time(lambda ids=ids: placement.access(ids, whole)))
    chunks = count * len(pages)
    return {
        "segments": count,
        "chunks": chunks,
        "attach ms": round(attach * 1e3, 2),
        "access ms": round(access * 1e3, 2),
        "bytes": round((process.memory_info().rss - before) / chunks, 1),
    }


def _measure(args: argparse.Namespace, folder: Path, count: int) -> dict[str, Any]:
    prompts = _prompts(np.random.default_rng(args.seed))
    store = _open(folder)
    with step(f"writing {count} segments"):
        stored = _fill(store, prompts, count)
    store.close()
    del store
    # A new process would not have this one's garbage.
    gc.collect()
    began = time.perf_counter()
    store = _open(folder)
    opened = time.perf_counter() - began
    if len(store.tree) != count:
        raise BenchFailed(f"of {count} segments {len(store.tree)} were found again")
    rng = np.random.default_rng(args.seed)
    asked = [stored[place] for place in rng.integers(len(stored), size=args.requests)]
    asked = [np.concatenate([own, _draw(rng, QUESTION_TOKENS)]) for own in asked]
    row = {"segments": count, "open s": round(opened, 2)}
    row["collect ms"] = round(_time(gc.collect) * 1e3, 1)
    row |= _milliseconds("match", [_times(lambda own=own: store.match("", own)) for own in asked])
    row |= _milliseconds("offer", [_offer(store, next(prompts)) for _ in range(args.requests)])
    used = store.summary()["used_bytes"]
    store.close()
    store = _open(folder, used / 1e9)
    row |= _milliseconds("evict", [_offer(store, next(prompts)) for _ in range(args.requests)])
    if store.stats.segments_evicted < args.requests // 2:
        raise BenchFailed("the store was not full")
    store.close()
    next(folder.glob("*/catalog.sqlite")).unlink()
    began = time.perf_counter()
    store = _open(folder)
    row["rebuild s"] = round(time.perf_counter() - began, 2)
    store.close()
    return row


def _prompts(rng: np.random.Generator) -> Iterator[Tokens]:
    """Prompts without end, each with something that none before it had."""
    systems = [_draw(rng, rng.integers(SHORTEST, LONGEST)) for _ in range(SYSTEM_PROMPTS)]
    yield from systems
    under_way = [systems[0]] * CONVERSATIONS
    while True:
        place, chance = rng.integers(CONVERSATIONS), rng.random()
        above = under_way[place]
        if chance < 0.15:
            above = systems[rng.integers(SYSTEM_PROMPTS)]
        elif chance < 0.35:
            above = above[: rng.integers(1, len(above))]
        under_way[place] = np.concatenate([above, _draw(rng, rng.integers(SHORTEST, LONGEST))])
        yield under_way[place]


def _draw(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(VOCAB, size=count, dtype=np.int32)


def _open(folder: Path, quota_gb: float = PLENTY_GB) -> PrefixStore:
    config = ImpressConfig(
        ssd_dir=str(folder), ssd_gb=quota_gb, min_free_gb=0.0, device_gb=0.0, host_gb=0.0
    )
    return PrefixStore(config, IDENTITY, SHAPE, files=_Unsynced())


def _fill(store: PrefixStore, prompts: Iterator[Tokens], count: int) -> list[Tokens]:
    stored = []
    while len(stored) < count:
        stored.append(next(prompts))
        _offer(store, stored[-1], wait=len(stored) % TOGETHER == 0)
    return stored


def _offer(store: PrefixStore, tokens: Tokens, *, wait: bool = True) -> tuple[float, float]:
    kvs = torch.zeros(len(tokens), 1, 4, dtype=torch.float16)
    offer = Offer(
        tokens,
        lambda start: lambda layer: (kvs[start:], kvs[start:]),
        on_done=lambda: None,
        abandon=lambda: None,
        min_tokens=1,
    )
    seconds = _times(lambda: _check(store.writes.offer("", offer)))
    if wait:
        store.writes.drain()
    return seconds


def _check(outcome: StoreOutcome) -> None:
    if outcome is not StoreOutcome.ACCEPTED:
        raise BenchFailed(f"an offer was {outcome.value}")


def _time(work: Callable[[], object]) -> float:
    return _times(work)[0]


def _times(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the wall's clock, and on the thread's."""
    began, own = time.perf_counter(), time.thread_time()
    work()
    own = time.thread_time() - own
    return time.perf_counter() - began, own


def _milliseconds(name: str, times: list[tuple[float, float]]) -> dict[str, float]:
    (median, own_median), (late, own_late) = np.percentile(times, (50, 99), axis=0) * 1e3
    return {
        f"{name} ms": round(median, 3),
        f"{name} p99": round(late, 3),
        f"{name} cpu": round(own_median, 3),
        f"{name} cpu p99": round(own_late, 3),
    }
