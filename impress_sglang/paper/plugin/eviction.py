"""Decides which resident prefix SGLang evicts first: one not waited for, with the lowest score.

SGLang's eviction strategies give each node of its tree a priority. Ours is the node's access
frequency x share of important tokens, as in the chunk caches, so that prefixes go first that are
seldom used or mostly unimportant: these cost least to load again. What running requests use is
locked, and never considered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.evict_policy import EvictionStrategy
from sglang.srt.mem_cache.radix_cache import RadixKey

from impress_sglang.store.lookahead import LookAhead
from impress_sglang.store.stored import StoredMatch, StoredSpan

_ATTRIBUTE = "_impress_use"


class _NodeUse:
    """Logarithm (base 2) of a node's forward-decayed frequency, and its important share."""

    __slots__ = ("log_frequency", "share")

    def __init__(self, log_frequency: float, share: float) -> None:
        self.log_frequency = log_frequency
        self.share = share


class Awaited:
    """What waiting requests will use of the device pool; SGLang evicts it last, if it must.

    Keeps for each request the node of SGLang's tree where its resident prefix ends. Nodes above
    need not be noted: only leaves are evicted.
    """

    def __init__(self, lookahead: LookAhead) -> None:
        """`lookahead` knows the turns of requests, and is told of the stored tokens they use."""
        self._lookahead = lookahead
        self._node_of: dict[str, Any] = {}
        self._rids_of: dict[Any, set[str]] = {}

    def __contains__(self, node: object) -> bool:
        return node in self._rids_of

    def turn(self, node: Any) -> int | None:
        """The next turn of a request whose resident prefix ends at `node`; None if none waits."""
        rids = self._rids_of.get(node)
        return None if rids is None else min(map(self._lookahead.turn, rids))

    def note(self, rid: str, node: Any, spans: Sequence[StoredSpan]) -> None:
        """Note that a waiting request will use the prefix up to `node`, and then these tokens."""
        self.note_resident(rid, node)
        self._lookahead.wait(rid, spans)

    def note_resident(self, rid: str, node: Any) -> None:
        """Note that a waiting request's resident prefix ends at `node`, which may be the root."""
        self._forget_resident(rid)
        if node.parent is not None:
            self._node_of[rid] = node
            self._rids_of.setdefault(node, set()).add(rid)

    def forget(self, rid: str) -> None:
        """Forget a request that was admitted or is gone."""
        self._forget_resident(rid)
        self._lookahead.stop_waiting(rid)

    def _forget_resident(self, rid: str) -> None:
        node = self._node_of.pop(rid, None)
        if node is not None:
            rids = self._rids_of[node]
            rids.remove(rid)
            if not rids:
                del self._rids_of[node]

    def move_up(self, node: Any) -> None:
        """Note that a node is evicted: prefixes that ended there now end at its parent."""
        for rid in tuple(self._rids_of.get(node, ())):
            self.note_resident(rid, node.parent)

    def clear(self) -> None:
        """Forget all requests, because the tree is empty."""
        self._node_of.clear()
        self._rids_of.clear()
        self._lookahead.clear()

    def check_integrity(self, page_size: int) -> None:
        """Check that the prefixes of waiting requests end at nodes of the tree.

        Raises:
            AssertionError: they do not, which is a bug.
        """
        assert sum(map(len, self._rids_of.values())) == len(self._node_of)
        for rid, node in self._node_of.items():
            assert rid in self._rids_of[node]
            assert node.parent.children[node.key.child_key(page_size)] is node
        self._lookahead.check_integrity()


def refresh_waiting(original: Callable[..., None], req: Any, tree_cache: Any) -> None:
    """Refresh the resident prefix of a waiting request, as SGLang does, and note where it ends.

    Replaces `original`, which walks the same path but does not say where it ends.
    """
    awaited = getattr(tree_cache, "awaited", None)
    if not isinstance(awaited, Awaited):
        original(req, tree_cache)
        return
    tokens = req.origin_input_ids + req.output_ids
    key = RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt)
    match = tree_cache.match_prefix(MatchPrefixParams(key=key))
    awaited.note_resident(req.rid, match.last_device_node)


class ScoreEviction(EvictionStrategy):
    """Evicts nodes not waited for first, by frequency x share; then the latest turn first."""

    def __init__(
        self,
        half_life: float,
        retention: float,
        turn_of: Callable[[Any], int | None] = lambda _: None,
    ) -> None:
        """An access counts half after `half_life` requests (0: it always counts in full).

        Tokens that were never probed count as important with probability `retention`, the share of
        tokens in any selection. `turn_of` is `Awaited.turn`.
        """
        self._turn_of = turn_of
        self._step = 1.0 / half_life if half_life else 0.0
        self._unknown = retention
        self._requests = 0

    def get_priority(self, node: Any) -> tuple[bool, float, float]:
        """The priority of a node; SGLang evicts the node with the lowest."""
        turn = self._turn_of(node)
        if turn is not None:
            # Within one turn, SGLang refreshes last what it will admit first.
            return True, -float(turn), node.last_access_time
        use = getattr(node, _ATTRIBUTE, None)
        if use is None:
            return False, -math.inf, node.last_access_time
        # The logarithm of the product gives the same order and never overflows.
        score = use.log_frequency + math.log2(max(use.share, 1e-9))
        return False, score, node.last_access_time

    def note_request(self, node: Any, resident_len: int, match: StoredMatch) -> None:
        """Note that a new request uses the path from the root to `node`, `resident_len` tokens.

        `match` is what the store has of the same tokens.
        """
        self._requests += 1
        chance = _chance_by_token(match, resident_len, self._unknown)
        stop = resident_len
        while node.parent is not None:
            start = stop - len(node.key)
            self._count(node, float(chance[start:stop].mean()))
            node, stop = node.parent, start

    def _count(self, node: Any, share: float) -> None:
        use = getattr(node, _ATTRIBUTE, None)
        if use is None:
            # The upper half of a split node: every access to nodes below went through it.
            below = (getattr(child, _ATTRIBUTE, None) for child in node.children.values())
            known = (use.log_frequency for use in below if use is not None)
            use = _NodeUse(max(known, default=-math.inf), share)
            setattr(node, _ATTRIBUTE, use)
        use.log_frequency = float(np.logaddexp2(use.log_frequency, self._requests * self._step))
        use.share = share


def _chance_by_token(
    match: StoredMatch, num_tokens: int, unknown: float
) -> npt.NDArray[np.float32]:
    """How likely each of the first `num_tokens` is selected, float32."""
    chance = np.full(num_tokens, unknown, np.float32)
    first = 0
    for span in match.spans:
        history, stop = span.segment.history, min(first + len(span), num_tokens)
        if history is not None and stop > first:
            part = slice(span.start, span.start + stop - first)
            known = history.accesses[part] > 0
            chance[first:stop][known] = history.token_means()[part][known]
        first += len(span)
    return chance
