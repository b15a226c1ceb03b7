"""Decides whether a request gets a stored prefix, how much of it, and in how many bits.

Stage: admit. A plan is made when a request begins to wait and whenever it is matched, and carried
out when it is admitted (`opening.py`). Everything here runs on the scheduler's thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from impress_sglang.config import ImpressConfig
from impress_sglang.management.open_segments import AnySource
from impress_sglang.management.policies import LoadOptions, Policy
from impress_sglang.management.residents import Cover, ResidentParts
from impress_sglang.management.store import PrefixStore
from impress_sglang.management.stored import StoredMatch, StoredSpan
from impress_sglang.options import BITS, EXACT_BITS
from impress_sglang.precision.codec import planes_of
from impress_sglang.serving.clocks import Clock
from impress_sglang.serving.estimate import RETENTIONS, Estimate, Estimator, RequestLengths
from impress_sglang.serving.expected_reads import Ahead, ExpectedReads
from impress_sglang.serving.scheduling import CacheState
from impress_sglang.serving.served_store import ServedStore
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.segment import Tokens
from impress_sglang.timeline import Timeline
from impress_sglang.transfer.coded_span import Planes
from impress_sglang.transfer.source import ReadNeeds


@dataclasses.dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """How to use k of the tokens [resident_len, stop) of a stored prefix, and where to read them.

    `covers` says where the tokens of a prefix in codes are, if all of it is used; else it is empty.
    `missing` slots must be allocated; `idle` slots counted as room and no longer will. All lengths
    are whole pages.
    """

    match: StoredMatch
    work: RequestLengths
    k: int
    tokens: Tokens
    estimate: Estimate
    needs: ReadNeeds
    page_size: int
    covers: tuple[Cover, ...] = ()
    idle: int = 0

    @property
    def missing(self) -> int:
        """Slots that must be allocated."""
        if not self.covers:
            return self.k
        return sum(len(cover.span) for cover in self.covers if cover.part is None)

    @property
    def promised(self) -> int:
        """Tokens that SGLang is told to load; at least a page, or it would not ask for the prefix.

        SGLang takes this much from the room by which it admits requests.
        """
        return max(self.missing + self.idle, self.page_size)

    @property
    def resident_len(self) -> int:
        """Tokens before the stored ones; they are in SGLang's tree."""
        return self.work.resident

    @property
    def stop(self) -> int:
        """Resident and stored tokens together."""
        return self.work.resident + self.work.stored

    @property
    def loads_nothing(self) -> bool:
        """Whether all its tokens are in slots that requests share, with all that it wants."""
        parts = [cover.part for cover in self.covers]
        return bool(parts) and all(part is not None and part.has(self.planes) for part in parts)

    @property
    def planes(self) -> int:
        """How many planes it wants of a prefix in codes."""
        return planes_of(self.estimate.bits)

    @property
    def sources(self) -> dict[str, int]:
        """Numbers of its tokens by where they come from; see `report.SOURCES`."""
        return {
            "resident": self.resident_len,
            "shared": self.k - self.missing,
            "loaded": self.missing,
            "unused": self.work.stored - self.k,
        }

    @property
    def spans(self) -> tuple[StoredSpan, ...]:
        """The stored tokens after the resident ones."""
        return self.match.slice(self.resident_len, self.stop)

    @property
    def blended(self) -> int:
        """Tokens of the prefix from the first that is not stored behind the same text; here 0."""
        return 0

    @property
    def quality(self) -> Quality:
        """The quality of what is computed after the prefix."""
        retention = 1.0 if self.k == self.work.stored else self.estimate.retention
        return self.match.quality.after(retention, self.estimate.bits)

    def same_tokens(self, other: AdmissionPlan) -> bool:
        """Whether another plan uses the same tokens of the same segments and parts."""
        return (
            self.work == other.work
            and self.covers == other.covers
            and [span.segment.segment_id for span in self.match.spans]
            == [span.segment.segment_id for span in other.match.spans]
        )

    def same_reads(self, other: AdmissionPlan) -> bool:
        """Whether another plan reads the same of the same tokens, and neither shares parts."""
        return (
            not self.covers
            and self.same_tokens(other)
            and self.k == other.k
            and self.estimate.bits == other.estimate.bits
        )

    def open_source(self, store: PrefixStore, timeline: Timeline) -> AnySource:
        """Open a source for what is not in slots; `PrefixStore.close_source` takes it back.

        Raises:
            PrefixUnreadable: a segment is gone or cannot be opened.
        """
        if self.covers:
            spans, in_slots = _spans_of(self.covers, self.planes)
            return store.open_coded(spans, in_slots, self.planes, timeline)
        if self.estimate.bits < EXACT_BITS:
            return store.open_coded(self.spans, [None] * len(self.spans), self.planes, timeline)
        return store.open_source(self.match, self.resident_len, self.stop, self.needs, timeline)

    def unread(self, source: AnySource) -> float:
        """The share of the plan's reads that `source`, from `open_source`, has not done yet."""
        return source.unread

    def token_tensor(self) -> Tensor:
        """The tokens of the prefix, int64 [stop] on the CPU."""
        return torch.from_numpy(self.tokens[: self.stop]).to(torch.int64)


