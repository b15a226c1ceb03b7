"""Decides which stored tokens to load for a request, in its class, and which to compute.

Also explains the decision: once, when a request is admitted, and only from the request's own
namespace. Segments of other tenants are treated as not stored. A hit costs nothing; for a miss the
tokens are hashed once more.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

from impress_sglang.cost import Estimate, RequestLengths, best_within_tolerance
from impress_sglang.serving.kv_class import KVClass
from impress_sglang.serving.load_jobs import KeyScope, LoadJob
from impress_sglang.serving.service import Service
from impress_sglang.serving.why import Detail, Reason, Why, hit_of, sentence_of, why_of
from impress_sglang.storage.quality import ANYTHING, Quality
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.policies import LoadOptions
from impress_sglang.store.stored import SegmentState, StoredMatch, StoredSpan
from impress_sglang.transfer.filling import PackedLayers

_UNREADY = {
    SegmentState.PENDING: Reason.BEING_WRITTEN,
    SegmentState.SUSPECT: Reason.DAMAGED,
    SegmentState.READY: Reason.QUALITY,
}


class LoadPlanner:
    """Matches prompts with the store, without disk access. Thread: scheduler."""

    def __init__(
        self,
        service: Service,
        page_size: int,
        draft_offset: int = 0,
        packed: PackedLayers | None = None,
        *,
        states: bool = False,
        pairs: bool = False,
    ) -> None:
        """Prefixes are used in whole pages of `page_size` tokens, as in SGLang's pool.

        `draft_offset`: number of tokens after a slot's own on which its KVs depend; they are stored
        as those of the last of these, so that prompts share none where they differ. `packed`:
        layers after those of the pool. `states`: whether a prefix must have a state at its end.
        `pairs`: whether keys of SGLang's tree are pairs of tokens, as with EAGLE.
        """
        self.states, self._pairs = states, pairs
        self._service = service
        self._config = service.config
        self._page_size = page_size
        self.draft_offset = draft_offset
        self._windows = packed if packed is not None and packed.window else None

    def looks_up(self, num_tokens: int) -> bool:
        """Whether to look up a prompt of `num_tokens` now; takes over a store that has opened."""
        self._service.adopt_opened()
        return self._service.in_use and num_tokens >= self._config.min_prefix_tokens

    def whole_pages(self, num_tokens: int) -> int:
        """Round a number of tokens down to whole pages."""
        return num_tokens // self._page_size * self._page_size

    def match(self, namespace: str, tokens: Tokens, min_quality: Quality | None) -> StoredMatch:
        """Return the longest stored prefix of `tokens` of at least this quality, in whole pages.

        Its tokens are those that are stored for slots, from the first. `min_quality`: None if no
        stored KVs are accepted.
        """
        if min_quality is None or not self.looks_up(len(tokens)):
            return StoredMatch()
        match = self._service.store.match(namespace, tokens, min_quality=min_quality)
        start = self.draft_offset
        return StoredMatch(match.slice(start, start + self.usable_tokens(match)))

    def usable_tokens(self, match: StoredMatch) -> int:
        """Return the number of leading tokens of a match that can be used."""
        usable = self.whole_pages(max(match.num_tokens - self.draft_offset, 0))
        if self._windows is not None:
            usable = match.with_windows(self._windows.window, self._page_size)
        if self.states:
            # A state may be inside a page, if it was stored with another page size.
            ends = self._service.store.tree.state_positions(match)
            usable = next(
                (end for end in ends if end <= usable and end == self.whole_pages(end)), 0
            )
        return usable

    def state_spans(self, match: StoredMatch) -> tuple[StoredSpan, ...]:
        """Return the state at the end of a match; empty if the model has no states."""
        return self._service.store.tree.end_state_of(match) if self.states else ()

    def plan(
        self,
        namespace: str,
        key_scope: KeyScope,
        tokens: Tokens,
        resident_len: int,
        kv_class: KVClass,
    ) -> LoadJob | None:
        """Plan a job that loads the stored prefix of a prompt; None if too little is stored.

        `tokens`: the prompt without its last token; the first `resident_len` are resident.
        """
        match = self.match(namespace, tokens, self._service.min_quality_of(kv_class))
        stop = match.num_tokens
        if stop - resident_len < self._config.min_prefix_tokens:
            return None
        spans, state = match.slice(resident_len, stop), self.state_spans(match)
        store = self._service.store
        if not store.readers.can_read((*spans, *state), in_codes=not kv_class.exact):
            return None
        estimate = self._estimate(spans, resident_len, len(tokens) + 1, kv_class, state)
        loads = self._config.load == "always" or estimate.loads_faster()
        kept = tokens[: stop + self._pairs]
        rest = estimate, int(self._pairs), state, loads
        return LoadJob(store, kv_class, key_scope, kept, match, resident_len, *rest)

    def shorten(self, job: LoadJob, stop: int) -> LoadJob:
        """Shorten a planned job to end at `stop`; its estimate stays that of all tokens."""
        match = StoredMatch(job.match.slice(0, stop))
        kept = job.tokens[: stop + job.draft_offset]
        states = self.state_spans(match)
        return dataclasses.replace(job, tokens=kept, match=match, state_spans=states)

    def choose(
        self, namespace: str, tokens: Tokens, resident: dict[KVClass, int], compressed: KVClass
    ) -> KVClass:
        """Choose between the class `compressed` and exact KVs, preferred if they cost little.

        Returns the class with the longest resident prefix, if any is long enough; otherwise the
        one with the most bits whose time is close to that of the fastest.
        """
        classes = (KVClass(), compressed)
        longest = max(classes, key=lambda kv_class: resident.get(kv_class, 0))
        if resident.get(longest, 0) >= self._config.min_prefix_tokens:
            return longest
        estimates: dict[KVClass, Estimate] = {}
        for kv_class in classes:
            match = self.match(namespace, tokens, self._service.min_quality_of(kv_class))
            if match.num_tokens < self._config.min_prefix_tokens:
                continue
            if self._service.store.readers.can_read(match.spans, in_codes=not kv_class.exact):
                estimates[kv_class] = self._estimate(match.spans, 0, len(tokens) + 1, kv_class)
        return (
            list(estimates)[best_within_tolerance(list(estimates.values()))]
            if estimates
            else compressed
        )

    def _estimate(
        self,
        spans: tuple[StoredSpan, ...],
        start: int,
        total: int,
        kv_class: KVClass,
        state: tuple[StoredSpan, ...] = (),
    ) -> Estimate:
        segments, count = self._service.store.readers, sum(map(len, spans))
        num_bytes = segments.bytes_to_read(spans, codes=not kv_class.exact)
        if self._windows is not None:
            # Only the last tokens of layers with windows are read.
            size = functools.partial(
                spans[0].segment.info.geometry.num_bytes, codes=not kv_class.exact
            )
            share = size(slice(self._windows.first, None)) / size()
            num_bytes *= 1.0 - share * max(1.0 - self._windows.window / count, 0.0)
        num_bytes += segments.bytes_to_read(state, codes=False)
        work = RequestLengths(start, count, total - start - count)
        io = segments.seconds_to_read(num_bytes)
        return self._service.estimator.estimate(work, io, kv_class.bits)

    def explain(
        self,
        report: Mapping[str, Any],
        namespace: str,
        tokens: Tokens,
        wanted: LoadOptions,
        seen: int | None,
        *,
        opened: bool = True,
        blend: Detail | None = None,
        admitted: bool = True,
    ) -> Why:
        """Explain the prefix of a prompt, if any, and why the rest is missing, if long enough.

        Args:
            report: report of its request so far; unless `admitted`, its prefix is the stored one.
            tokens: int32 [n], the tokens that a prefix may have.
            seen: number of leading tokens requested often enough; None if not counted.
            opened: False if the planned spans could not be read.
            blend: why it does not blend, if it would accept that.
        """
        min_tokens, prefix = self._config.min_prefix_tokens, int(report["prefix_tokens"])
        if admitted:
            # Fewer tokens are only a beginning that prompts happen to share.
            hit = hit_of(report, min(min_tokens, len(tokens) / 2))
        else:
            hit = (Reason.STORED, f"{prefix:,} tokens") if prefix else None
        rest = len(tokens) - prefix
        if hit is not None and rest < max(min_tokens, 1):
            return why_of(*hit)
        reason, detail = Reason.NOT_OPENED, ""
        if opened:
            reason, detail = self._miss(report, namespace, tokens, wanted, seen, blend)
        if hit is None:
            return why_of(reason, detail)
        text = f"{sentence_of(*hit)} Of its other {rest:,} tokens: {sentence_of(reason, detail)}"
        return {"reason": hit[0], "text": text, "rest": reason}

    def _miss(
        self,
        report: Mapping[str, Any],
        namespace: str,
        tokens: Tokens,
        wanted: LoadOptions,
        seen: int | None,
        blend: Detail | None,
    ) -> Detail:
        """Find out why no more tokens than the prefix in the report were used."""
        service, min_tokens, prefix = (
            self._service,
            self._config.min_prefix_tokens,
            report["prefix_tokens"],
        )
        if report["not_served"] is not None:
            return Reason.NOT_SERVED, str(report["not_served"])
        if not service.policy.stores:
            return Reason.NO_STORE, self._config.policy
        if service.suspended is not None:
            return Reason.OTHER_WEIGHTS, service.suspended
        store = service.store
        if not store.health.readable:
            return Reason.DEGRADED, ""
        if len(tokens) < min_tokens:
            return Reason.TOO_SHORT, f"{len(tokens)} of {min_tokens} tokens"
        if report["decision"] == "recompute":
            load, compute = report["estimated_load_ms"], report["estimated_recompute_ms"]
            if load is None:
                return Reason.COMPUTED_TO_LEARN, f"{compute:.1f} ms at most"
            return Reason.COMPUTED_FASTER, f"{load:.1f} ms and {compute:.1f} ms"
        # Not `store.match`, which also does pending work.
        name, quality, match = (
            store.namespace(namespace),
            self._service.min_quality(wanted),
            StoredMatch(),
        )
        if quality is not None:
            match = store.tree.match(name, tokens, min_quality=quality)
        have = match.num_tokens
        if self.usable_tokens(match) - prefix >= min_tokens:
            rest, in_codes = match.slice(prefix, have), not service.class_of(wanted).exact
            fits = store.readers.can_read(rest, in_codes=in_codes)
            # Its job may have lost its slots each time, or another rank may lack it.
            return Reason.NOT_OPENED if fits else Reason.NO_BUFFERS, ""
        if have - prefix >= min_tokens and (self._windows is not None or self.states):
            return Reason.NO_STATE, ""
        have = max(have, report["resident_tokens"], prefix)
        # Tokens that are stored beyond these and cannot be used.
        known = store.tree.match(name, tokens, min_quality=ANYTHING, only_ready=False)
        if known.num_tokens - have >= min_tokens:
            ends = itertools.accumulate(map(len, known.spans))
            beyond = next(span for span, end in zip(known.spans, ends, strict=True) if end > have)
            if (reason := _UNREADY.get(beyond.segment.state)) is not None:
                return reason, ""
        loss = store.miss_log.find(name, tokens, have)
        if loss is not None and loss.num_tokens >= min_tokens:
            # Each cause has the name of its reason.
            reason = Reason[loss.cause.name]
            return reason, f"{loss.num_tokens:,} tokens, {loss.seconds:.0f} s ago"
        if blend is not None:
            return blend
        if seen is not None and seen - have < min_tokens:
            return Reason.SEEN_TOO_SELDOM, f"{self._config.write_after} times"
        return Reason.NEVER_STORED, ""
