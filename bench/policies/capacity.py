"""What a store of so many terabytes is worth on published traces, in full and without a model.

Each request of --trace is matched, loaded and offered in the product's own tree, quota, counts of
prompts, writes and host cache; only no files are written. Rates are stated: a GPU computes, a drive
reads, a bus copies, and a request loads only what takes no longer than computing it. Prompts are
computed one after the other on each of two GPUs, and loaded one after the other; nothing stays in a
pool, and answers take no time. A token of Llama-3-8B has 128 KiB, and a GPU computes 30,000 per
second. In shares of these bytes, --kinds of files are

  exact         1, all of it read (--impress-keep exact)
  6 bits        codes of .41 beside exact KVs (both)
  basis         codes of .26 beside exact KVs
  ... alone     the codes alone (codes); with 3 bits .20

Columns, tokens in percent of those of all prompts:

  loaded        not computed, because they came from the store
  lru           found, if every block of a prompt were stored at once and the oldest left first
  bound         found at most, by anything: blocks of one size that Belady's rule chooses, each for
                itself though it is of no use without those before it; a block that is not whole
                takes no room
  endless       found, if nothing ever left
  idle, queued  TTFT in ms of a request alone, and with those before it: p50 and p99
  crowded       segments that left, and prompts for which there was no room
  written       bytes per token of a prompt; tb a day, at the traffic of the first nine tenths of
                the trace; lru tb a day: of the baseline
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import sys
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bench.core.options import SEED, Option, one_of
from bench.core.report import Result, Row, Table
from bench.core.session import step
from bench.traffic.sessions import TRACE, read_sessions
from impress_sglang.config import EXACT_BITS, ImpressConfig
from impress_sglang.serving.kv_class import KVClass
from impress_sglang.serving.prefix_frequency import PrefixFrequencySketch
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import EXACT
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.lookahead import LookAhead
from impress_sglang.store.policies import make_policy
from impress_sglang.store.quota import Quota, WriteBudget
from impress_sglang.store.stored import StoredMatch
from impress_sglang.store.tree import StoredTree
from impress_sglang.store.writing import Offer, SegmentWrites, StoreOutcome
from impress_sglang.tiers.placement import Placement, Tier

# In which sessions without a common clock begin.
SPREAD_SECONDS = 1800.0


class Model(NamedTuple):
    """Bytes of a token's exact KVs, and tokens that a GPU computes per second."""

    token_bytes: int
    per_second: float


class Kind(NamedTuple):
    """What a request reads of a token and what its file has, in shares of exact KVs."""

    read: float
    file: float
    bits: float = 6.0


LLAMA = Model(131072, 30e3)
KINDS = {
    "exact": Kind(1.0, 1.0, EXACT_BITS),
    "6 bits": Kind(0.41, 1.41),
    "basis": Kind(0.26, 1.26),
    "6 bits alone": Kind(0.41, 0.41),
    "basis alone": Kind(0.26, 0.26),
    "3 bits alone": Kind(0.20, 0.20),
}
OPTIONS = (
    TRACE,
    Option("kinds", tuple(KINDS), "of these", parse=one_of(KINDS)),
    Option("tb", (0.1, 0.3, 1.0, 3.0, 10.0), "of the store", quick=(0.005, 10.0)),
    Option("write-after", (2, 1), "of the server", quick=(2,)),
    Option("depth", 8, "--impress-approximation-depth of the server"),
    SEED,
)
# That compute; the drive and the bus have bytes per second.
GPUS, DRIVE, HOST_GB, BUS = 2, 7e9, 64.0, 50e9


