"""The latest requests, and where tokens of prompts came from, for whoever watches a server."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from impress_sglang.serving.report import SOURCES
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.prefix_hashes import BLOCK_TOKENS, PrefixHashes

Row: TypeAlias = dict[str, Any]

MOST_REQUESTS = 200
PERIOD_SECONDS = 10
MOST_PERIODS = 180
MOST_WORDS = 32
# Fields of a report that are shown, beside how the tokens of the prompt are split.
_FIELDS = (
    *("path", "why", "decision", "approximate", "bits_mean", "used_tokens", "blended_tokens"),
    *("ssd_bytes", "wait_ms", "prefetched", "recomputed", "not_stored"),
    *("estimated_load_ms", "estimated_recompute_ms"),
)


class RecentRequests:
    """The latest requests of one scheduler, in fixed memory; one thread."""

    def __init__(
        self, *, show_prompts: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self._show_prompts = show_prompts
        self.now = clock
        """Returns the time, in seconds."""
        self._rows: deque[Row] = deque(maxlen=MOST_REQUESTS)
        self._periods: deque[list[int]] = deque(maxlen=MOST_PERIODS)
        self._count = 0
        self._hashes = PrefixHashes()
        self.since = clock()
        """When counting began."""

    def note(
        self,
        rid: str,
        namespace: str,
        tokens: Sequence[int],
        report: Mapping[str, Any],
        **seconds: float,
    ) -> None:
        """Note a request that has ended.

        Args:
            rid: its id, of which the beginning is kept.
            namespace: its namespace, as the store names it.
            tokens: the tokens of its prompt.
            report: its report.
            seconds: `waited` for others; `loading` its prefix, in the queue or in the pass; and
                `computing`, the rest, until its first token.
        """
        first = np.array(tokens[:BLOCK_TOKENS], np.int32)
        self._count += 1
        self._rows.append(
            {
                "number": self._count,
                "ended": round(self.now(), 3),
                "rid": rid[:64],
                "begins": self.digest(namespace, first),
                "words": self.words(first),
                "tokens": report["tokens"],
                **{f"{name}_ms": round(took * 1e3, 1) for name, took in seconds.items()},
                **{name: report[name] for name in _FIELDS},
            }
        )
        begin = int(self.now()) // PERIOD_SECONDS * PERIOD_SECONDS
        if not self._periods or self._periods[-1][0] != begin:
            self._periods.append([begin, *(0 for _ in SOURCES)])
        for place, source in enumerate(SOURCES, start=1):
            self._periods[-1][place] += report["tokens"][source]

    def digest(self, namespace: str, tokens: Tokens) -> str:
        """Digest of how a prompt, int32 [n], begins; differs by process; "" for a short prompt."""
        hashes = self._hashes.of(namespace, tokens[:BLOCK_TOKENS])
        return "".join(f"{own:016x}" for own in hashes.tolist())

    def words(self, tokens: Tokens) -> list[int] | None:
        """The first tokens of a prompt; None unless prompts may be shown."""
        return tokens[:MOST_WORDS].tolist() if self._show_prompts else None

    def after(self, number: int) -> list[Row]:
        """The requests that ended after the one of this number, the latest first."""
        return list(itertools.takewhile(lambda row: row["number"] > number, reversed(self._rows)))

    def periods(self) -> list[list[int]]:
        """When each period with requests began, and its tokens by `SOURCES`, earliest first.

        Periods last ten seconds; the last half hour's worth of periods with requests is kept.
        """
        return list(self._periods)
