"""Service of a server that loads within passes: chooses the part of a stored prefix to use."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from impress_sglang.config import AUTO
from impress_sglang.cost import START_SECONDS_PER_LOADED, Cost, Estimate, RequestLengths
from impress_sglang.paper.scores import retained_tokens
from impress_sglang.paper.store import PartStore
from impress_sglang.serving.service import Service
from impress_sglang.store.policies import LoadOptions
from impress_sglang.store.stored import StoredMatch

# Initial guess, per pair of a stored token and a new one.
START_SECONDS_PER_SCORED = 1e-8
# Retentions that auto chooses from, besides its floor.
RETENTIONS = (1.0, 0.75, 0.5, 0.35)


class PartPlan(NamedTuple):
    """Stored tokens of `match` from `start` on, of which each layer may use `k`.

    `worthwhile`: loading them is estimated to be at least as fast as computing them.
    """

    match: StoredMatch
    start: int
    k: int
    estimate: Estimate
    worthwhile: bool

    @property
    def stop(self) -> int:
        return self.match.num_tokens


class LoadCosts:
    """Cost of identifying and copying tokens within a pass, besides reading.

    Unmeasured work costs nothing, and neither does work measured once, which may have been
    disturbed: work that seems too slow would never be tried again.
    """

    def __init__(self) -> None:
        self._parts, self._wholes = (
            Cost(START_SECONDS_PER_LOADED, per_pair, floored=True, once=False)
            for per_pair in (START_SECONDS_PER_SCORED, START_SECONDS_PER_LOADED)
        )

    def observe(self, work: RequestLengths, seconds: float, *, whole: bool) -> None:
        """Learn that loading a part of the stored tokens, or the `whole`, took `seconds`."""
        cost, pairs = self._of(work, whole=whole)
        cost.observe(work.stored, pairs, seconds)

    def seconds(self, work: RequestLengths, *, whole: bool) -> float:
        cost, pairs = self._of(work, whole=whole)
        return cost.seconds(work.stored, pairs)

    def _of(self, work: RequestLengths, *, whole: bool) -> tuple[Cost, float]:
        # Each new token scores all tokens of a part.
        return (self._wholes, work.stored) if whole else (self._parts, work.stored * work.new)


class PartService(Service):
    """A `Service` whose store is a `PartStore`."""

    store_class = PartStore

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.loading = LoadCosts()

    @property
    def parts(self) -> PartStore:
        store = self.store
        assert isinstance(store, PartStore)
        return store

    def plan(
        self, match: StoredMatch, resident_len: int, num_tokens: int, options: LoadOptions
    ) -> PartPlan | None:
        """Plan how a prompt of `num_tokens` tokens, `resident_len` of them in SGLang's tree, uses
        its stored prefix; None if it does not.

        With auto, it uses the largest share whose reads hide behind computing.
        """
        count = match.num_tokens - resident_len
        if count < self.config.min_prefix_tokens:
            return None
        store, spans = self.parts, match.slice(resident_len, match.num_tokens)
        segments = store.readers
        if not segments.can_read(spans, in_codes=False):
            return None
        work = RequestLengths(resident_len, count, num_tokens - match.num_tokens)
        shares = [options.retention]
        if self.config.retention == AUTO and not options.chosen:
            shares = [*(share for share in RETENTIONS if share > shares[0]), *shares]
        for retention in shares:
            if retention >= 1.0:
                num_bytes: float = segments.bytes_to_read(spans, codes=False)
            else:
                num_bytes = store.expected_bytes(spans, retention)
            hit = self.estimator.pass_seconds(resident_len + retention * count, work.new)
            hit += self.loading.seconds(work, whole=retention >= 1.0)
            estimate = self.estimator.estimate(work, segments.seconds_to_read(num_bytes))
            estimate = dataclasses.replace(estimate, retention=retention, compute=hit)
            if not estimate.unhidden():
                break
        loads = self.config.load == "always" or estimate.loads_faster()
        used = retained_tokens(count, estimate.retention)
        return PartPlan(match, resident_len, used, estimate, loads)

    def reorder(self) -> dict[str, int]:
        self.parts.enqueue_rewrites()
        self.store.poll()
        return self.parts.rewrites

    def summary(self) -> dict[str, Any]:
        store = self.opened
        reorders = store.rewrites if isinstance(store, PartStore) else None
        return {**super().summary(), "reorder": reorders}
