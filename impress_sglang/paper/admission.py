"""Decides whether a request gets a stored prefix, and how much of it.

A plan is made when a request begins to wait and whenever it is matched, and carried out when it is
admitted (`ServingRuntime.open`). Everything here runs on the scheduler's thread.
"""

from __future__ import annotations

import dataclasses

from impress_sglang.config import ImpressConfig
from impress_sglang.cost import Estimate, Estimator, RequestLengths
from impress_sglang.paper.store import PartStore
from impress_sglang.paper.tokens import retained_tokens
from impress_sglang.serving.scheduling import CacheState
from impress_sglang.serving.served_store import ServedStore
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.policies import LoadOptions, Policy
from impress_sglang.store.stored import StoredMatch, StoredSpan

# Retentions that auto chooses from, besides its floor.
RETENTIONS = (1.0, 0.75, 0.5, 0.35)


@dataclasses.dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """How to use k of the tokens [resident_len, stop) of a stored prefix, and what it takes."""

    match: StoredMatch
    work: RequestLengths
    k: int
    estimate: Estimate

    @property
    def resident_len(self) -> int:
        """Tokens before the stored ones; they are in SGLang's tree."""
        return self.work.resident

    @property
    def stop(self) -> int:
        """Resident and stored tokens together."""
        return self.work.resident + self.work.stored

    @property
    def spans(self) -> tuple[StoredSpan, ...]:
        """The stored tokens after the resident ones."""
        return self.match.slice(self.resident_len, self.stop)

    @property
    def quality(self) -> Quality:
        """The quality of what is computed after the prefix."""
        retention = 1.0 if self.k == self.work.stored else self.estimate.retention
        return self.match.quality.after(retention)


class Admission:
    """Matches requests with the store, and decides between loading and computing."""

    def __init__(
        self,
        config: ImpressConfig,
        policy: Policy,
        served: ServedStore,
        estimator: Estimator,
    ) -> None:
        self._config = config
        self._policy = policy
        self._served = served
        self._estimator = estimator

    def looks_for(self, num_tokens: int) -> bool:
        """Whether to look up a prompt of `num_tokens` now; takes over a store that has opened."""
        self._served.take_over()
        return self._served.in_use and num_tokens >= self._config.min_prefix_tokens

    def find(self, namespace: str, tokens: Tokens, wanted: LoadOptions) -> StoredMatch:
        """Find the longest stored prefix of `tokens` that a request may take."""
        if not self.looks_for(len(tokens)):
            return StoredMatch()
        return self._served.store.match(namespace, tokens, least=self.least(wanted))

    def least(self, wanted: LoadOptions) -> Quality:
        """The worst quality that a request takes."""
        depth = self._config.depth(wanted.retention)
        if self._policy.exact(wanted) or not depth:
            return EXACT
        return Quality(depth, wanted.retention)

    def plan(
        self,
        match: StoredMatch,
        tokens: Tokens,
        resident_len: int,
        wanted: LoadOptions,
    ) -> AdmissionPlan | None:
        """Plan how a request would use a match; None if it would not use it.

        Args:
            match: the stored prefix of `tokens`.
            tokens: the prompt without its last token, which is computed in any case.
            resident_len: how many of `tokens` are in SGLang's tree.
            wanted: what the request asks for.
        """
        num_tokens = match.num_tokens - resident_len
        if num_tokens < self._config.min_prefix_tokens:
            return None
        work = RequestLengths(resident_len, num_tokens, len(tokens) + 1 - match.num_tokens)
        estimate = self.decide(match, work, wanted)
        k = retained_tokens(num_tokens, estimate.retention)
        spans = match.slice(resident_len, match.num_tokens)
        if not self._served.store.forecast.can_read(spans, in_codes=False):
            return None
        return AdmissionPlan(match, work, k, estimate)

    def accept(self, plan: AdmissionPlan | None, *, measure: bool) -> AdmissionPlan | None:
        """Return the plan, or None if computing its tokens is faster.

        `measure`: when declining, measure how fast reading is now; it may have become faster.
        """
        if plan is None or self._config.load == "always" or plan.estimate.loads_faster():
            return plan
        if measure:
            self._served.store.measure_reading(plan.match)
        return None

    def state(self, plan: AdmissionPlan | None, resident_len: int, num_tokens: int) -> CacheState:
        """What is cached of a request with `num_tokens` in all, given its accepted plan or None."""
        if plan is not None:
            return CacheState(True, plan.estimate)
        # A shorter resident prefix is not one that anybody would store.
        cached = resident_len >= self._config.min_prefix_tokens
        work = RequestLengths(resident_len, 0, num_tokens - resident_len)
        return CacheState(cached, self._estimator.estimate(work, 1.0, 0.0))

    def decide(self, match: StoredMatch, work: RequestLengths, wanted: LoadOptions) -> Estimate:
        """Decide how much of a stored prefix to load; estimate that, and computing it instead.

        With auto, the largest share whose reads hide behind computing.

        Args:
            match: what is stored.
            work: lengths of the request; its stored tokens are the last ones of the match.
            wanted: what the request asks for.
        """
        store = self._served.store
        spans = match.slice(match.num_tokens - work.stored, match.num_tokens)
        assert isinstance(store, PartStore)
        retentions = [wanted.retention]
        if self._config.auto_retention and not wanted.chosen:
            retentions = [*(own for own in RETENTIONS if own > wanted.retention), wanted.retention]

        def estimate(retention: float) -> Estimate:
            if retention >= 1.0:
                num_bytes = store.forecast.exact_bytes(spans)
            else:
                num_bytes = store.expected_bytes(spans, retention)
            io = store.forecast.seconds_to_read(num_bytes)
            return self._estimator.estimate(work, retention, io)

        found = map(estimate, retentions)
        hidden = (own for own in found if own.retention == retentions[-1] or not own.unhidden())
        return next(hidden)
