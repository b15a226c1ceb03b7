"""Which resident prefix SGLang evicts first: the one with the lowest score, as in the chunk caches.

SGLang's eviction-strategy seam asks for a priority per node of its tree. Ours is the node's access
frequency x share of important tokens, so that what goes first is what is seldom used or mostly does
not matter, and comes back from the store at the lowest price.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.evict_policy import EvictionStrategy

from impress_sglang.management.tree import StoredMatch

_ATTRIBUTE = "_impress_use"


class _NodeUse:
    """Logarithm (base 2) of a node's forward-decayed frequency, and its important share."""

    __slots__ = ("log_frequency", "share")

    def __init__(self, log_frequency: float, share: float) -> None:
        self.log_frequency = log_frequency
        self.share = share


class ScoreEviction(EvictionStrategy):
    """Lowest frequency x share first, ties by recency."""

    def __init__(self, half_life: float, retention: float) -> None:
        """An access counts half after `half_life` requests (0: never).

        Tokens that were never probed count as important with probability `retention`, which is the
        share that any selection has.
        """
        self._step = 1.0 / half_life if half_life else 0.0
        self._unknown = retention
        self._requests = 0

    def get_priority(self, node: Any) -> tuple[float, float]:
        """SGLang evicts the node with the lowest value."""
        use = getattr(node, _ATTRIBUTE, None)
        if use is None:
            return -math.inf, node.last_access_time
        # The logarithm of the product, which orders nodes alike and never overflows.
        return use.log_frequency + math.log2(max(use.share, 1e-9)), node.last_access_time

    def note_request(self, node: Any, resident_len: int, match: StoredMatch) -> None:
        """A new request uses the path from the root to `node`, `resident_len` tokens.

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
            # The upper half of a split node: every access to what is below went through it.
            below = (getattr(child, _ATTRIBUTE, None) for child in node.children.values())
            known = (use.log_frequency for use in below if use is not None)
            use = _NodeUse(max(known, default=-math.inf), share)
            setattr(node, _ATTRIBUTE, use)
        use.log_frequency = float(np.logaddexp2(use.log_frequency, self._requests * self._step))
        use.share = share


def _chance_by_token(
    match: StoredMatch, num_tokens: int, unknown: float
) -> npt.NDArray[np.float32]:
    """How likely each of the first tokens is selected."""
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