class Ask(NamedTuple):
    """A request of so many tokens at a time, and its text with the answer.

    `blocks`: numbers of the text's blocks of `size` tokens, int64, the same for the same text
    behind the same one. `text_tokens`: of the text; the trace tells the answer where the next
    request of the session begins with it.
    """

    at: float
    blocks: npt.NDArray[np.int64]
    size: int
    prompt_tokens: int
    text_tokens: int

    def text(self) -> Tokens:
        """Tokens, int32 [n]: of two blocks none is the same."""
        places = self.blocks[:, None] * self.size + np.arange(self.size)
        return places.astype(np.int32).ravel()[: self.text_tokens]

    def in_blocks(self) -> list[tuple[int, int, bool]]:
        """Blocks, how many of their tokens are of the prompt, and whether the text has all."""
        begins = range(0, min(self.text_tokens, len(self.blocks) * self.size), self.size)
        asked = [min(max(self.prompt_tokens - at, 0), self.size) for at in begins]
        whole = [at + self.size <= self.text_tokens for at in begins]
        return list(zip(self.blocks.tolist(), asked, whole, strict=False))


def read_asks(path: Path, seed: int) -> list[Ask]:
    """The requests of a trace in their order; sessions that begin at 0 do so at random."""
    chance, numbers = random.Random(f"{seed} sessions"), dict[tuple[int, int], int]()
    asks: list[Ask] = []
    for session in read_sessions(path):
        begins = 0.0 if session[0].at else chance.random() * SPREAD_SECONDS
        paths = [_numbered(turn.blocks, numbers) for turn in session]
        for turn, path, after in zip(session, paths, [*paths[1:], None], strict=True):
            told, count = turn.prompt_tokens, len(path) - 1
            if after is not None and np.array_equal(path[:count], after[:count]):
                path, told = after, told + turn.answer_tokens
            asks.append(Ask(begins + turn.at, path, turn.block_tokens, turn.prompt_tokens, told))
    return sorted(asks, key=lambda ask: ask.at)


def _numbered(blocks: Sequence[int], numbers: dict[tuple[int, int], int]) -> npt.NDArray[np.int64]:
    before, found = -1, []
    for block in blocks:
        before = numbers.setdefault((before, block), len(numbers))
        found.append(before)
    return np.array(found)


class _NoFiles:
    """What the store asks of who writes its files, and of what else knows the disk, without one."""

    writable, has_news, free_bytes = True, False, math.inf
    quarantined_bytes, unused_bytes, blocked_bytes = 0, 0, 0
    num_bytes, folders = 0, ()
    other_stores = MappingProxyType[Any, int]({})
    suspects: dict[str, Any]
    namespace, pins = str, ()

    def get(self, _: str) -> None: ...

    def delete(self, _: Any) -> None: ...

    remove_foreign = delete

    def blocked_removals(self) -> frozenset[str]:
        return frozenset()

    def write(self) -> None: ...

    def submit(self, *_: Any) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def is_open(self, _: str) -> bool:
        """Nobody reads."""
        return False

    def on_attached(self, _: Any) -> None:
        """No other server builds on it."""


