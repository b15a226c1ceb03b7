"""Stored text that is no prefix, reused for a request that accepts it.

Stage: admit. The runs of a prompt that are stored somewhere come into slots as they were
computed elsewhere, their keys turned to their new positions. What is between them is computed, and
of the reused tokens a share as well, so that they see the text that they stand behind now
(CacheBlend, 4.2). All that happens before the first layer of the request's own pass, block by
block; then its prefix is in its slots, and the pass goes on as behind any other one.

What was computed so is approximate. It is for this request alone: never stored, and never SGLang's
tree's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from impress_sglang.config import ImpressConfig
from impress_sglang.loops.types import Uint8s
from impress_sglang.management.content import Run
from impress_sglang.management.policies import LoadOptions, Policy
from impress_sglang.management.stored import StoredMatch, StoredSpan
from impress_sglang.options import AUTO, DEVIATION, FIRST, OFF
from impress_sglang.serving.admission import AdmissionPlan
from impress_sglang.serving.blend_plan import CHECKED_LAYERS, BlendPlan, Kind
from impress_sglang.serving.blended_loading import BlendedLoading
from impress_sglang.serving.estimate import Estimate, Estimator, RequestLengths
from impress_sglang.serving.served_store import ServedStore
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.segment import Tokens
from impress_sglang.transfer.source import ReadNeeds

# Where no exact token is before them, so many are computed: attention needs a head that it knows
# (AttentionStore's truncation as it is printed fails without).
HEAD_TOKENS = 16
# Blending is not cut into chunks: nobody else gets a token for so many seconds, at most.
PASS_SECONDS = 5.0
# The shares that auto chooses from, the largest first.
SHARES = (0.75, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15)


class Blending:
    """Plans how requests reuse text that is no prefix; one thread."""

    def __init__(
        self,
        config: ImpressConfig,
        shape: KVShape,
        policy: Policy,
        served: ServedStore,
        estimator: Estimator,
        page_size: int,
        block_tokens: int,
    ) -> None:
        """`block_tokens` are blended at once, at most."""
        self.refusal: str | None = None
        """Why this server cannot blend after all, found out when it computes."""
        self._config = config
        self._shape = shape
        self._policy = policy
        self._served = served
        self._estimator = estimator
        self._page_size = page_size
        self._block_tokens = max(block_tokens // page_size, 1) * page_size

    def plan(
        self,
        namespace: str,
        tokens: Tokens,
        resident_len: int,
        usual: AdmissionPlan | None,
        wanted: LoadOptions,
    ) -> BlendPlan | None:
        """How a request would blend; None if it would not.

        Args:
            namespace: of the request.
            tokens: of the prompt but the last one, which is computed in any case.
            resident_len: how many of them are in SGLang's tree.
            usual: what it would use else.
            wanted: of the request.
        """
        store = self._served.store
        content = store.tree.content
        if content is None or not self._accepts(wanted) or not store.health.readable:
            return None
        name = store.namespace(namespace)
        match = store.tree.match(name, tokens)
        known = max(match.num_tokens, resident_len)
        runs = content.find(name, tokens, known)
        stop = (runs[-1].stop if runs else known) // self._page_size * self._page_size
        runs = [run.part(known, stop) for run in runs if run.start < stop]
        done = known if usual is None else max(usual.stop, known)
        more = sum(max(run.stop - max(run.start, done), 0) for run in runs)
        if more < self._config.blend_min_tokens:
            return None
        prefix = _runs_of(match, resident_len)
        kinds = self._kinds(resident_len, known, stop, runs)
        work = RequestLengths(resident_len, stop - resident_len, len(tokens) + 1 - stop)
        spans = [run.span for run in (*prefix, *runs)]
        if not store.forecast.can_read(spans, in_codes=False):
            return None
        share, estimate = self._choose(work, kinds, spans, wanted.blend)
        if (estimate.compute or 0.0) > PASS_SECONDS or not self._is_worth_it(estimate, usual):
            return None
        if self._config.blend_select != DEVIATION:
            runs = self._compute_some(kinds, runs, resident_len, share)
            share = 0.0
            if not runs:
                return None
        return BlendPlan(
            match=match,
            work=work,
            k=work.stored,
            tokens=tokens,
            estimate=estimate,
            needs=ReadNeeds(whole=True, probe=bool(self._shape.probe_kv_heads)),
            page_size=self._page_size,
            runs=(*prefix, *runs),
            kinds=kinds,
            share=share,
            block_tokens=self._block_tokens,
        )

    def _is_worth_it(self, estimate: Estimate, usual: AdmissionPlan | None) -> bool:
        """Whether to blend is faster than to compute, and than what would be used else."""
        if self._config.load == "always":
            return True
        if usual is not None and usual.estimate.load is not None and estimate.load is not None:
            return estimate.loads_faster and estimate.load <= usual.estimate.load
        return estimate.loads_faster

    def _accepts(self, wanted: LoadOptions) -> bool:
        """Whether a request takes approximate KVs, and not all of its tokens are computed."""
        blends = wanted.blend not in (OFF, 1.0) and self.refusal is None
        return blends and not self._policy.exact(wanted)

    def _kinds(self, resident_len: int, known: int, stop: int, runs: Sequence[Run]) -> Uint8s:
        kinds = np.full(stop - resident_len, Kind.COMPUTED, np.uint8)
        kinds[: known - resident_len] = Kind.KEPT
        for run in runs:
            kinds[run.start - resident_len : run.stop - resident_len] = Kind.REUSED
        if not known:
            kinds[:HEAD_TOKENS] = Kind.COMPUTED
        return kinds

    def _choose(
        self,
        work: RequestLengths,
        kinds: Uint8s,
        spans: Sequence[StoredSpan],
        wanted: float | str,
    ) -> tuple[float, Estimate]:
        """The share that is computed again, and what the request would take."""
        forecast, layers = self._served.store.forecast, self._shape.num_layers
        io = forecast.seconds_to_read(forecast.stored_bytes(spans).expected(1.0))
        reused = int(np.count_nonzero(kinds == Kind.REUSED))
        gaps = int(np.count_nonzero(kinds == Kind.COMPUTED))
        checked = CHECKED_LAYERS / layers if self._config.blend_select == DEVIATION else 0.0

        def estimate(share: float) -> Estimate:
            again = min(share + (checked if share else 0.0), 1.0)
            return self._estimator.estimate_blend(work, gaps + again * reused, io)

        if wanted != AUTO:
            return float(wanted), estimate(float(wanted))
        choices = [(share, estimate(share)) for share in SHARES]
        return next((own for own in choices if own[1].hides_computing), choices[-1])

    def _compute_some(
        self, kinds: Uint8s, runs: Sequence[Run], resident_len: int, share: float
    ) -> list[Run]:
        """Mark a share of the reused tokens as computed in all layers, in place.

        Returns what is still to be read.
        """
        random, rest = np.random.default_rng(0), []
        for run in runs:
            count = round(share * len(run))
            first = run.start - resident_len
            if self._config.blend_select == FIRST:
                kinds[first : first + count] = Kind.COMPUTED
                rest += [run.part(run.start + count, run.stop)] if count < len(run) else []
            else:
                kinds[first + random.permutation(len(run))[:count]] = Kind.COMPUTED
                rest.append(run)
        return rest


def fits(plan: BlendPlan, loadings: Iterable[object]) -> bool:
    """Whether a pass has time to blend for another request beside those that wait for it."""
    others = [
        own.plan.estimate.compute
        for own in loadings
        if isinstance(own, BlendedLoading) and not own.blended
    ]
    seconds = (math.inf if own is None else own for own in (*others, plan.estimate.compute))
    return not others or sum(seconds) <= PASS_SECONDS


def _runs_of(match: StoredMatch, start: int) -> list[Run]:
    """A prefix from token `start` on."""
    runs = []
    for span in match.slice(start, match.num_tokens):
        runs.append(Run(start, span))
        start += len(span)
    return runs
