"""Decides whether a request gets a stored prefix, and how much of it.

Stage: admit. A plan is made when a request begins to wait and whenever it is matched, and carried
out when it is admitted (`opening.py`). Everything here runs on the scheduler's thread.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from impress_sglang.config import ImpressConfig
from impress_sglang.cost import Estimate, Estimator, RequestLengths
from impress_sglang.serving.scheduling import CacheState
from impress_sglang.serving.served_store import ServedStore
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.forecast import ReadForecast, StoredBytes
from impress_sglang.store.policies import LoadOptions, Policy
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import StoredMatch, StoredSpan
from impress_sglang.transfer.source import ReadNeeds, SegmentSource

# Retentions that auto chooses from, besides its floor.
RETENTIONS = (1.0, 0.75, 0.5, 0.35)


@dataclasses.dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """How to use k of the tokens [resident_len, stop) of a stored prefix, and what it takes."""

    match: StoredMatch
    work: RequestLengths
    k: int
    estimate: Estimate
    needs: ReadNeeds

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

    def same_tokens(self, other: AdmissionPlan) -> bool:
        """Whether another plan uses the same tokens of the same segments."""
        return self.work == other.work and [
            span.segment.segment_id for span in self.match.spans
        ] == [span.segment.segment_id for span in other.match.spans]

    def same_reads(self, other: AdmissionPlan) -> bool:
        """Whether another plan reads the same of the same tokens."""
        return self.same_tokens(other) and self.k == other.k

    def open_source(self, store: PrefixStore) -> SegmentSource:
        """Open a source for the tokens; `PrefixStore.close_source` takes it back.

        Raises:
            PrefixUnreadable: a segment is gone or cannot be opened.
        """
        return store.open_source(self.match, self.resident_len, self.stop, self.needs)


Ahead = Callable[[Sequence[StoredSpan]], float]
"""The share of the layers of some spans that was read while a request waits."""


def _nothing(spans: Sequence[StoredSpan]) -> float:
    return 0.0


class Admission:
    """Matches requests with the store, and decides between loading and computing."""

    def __init__(
        self,
        config: ImpressConfig,
        shape: KVShape,
        policy: Policy,
        served: ServedStore,
        estimator: Estimator,
    ) -> None:
        self._config = config
        self._policy = policy
        self._served = served
        self._estimator = estimator
        self._probes = bool(shape.probe_kv_heads)
        self._all_keys = policy.selector.evidence == "keys"

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
        return least_of(wanted, self._config, self._policy)

    def plan(
        self,
        match: StoredMatch,
        tokens: Tokens,
        resident_len: int,
        wanted: LoadOptions,
        ahead: Ahead = _nothing,
    ) -> AdmissionPlan | None:
        """Plan how a request would use a match; None if it would not use it.

        Args:
            match: the stored prefix of `tokens`.
            tokens: the prompt without its last token, which is computed in any case.
            resident_len: how many of `tokens` are in SGLang's tree.
            wanted: what the request asks for.
            ahead: what is read for the request while it waits.
        """
        num_tokens = match.num_tokens - resident_len
        if num_tokens < self._config.min_prefix_tokens:
            return None
        work = RequestLengths(resident_len, num_tokens, len(tokens) + 1 - match.num_tokens)
        estimate = self.decide(match, work, wanted, ahead)
        k = self._policy.tokens_to_load(num_tokens, estimate.retention)
        spans = match.slice(resident_len, match.num_tokens)
        if not k or not self._served.store.forecast.can_read(spans, in_codes=False):
            return None
        needs = ReadNeeds(k == num_tokens, self._probes, all_keys=self._all_keys)
        return AdmissionPlan(match, work, k, estimate, needs)

    def accept(
        self, plan: AdmissionPlan | None, unread: float, *, measure: bool
    ) -> AdmissionPlan | None:
        """Return the plan, or None if computing its tokens is faster.

        `unread`: the share of its reads that is left to do; what was read while the request waited
        costs nothing more. `measure`: when declining, measure how fast reading is now; it may have
        become faster.
        """
        if plan is None or self._config.load == "always":
            return plan
        if plan.estimate.loads_faster(unread):
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

    def decide(
        self,
        match: StoredMatch,
        work: RequestLengths,
        wanted: LoadOptions,
        ahead: Ahead = _nothing,
    ) -> Estimate:
        """Decide how much of a stored prefix to load; estimate that, and computing it instead.

        Args:
            match: what is stored.
            work: lengths of the request; its stored tokens are the last ones of the match.
            wanted: what the request asks for.
            ahead: what is read for the request while it waits.

        Returns:
            An estimate that counts all reads; the decision counts only those that are left to do.
        """
        spans = match.slice(match.num_tokens - work.stored, match.num_tokens)
        reads = _Reads(spans, self._served.store.forecast, self._policy)
        retentions = [wanted.retention]
        if self._config.auto_retention and not wanted.chosen:
            retentions = [*(own for own in RETENTIONS if own > wanted.retention), wanted.retention]

        def estimate(retention: float, there: float) -> Estimate:
            io = (1.0 - there) * reads.seconds(retention)
            return self._estimator.estimate(work, retention, io)

        if len(retentions) > 1:
            there = ahead(spans)
            left = [estimate(own, there) for own in retentions]
            hidden = (own.retention for own in left if not own.unhidden())
            retentions = [next(hidden, retentions[-1])]
        return estimate(retentions[0], 0.0)


@dataclasses.dataclass(frozen=True)
class _Reads:
    """The reads of some spans; their forecast is made once, when it is first needed."""

    spans: Sequence[StoredSpan]
    forecast: ReadForecast
    policy: Policy

    def seconds(self, retention: float) -> float:
        """Seconds that reading them takes, for a share of the tokens."""
        if retention >= 1.0:
            num_bytes = self.forecast.exact_bytes(self.spans)
        else:
            all_keys = self.policy.selector.evidence == "keys"
            num_bytes = self._stored.expected(retention, all_keys=all_keys)
        return self.forecast.seconds_to_read(num_bytes)

    @functools.cached_property
    def _stored(self) -> StoredBytes:
        return self.forecast.stored_bytes(self.spans)


def least_of(wanted: LoadOptions, config: ImpressConfig, policy: Policy) -> Quality:
    """The worst quality that a request takes."""
    depth = config.depth(wanted.retention)
    if policy.exact(wanted) or not depth:
        return EXACT
    return Quality(depth, wanted.retention)
