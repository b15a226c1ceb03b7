"""Which eviction policy of SGLang's tree keeps most of what is asked for again, without a model.

The blocks of a trace are tokens in a tree of SGLang's own (Python core), in a pool with room for a
share of those that are asked for again. Figures are of blocks that were found, in percent of those
that an endless pool would have. Requests come one after the other; nothing is computed or stored.
The policies are SGLang's, and `score`: frequency, where an access counts half after --half-life
requests, as in `--impress-policy paper`.

  few-shot    prefixes of 8 blocks with a question each, of a popularity that is normal
  FILE        requests as lines (`hash_ids`), as Mooncake publishes them
  FOLDER      sessions as files (`requests` with `t` and `hash_ids`), which begin in half an hour
"""

from __future__ import annotations

import argparse
import json
import random
from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from bench.core.options import SEED, Option
from bench.core.report import Result, Table, plain
from bench.traffic.sessions import read_sessions
from impress_sglang.integration.paper.eviction import ScoreEviction
from impress_sglang.management.stored import StoredMatch

FEW_SHOT_BLOCKS = 8
SESSION_SECONDS = 1800.0
SCORE = "score"
OPTIONS = (
    Option("trace", "", "a file or a folder (few-shot prefixes)", parse=Path, repeated=True),
    Option("policies", ("lru", "lfu", "slru", SCORE), "to compare"),
    Option("shares", (0.05, 0.1, 0.2, 0.4), "room for so many of them", quick=(0.2,)),
    Option("prefixes", 48, "few-shot prefixes"),
    Option("requests", 4000, "for few-shot prefixes", quick=200),
    Option("half-life", 200.0, "of the score, in requests"),
    SEED,
)
Blocks = tuple[int, ...]


class Replay:
    """A tree of SGLang's, and how many blocks were there when they were asked for."""

    def __init__(self, policy: str, room: int, half_life: float) -> None:
        self._allocator = TokenToKVPoolAllocator(room, torch.float32, "cpu", None, False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(1, 1, "cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=self._allocator,
            page_size=1,
            eviction_policy="lru" if policy == SCORE else policy,
            tree_components=(ComponentType.FULL,),
            tree_core_backend="python",
        )
        self._cache = UnifiedRadixCache(params)
        self._score: ScoreEviction | None = None
        if policy == SCORE:
            self._score = ScoreEviction(half_life, 1.0)
            self._cache.tree_core.eviction_strategy = self._score
        self.found = 0

    def ask(self, blocks: Blocks) -> None:
        """A request: what is there of its blocks is found, and the others are computed."""
        cache, key = self._cache, RadixKey(array("q", blocks))
        match = cache.match_prefix(MatchPrefixParams(key=key))
        found, hold = int(match.device_prefix_len), cache.lock(match.last_device_node)
        self.found += found
        missing = len(blocks) - found - self._allocator.available_size()
        if missing > 0:
            cache.evict(EvictParams(num_tokens=missing))
        slots = self._allocator.alloc(len(blocks) - found)
        assert slots is not None, "there is room for each request"
        value = torch.cat([cache.path_device_indices(hold.node)[:found].long(), slots.long()])
        # As SGLang does when a request ends; it counts hits there.
        cache.insert(InsertParams(key=key, value=value, prev_prefix_len=found))
        cache.unlock(hold)
        if self._score is not None:
            match = cache.match_prefix(MatchPrefixParams(key=key))
            node = cache.tree_core.node_by_id(match.last_device_node)
            self._score.note_request(node, int(match.device_prefix_len), StoredMatch())


def run(args: argparse.Namespace) -> Result:
    """Replay all traces with all policies in all rooms."""
    if args.trace:
        traces = {path.stem: read_trace(path, args.seed) for path in args.trace}
    else:
        traces = {"few-shot": few_shot(args.prefixes, args.requests, args.seed)}
    rows = []
    for name, trace in traces.items():
        counts = count_blocks(trace)
        again = sum(count > 1 for count in counts)
        for share in args.shares:
            room = max(int(share * again), max(map(len, trace)))
            row = {"trace": name, "requests": len(trace), "again": again, "room": room}
            for policy in args.policies:
                replay = Replay(policy, room, args.half_life)
                for blocks in trace:
                    replay.ask(blocks)
                row[policy] = round(100 * replay.found / (sum(counts) - len(counts)), 1)
            rows.append(row)
    return Result({"rows": rows}, [Table(plain(*rows[0]), rows)])


def few_shot(prefixes: int, count: int, seed: int) -> list[Blocks]:
    """Each request is for a prefix, of a normal popularity, and a block of its own."""
    chance, trace = random.Random(f"{seed} eviction"), []
    while len(trace) < count:
        number = round(chance.gauss((prefixes - 1) / 2, prefixes / 4))
        if 0 <= number < prefixes:
            first = number * FEW_SHOT_BLOCKS
            own = prefixes * FEW_SHOT_BLOCKS + len(trace)
            trace.append((*range(first, first + FEW_SHOT_BLOCKS), own))
    return trace


def read_trace(path: Path, seed: int) -> list[Blocks]:
    """The requests of a file, or of the sessions in a folder, in their order."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines()
        return [tuple(json.loads(line)["hash_ids"]) for line in lines]
    chance, timed = random.Random(f"{seed} sessions"), []
    for session in read_sessions(path):
        begins = chance.random() * SESSION_SECONDS
        timed += [(begins + turn.at, turn.blocks) for turn in session]
    return [blocks for _, blocks in sorted(timed)]


def count_blocks(trace: Sequence[Blocks]) -> list[int]:
    """How often each block is asked for; one behind different blocks is another one."""
    numbers: dict[tuple[int, int], int] = {}
    counts: list[int] = []
    for blocks in trace:
        before = -1
        for block in blocks:
            before = numbers.setdefault((before, block), len(numbers))
            if before == len(counts):
                counts.append(0)
            counts[before] += 1
    return counts
