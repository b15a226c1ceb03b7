"""Plans how stored text that is not a prefix is reused, for requests that accept that.

The runs of a prompt that are stored somewhere are loaded into slots as they were computed
elsewhere, their keys turned to their new positions. The tokens between them are computed, and so is
a share of the reused tokens, so that these see the text that they now stand behind (CacheBlend,
4.2). A `BlendJob` does all this before the request runs, in SGLang's tree, in the request's class.

The resulting KVs are approximate. Requests of another class never see them; they are stored with a
mark: only requests that would blend as much use them, and nothing of them is reused behind other
text.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from impress_sglang.blend.plan import CHECKED_LAYERS, BlendNotes, BlendPlan, Kind, runs_of
from impress_sglang.config import ImpressConfig
from impress_sglang.cost import Estimate, Estimator, RequestLengths, most_of
from impress_sglang.loops.types import Uint8s
from impress_sglang.options import AUTO, AUTO_SHARE, OFF
from impress_sglang.serving.kv_class import KVClass
from impress_sglang.serving.served_store import ServedStore
from impress_sglang.serving.why import Detail, Reason
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.content import Run
from impress_sglang.store.stored import StoredMatch, StoredSpan

# So many first tokens are computed unless they are resident or stored as a prefix: attention needs
# a head that it knows (AttentionStore's truncation as printed fails without one).
HEAD_TOKENS = 16
# A blend that was slow is tried again after so many seconds.
MEASURE_SECONDS = 60.0
# A waiting request may be planned again and again; its text is searched for and weighed only once
# in so many seconds, since the index may change with every write, unless what was found is gone. If
# many requests wait, searching again for them takes at most this share of the time.
ANSWER_SECONDS = 1.0
ANSWER_SHARE = 0.01
# The shares that auto chooses from, the largest first.
SHARES = (0.75, 0.5, 0.4, 0.3, 0.25, 0.2, AUTO_SHARE)


class BlendPlanner:
    """Plans how requests reuse text that is not a prefix; one thread."""

    def __init__(
        self,
        config: ImpressConfig,
        shape: KVShape,
        served: ServedStore,
        estimator: Estimator,
        page_size: int,
        read_tokens: int,
        measure: Callable[[Sequence[StoredSpan]], None],
    ) -> None:
        """At most `read_tokens` are read at once; `measure` learns how fast reads are now."""
        self.refusal: str | None = None
        """Why this server turned out to be unable to blend."""
        self._measure_at = 0.0
        self._answer_at = 0.0
        self._config = config
        self._shape = shape
        self._served = served
        self._estimator = estimator
        self._page_size = page_size
        self._read_tokens = read_tokens
        self._measure = measure

    def plan(
        self,
        namespace: str,
        tokens: Tokens,
        resident_len: int,
        usual: Any,
        own: KVClass,
        blend: float | str,
        notes: BlendNotes,
    ) -> BlendPlan | None:
        """Plan how a request would blend; None if it would not.

        Args:
            namespace: the request's namespace.
            tokens: the prompt without its last token, which is computed in any case.
            resident_len: how many of `tokens` are in SGLang's tree, in its class.
            usual: what it would load otherwise, a `LoadPlan`; None if it would compute.
            own: its class.
            blend: the share that it asks for, or `AUTO`, or `OFF`.
            notes: what is known of the request; is changed.
        """
        if blend == OFF or own.share >= 1.0 or own.exact or notes.declined:
            return None
        if not self._served.in_use or not self._served.store.health.readable:
            return None
        store, content = self._served.store, self._served.store.tree.content
        if content is None:
            notes.why = None
            return None
        if self.refusal is not None:
            notes.why = Reason.BLEND_UNSUPPORTED, self.refusal
            return None
        name = store.namespace(namespace)
        least = own.worst(self._config.approximation_depth)
        match = store.tree.match(name, tokens, least=least)
        if match.num_tokens - resident_len < HEAD_TOKENS:
            # So few tokens are only how other prompts happen to begin: compute them, exactly.
            match = StoredMatch()
        known = max(match.num_tokens, resident_len)
        done = known if usual is None else max(usual.stop, known)
        asked = len(tokens), resident_len, done
        now = time.monotonic()
        again_at = max(notes.answered + ANSWER_SECONDS, self._answer_at)
        holds = asked == notes.asked and now < again_at
        if not (holds and all(run.span.segment.ready for run in notes.found)):
            notes.found = content.find(name, tokens, known)
            notes.asked, notes.answered = asked, now
            notes.answer = self._weigh(match, tokens, known, usual, own, blend, notes)
            self._answer_at = now + (time.monotonic() - now) / ANSWER_SHARE
        if isinstance(notes.answer, BlendPlan):
            notes.why = None
            return notes.answer
        notes.why = notes.answer
        return None

    def _weigh(
        self,
        match: StoredMatch,
        tokens: Tokens,
        known: int,
        usual: Any,
        own: KVClass,
        blend: float | str,
        notes: BlendNotes,
    ) -> BlendPlan | Detail | None:
        """Decide whether what was found behind the `known` tokens is worth a blend, and plan it."""
        assert notes.asked is not None
        store, least = self._served.store, self._config.blend_min_tokens
        _, resident_len, done = notes.asked
        runs = list(notes.found)
        stop = (runs[-1].stop if runs else known) // self._page_size * self._page_size
        runs = [run.part(known, stop) for run in runs if run.start < stop]
        more = sum(max(run.stop - max(run.start, done), 0) for run in runs)
        if more < least:
            return (Reason.BLEND_TOO_SHORT, f"{more:,} of {least:,} tokens") if more else None
        prefix = runs_of(match, resident_len)
        kinds = self._kinds(resident_len, known, stop, runs)
        work = RequestLengths(resident_len, stop - resident_len, len(tokens) + 1 - stop)
        spans = [run.span for run in (*prefix, *runs)]
        read = store.forecast.bytes_to_read(spans, codes=True)
        io = store.forecast.seconds_to_read(read)
        share, estimate = self._choose(work, kinds, io, blend)
        if (refusal := self._too_slow(estimate, usual)) is not None:
            if notes.why is None:
                # A drive that was slow may be faster again.
                self._measure((runs[0].span,))
            hopeful = self._estimate(work, kinds, io, share, measured=False)
            if self._too_slow(hopeful, usual) or not self._may_measure(estimate, notes):
                return refusal
            estimate = hopeful
        plan = BlendPlan(
            match=match,
            work=work,
            tokens=tokens,
            estimate=dataclasses.replace(estimate, bits=own.bits),
            runs=(*prefix, *runs),
            kinds=kinds,
            share=share,
            read_tokens=self._read_tokens,
        )
        # Groups are read one after the other, so each must fit by itself.
        can_read = store.forecast.can_read
        if not all(can_read([run.span for run in group], in_codes=True) for group in plan.groups):
            return Reason.NO_BUFFERS, ""
        return plan

    def _too_slow(self, estimate: Estimate, usual: Any) -> Detail | None:
        """Why a blend that takes as long as estimated is refused; None if it is not."""
        most = self._config.blend_seconds
        if estimate.compute > most:
            return Reason.BLEND_TOO_LONG, f"{estimate.compute:.1f} of {most:g} s"
        if estimate.load is None or estimate.recompute is None:
            return None
        other = estimate.recompute
        if usual is not None and usual.estimate.load is not None:
            other = min(other, usual.estimate.load)
        if self._config.load != "always" and estimate.load > other:
            return Reason.BLEND_SLOWER, f"{1e3 * estimate.load:.1f} ms and {1e3 * other:.1f} ms"
        return None

    def _may_measure(self, learnt: Estimate, notes: BlendNotes) -> bool:
        """Whether a request blends although blending was slow, to see whether it still is."""
        now = time.monotonic()
        if not notes.measures and now >= self._measure_at:
            # Others share the model with the trial only for a small part of the time, however slow
            # blends were.
            pause = MEASURE_SECONDS * max(learnt.compute / self._config.blend_seconds, 1.0)
            notes.measures, self._measure_at = True, now + pause
        return notes.measures

    def _kinds(self, resident_len: int, known: int, stop: int, runs: Sequence[Run]) -> Uint8s:
        kinds = np.full(stop - resident_len, Kind.COMPUTED, np.uint8)
        kinds[: known - resident_len] = Kind.KEPT
        for run in runs:
            kinds[run.start - resident_len : run.stop - resident_len] = Kind.REUSED
        if known < HEAD_TOKENS:
            kinds[: HEAD_TOKENS - resident_len] = Kind.COMPUTED
        return kinds

    def _choose(
        self, work: RequestLengths, kinds: Uint8s, io: float, wanted: float | str
    ) -> tuple[float, Estimate]:
        """Choose the share that is computed again; returns it and an estimate for it.

        Auto takes the largest with which a blend takes hardly longer than with the smallest.
        """
        shares = SHARES if wanted == AUTO else (float(wanted),)
        choices = [(share, self._estimate(work, kinds, io, share)) for share in shares]
        estimates = [estimate for _, estimate in choices]
        # Before anything is known all seem to take as long.
        return choices[most_of(estimates) if estimates[-1].known else -1]

    def _estimate(
        self, work: RequestLengths, kinds: Uint8s, io: float, share: float, *, measured: bool = True
    ) -> Estimate:
        """Estimate a request with a share; `measured`: see `Estimator.estimate_blend`."""
        checked = CHECKED_LAYERS / self._shape.num_layers if share else 0.0
        again = min(share + checked, 1.0)
        counts = np.bincount(kinds, minlength=len(Kind))
        computed = float(counts[Kind.COMPUTED] + again * counts[Kind.REUSED])
        return self._estimator.estimate_blend(work, computed, io, measured=measured)