class Store:
    """The product's store with the sizes of files instead of files, and its cache on the host."""

    def __init__(self, config: ImpressConfig, model: Model, kind: Kind) -> None:
        self.token_bytes = model.token_bytes * kind.read
        self.tree = StoredTree()
        self._config, self._own = config, KVClass(kind.bits)
        self._sights = PrefixFrequencySketch(config.write_after) if config.write_after > 1 else None
        self._page_bytes = config.chunk_tokens * self.token_bytes
        rule, pages = make_policy(config).replacement(), config.host_gb * 1e9 / self._page_bytes
        self._cache = Placement(rule, device_pages=0, host_pages=int(pages), max_chunk_pages=1)
        # Of each segment the first of its chunks in the cache, and their number.
        self._places: dict[str, tuple[int, int]] = {}
        none: Any = _NoFiles()
        none.tree, none.worker, none.health, none.meter = self.tree, none, none, none
        none.peers, none.unattached, none.bucket = none, none, None
        self.quota = Quota(config, none, none, LookAhead(), WriteBudget())
        # Keys and values of 2 bytes in one layer and head, as many as a token's file has.
        dim = round(model.token_bytes * kind.file / 4)
        shape = KVShape(1, 1, 1, dim, dim, torch.float16, ())
        none.retire, none.suspects = self._forget, {}
        self._writes = SegmentWrites(config, "0" * 32, shape, none, self.quota, none, None)
        self.stats = self._writes.stats

    def sight(self, tokens: Tokens, first: int = 0) -> int:
        """Count a text, but for its `first` tokens; how many of these are worth storing."""
        return sys.maxsize if self._sights is None else self._sights.count_prefix("", tokens, first)

    def find(self, tokens: Tokens) -> StoredMatch:
        """What is stored of a prompt and long enough to be loaded."""
        least = self._own.worst(self._config.approximation_depth)
        match = self.tree.match("", tokens, min_quality=least)
        return match if match.num_tokens >= self._config.min_prefix_tokens else StoredMatch()

    def on_drive(self, match: StoredMatch) -> float:
        """Bytes of a match that are not in the cache."""
        tiers = [self._cache.tiers(int(ids[0]), len(ids)) for ids in self._ids(match)]
        return sum(int((placed == Tier.SSD).sum()) for placed in tiers) * self._page_bytes

    def load(self, match: StoredMatch) -> None:
        """Use a match, of which the cache takes what its rule wants."""
        self.tree.touch(match)
        self._cache.advance()
        for ids in self._ids(match):
            self._cache.access(ids, np.ones(len(ids)))

    def offer(self, tokens: Tokens, loaded: StoredMatch) -> None:
        """Store what was computed behind a match, unless that rests on too many loads."""
        quality = EXACT
        if loaded.spans and not self._own.exact:
            quality = loaded.quality.after(self._own.bits)
        if quality.depth > self._config.approximation_depth:
            return
        first = loaded.num_tokens if quality.depth else 0
        if len(tokens) >= max(self._config.min_prefix_tokens, first + 1):
            nothing, least = lambda *_: None, self._config.chunk_tokens
            offer = Offer(tokens, _no_layers, nothing, nothing, least, quality, first)
            outcome = self._writes.offer("", offer)
            assert outcome is not StoreOutcome.PREFIX_MISSING
            self._writes.poll()

    def _ids(self, match: StoredMatch) -> list[npt.NDArray[np.int64]]:
        """Of each span its chunks, by their numbers in the cache."""
        found, size = [], self._config.chunk_tokens
        for span in match.spans:
            name = span.segment.segment_id
            if name not in self._places:
                pages = np.ones(-(-span.segment.info.num_tokens // size), np.uint16)
                self._places[name] = self._cache.attach(pages), len(pages)
            base = self._places[name][0]
            found.append(np.arange(base + span.start // size, base + -(-span.stop // size)))
        return found

    def _forget(self, segment_id: str) -> None:
        if (place := self._places.pop(segment_id, None)) is not None:
            self._cache.detach(*place)


def _no_layers(start: int) -> Any:
    return lambda layer: (torch.empty(0), torch.empty(0))


def replay(asks: Sequence[Ask], store: Store, model: Model) -> Row:
    """Ask for all prompts; what was loaded, how long it took, and what was written."""
    free_at, drive_at = [0.0] * GPUS, 0.0
    loaded, idle, queued = 0, [], []
    for ask in asks:
        text = ask.text()
        prompt = text[: ask.prompt_tokens]
        worth, match = store.sight(prompt), store.find(prompt)
        reading = store.on_drive(match) / DRIVE
        copying = match.num_tokens * store.token_bytes / BUS
        if reading + copying > match.num_tokens / model.per_second:
            match, reading, copying = StoredMatch(), 0.0, 0.0
        store.load(match)
        loaded += match.num_tokens
        computing = (ask.prompt_tokens - match.num_tokens) / model.per_second
        idle.append(reading + copying + computing)
        ready = ask.at
        if reading:
            ready = drive_at = max(ask.at, drive_at) + reading
        ended = max(ready + copying, heapq.heappop(free_at)) + computing
        heapq.heappush(free_at, ended)
        queued.append(ended - ask.at)
        store.offer(text[:worth], match)
        store.sight(text, len(prompt))
    prompts = sum(ask.prompt_tokens for ask in asks)
    return {
        "loaded": _percent(loaded, prompts),
        "idle": _milliseconds(idle),
        "queued": _milliseconds(queued),
        "crowded": store.stats.segments_evicted + store.stats.offers_without_space,
        "written": round(store.stats.bytes_written / prompts),
    }


def lru(asks: Sequence[Ask], room: float) -> tuple[int, int]:
    """Tokens that are found in a store of so many blocks that keeps the last ones, and stored."""
    there, found, stored = OrderedDict[int, None](), 0, 0
    for ask in asks:
        blocks = ask.in_blocks()
        for block, tokens, _ in blocks:
            if block not in there:
                break
            found += tokens
        # A block is of no use without those before it, so these leave later.
        for block, *_ in reversed(blocks):
            stored += ask.size if block not in there else 0
            there[block] = None
            there.move_to_end(block)
        while len(there) > room:
            there.popitem(last=False)
    return found, stored


def bound(asks: Sequence[Ask], room: float) -> int:
    """Tokens that are found at most in a store of so many blocks."""
    accesses = [access for ask in asks for access in ask.in_blocks()]
    following, later = [0] * len(accesses), dict[int, int]()
    for at in range(len(accesses) - 1, -1, -1):
        following[at] = later.get(accesses[at][0], len(accesses))
        later[accesses[at][0]] = at
    there, order, part, found = dict[int, int](), list[tuple[int, int]](), set[int](), 0
    for at, (block, tokens, whole) in enumerate(accesses):
        if block in there or block in part:
            found += tokens
        there.pop(block, None)
        part.discard(block)
        if not whole:
            part.add(block)
        elif following[at] < len(accesses):
            there[block] = following[at]
            heapq.heappush(order, (-following[at], block))
            while len(there) > room:
                use, last = heapq.heappop(order)
                if there.get(last) == -use:
                    del there[last]
    return found


def tokens_a_day(asks: Sequence[Ask]) -> float:
    """Tokens of prompts in a day as busy as the first nine tenths of the requests."""
    busy = asks[: max(1, len(asks) * 9 // 10)]
    return sum(ask.prompt_tokens for ask in busy) / max(busy[-1].at, 1.0) * 86_400


def run(args: argparse.Namespace) -> Result:
    """Replay the trace with all kinds of files in all rooms."""
    asks, model = read_asks(args.trace, args.seed), LLAMA
    prompts, a_day = sum(ask.prompt_tokens for ask in asks), tokens_a_day(asks)
    compared: dict[tuple[float, float], Row] = {}
    rows: list[Row] = []
    for after, name, tb in itertools.product(args.write_after, args.kinds, sorted(args.tb)):
        kind, row = KINDS[name], {"kind": name, "write_after": after, "tb": tb}
        config = ImpressConfig(
            ssd_gb=tb * 1e3,
            min_free_gb=0.0,
            write_after=after,
            approximation_depth=args.depth,
            host_gb=HOST_GB,
        )
        with step(f"{name}, stored at sight {after}, {tb:g} TB"):
            if rows and rows[-1] | row == rows[-1] | {"tb": tb, "crowded": 0}:
                # All had room in a smaller store.
                row = rows[-1] | row
            else:
                row |= replay(asks, Store(config, model, kind), model)
                row["tb_a_day"] = round(row["written"] * a_day / 1e12, 2)
            if (kind.file, tb) not in compared:
                token = model.token_bytes * kind.file
                found, stored = lru(asks, room := int(tb * 1e12 / token / asks[0].size))
                compared[kind.file, tb] = {
                    "lru": _percent(found, prompts),
                    "lru_tb_a_day": round(stored * token * a_day / prompts / 1e12, 2),
                    "bound": _percent(bound(asks, room), prompts),
                }
        rows.append(row | compared[kind.file, tb])
    told: Row = {"trace": args.trace.stem, "requests": len(asks), "prompt_tokens": prompts}
    told |= {"tokens_a_day": round(a_day), "endless": _percent(bound(asks, math.inf), prompts)}
    return Result(told | {"rows": rows}, [Table(rows, (*rows[0],), str(told))])


def _percent(part: float, of: float) -> float:
    return round(100 * part / of, 1)


def _milliseconds(seconds: Sequence[float]) -> list[int]:
    return [round(quantile * 1e3) for quantile in np.percentile(seconds, (50, 99)).tolist()]