class Waiting:
    """What is known of a waiting request; this class is for one for which nothing is read."""

    def __init__(self, rid: str = "") -> None:
        """`rid` is the id of the request."""
        self.rid = rid

    def ahead(self, spans: Sequence[StoredSpan], *, in_codes: bool) -> Ahead | None:
        """What is read of `spans` for the request; None for nothing."""
        return None


class Admission:
    """Matches requests with the store, and decides between loading and computing."""

    def __init__(
        self,
        config: ImpressConfig,
        shape: KVShape,
        policy: Policy,
        served: ServedStore,
        residents: ResidentParts,
        estimator: Estimator,
        clock: Clock,
        page_size: int,
    ) -> None:
        """`page_size`: of SGLang's pool; prefixes are used in whole pages."""
        self._config = config
        self._policy = policy
        self._served = served
        self._residents = residents
        self._estimator = estimator
        self._clock = clock
        self._page_size = page_size
        self._probes = bool(shape.probe_kv_heads)
        self._all_keys = policy.selector.evidence == "keys"

    def looks_for(self, num_tokens: int) -> bool:
        """Whether to look up a prompt of `num_tokens` now; takes over a store that has opened."""
        self._served.take_over()
        return self._served.in_use and num_tokens >= self._config.min_prefix_tokens

    def find(self, namespace: str, tokens: Tokens, wanted: LoadOptions) -> StoredMatch:
        """Find the longest stored prefix of `tokens` that a request may take, in whole pages."""
        if not self.looks_for(len(tokens)):
            return StoredMatch()
        match = self._served.store.match(namespace, tokens, least=self.least(wanted))
        return StoredMatch(match.slice(0, self.whole_pages(match.num_tokens)))

    def least(self, wanted: LoadOptions) -> Quality:
        """The worst quality that a request takes."""
        return least_of(wanted, self._config, self._policy)

    def plan(
        self,
        match: StoredMatch,
        tokens: Tokens,
        resident_len: int,
        wanted: LoadOptions,
        waiting: Waiting | None = None,
    ) -> AdmissionPlan | None:
        """Plan how a request would use a match; None if it would not use it.

        Args:
            match: the stored prefix of `tokens`.
            tokens: the prompt without its last token, which is computed in any case.
            resident_len: how many of `tokens` are in SGLang's tree.
            wanted: what the request asks for.
            waiting: what is read for the request while it waits; None for nothing.
        """
        num_tokens = match.num_tokens - resident_len
        if num_tokens < self._config.min_prefix_tokens:
            return None
        work = RequestLengths(resident_len, num_tokens, len(tokens) + 1 - match.num_tokens)
        estimate = self.decide(match, work, wanted, waiting or Waiting())
        k = self._policy.tokens_to_load(num_tokens, estimate.retention)
        in_codes = estimate.bits < EXACT_BITS
        spans = match.slice(resident_len, match.num_tokens)
        if not k or not self._served.store.forecast.can_read(spans, in_codes=in_codes):
            return None
        covers: tuple[Cover, ...] = ()
        if in_codes and k == num_tokens:
            covers = self._cover(spans, resident_len)
            stored = sum(len(cover.span) for cover in covers)
            k, work = stored, RequestLengths(resident_len, stored, work.new + work.stored - stored)
        idle = sum(len(own.span) for own in covers if own.part is not None and not own.part.users)
        needs = ReadNeeds(k == work.stored, self._probes, all_keys=self._all_keys)
        return AdmissionPlan(match, work, k, tokens, estimate, needs, self._page_size, covers, idle)

    def accept(
        self, plan: AdmissionPlan | None, unread: float, *, measure: bool
    ) -> AdmissionPlan | None:
        """Return the plan, or None if computing its tokens is faster.

        `unread`: the share of its reads that is left to do; what was read while the request waited
        costs nothing more. `measure`: when declining, measure how fast reading is now; it may have
        become faster.
        """
        if plan is None or self._config.load == "always" or plan.loads_nothing:
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
        waiting: Waiting,
    ) -> Estimate:
        """Decide how much of a stored prefix to load; estimate that, and computing it instead.

        Args:
            match: what is stored.
            work: lengths of the request; its stored tokens are the last ones of the match.
            wanted: what the request asks for.
            waiting: what is read for the request while it waits.

        Returns:
            An estimate that counts all reads; the decision counts only those that are left to do.
        """
        # Learn from what the device has finished by now.
        self._clock.poll()
        config, policy, forecast = self._config, self._policy, self._served.store.forecast
        start = match.num_tokens - work.stored
        exact, bits = policy.exact(wanted), policy.bits(wanted)
        spans = match.slice(start, match.num_tokens)
        reads = ExpectedReads(spans, start, forecast, policy, self._residents)

        def estimate(retention: float, bits: float, *, is_left: bool = False) -> Estimate:
            ahead = waiting.ahead(spans, in_codes=bits < EXACT_BITS) if is_left else None
            io = reads.seconds(retention, bits, ahead)
            return self._estimator.estimate(work, retention, io, bits)

        if exact:
            return estimate(1.0, bits)
        retentions, most = [wanted.retention], [bits]
        if config.auto_retention and not wanted.chosen:
            retentions = [*(own for own in RETENTIONS if own > wanted.retention), wanted.retention]
        if wanted.auto_bits and bits < EXACT_BITS and retentions[0] >= 1.0:
            most = [own for own in reversed(BITS) if own >= bits]
            # Tokens that are in slots in codes are shared and not loaded again.
            may_be_exact = reads.alone and match.quality == EXACT
            if may_be_exact and forecast.fits(spans, in_codes=False):
                most.insert(0, EXACT_BITS)
        if len(retentions) == len(most) == 1:
            return estimate(wanted.retention, bits)
        # Give up bits first, then tokens.
        left = [estimate(retentions[0], own, is_left=True) for own in most]
        chosen = self._estimator.most_bits(left)
        if len(retentions) > 1 and not left[-1].hidden:
            left = [estimate(own, bits, is_left=True) for own in retentions]
            chosen = self._estimator.largest_hidden(left)
        return estimate(chosen.retention, chosen.bits)

    def whole_pages(self, num_tokens: int) -> int:
        """Round a number of tokens down to whole pages."""
        return num_tokens // self._page_size * self._page_size

    def _cover(self, spans: Sequence[StoredSpan], first: int) -> tuple[Cover, ...]:
        """Where tokens of a prefix in codes are; a short rest behind the last part is computed."""
        covers = self._residents.cover(spans, first)
        last = max((i for i, cover in enumerate(covers) if cover.part is not None), default=-1)
        rest = sum(len(cover.span) for cover in covers[last + 1 :])
        if last >= 0 and rest < self._config.min_prefix_tokens:
            del covers[last + 1 :]
        return tuple(covers)


def least_of(wanted: LoadOptions, config: ImpressConfig, policy: Policy) -> Quality:
    """The worst quality that a request takes.

    It takes what others blended if they computed at least the share again that it would itself.
    """
    depth = config.depth(wanted.retention)
    if policy.exact(wanted) or not depth:
        return EXACT
    return Quality(depth, wanted.retention, wanted.bits, wanted.share)


def _spans_of(covers: Sequence[Cover], planes: int) -> tuple[list[StoredSpan], list[Planes | None]]:
    """The spans that a source for `covers` reads, and what of them is in slots already."""
    spans, parts = [], []
    for cover in covers:
        part, span = cover.part, cover.span
        if part is not None and part.has(planes):
            continue
        # A part that nobody uses is cut as the request is admitted: see `ResidentParts.cut_idle`.
        if part is not None and part.users:
            span = StoredSpan(span.segment, part.start, part.stop)
        spans.append(span)
        parts.append(part)
    return spans, [None if part is None else part.in_slots for part in parts]
