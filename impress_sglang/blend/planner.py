"""Plans how requests that accept approximate KVs reuse stored text that is no prefix.

Part of it is recomputed (CacheBlend, 4.2); requests of another class never see the result.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from impress_sglang.blend.job import CHECKED_LAYERS, BlendJob, TokenKind, groups_of, runs_of
from impress_sglang.codes.rotation import KeyRotation
from impress_sglang.config import AUTO, AUTO_SHARE, OFF
from impress_sglang.cost import Estimate, RequestLengths, best_within_tolerance
from impress_sglang.loops.types import Uint8s
from impress_sglang.serving.kv_class import KVClass
from impress_sglang.serving.load_jobs import LoadJob
from impress_sglang.serving.service import Service
from impress_sglang.serving.why import Detail, Reason
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.stored import StoredMatch, StoredSpan

# Leading tokens that are computed unless they are resident or stored as a prefix: attention needs
# its usual first tokens (AttentionStore's truncation as printed fails without them).
HEAD_TOKENS = 16
# Seconds after which a slow blend is tried again.
MEASURE_SECONDS = 60.0
# Shares that auto chooses from, the largest first.
RECOMPUTE_RATIOS = (0.75, 0.5, 0.4, 0.3, 0.25, 0.2, AUTO_SHARE)


class BlendPlanner:
    """Plans how requests reuse text that is not a prefix; not thread-safe."""

    def __init__(
        self,
        service: Service,
        rotation: KeyRotation,
        page_size: int,
        read_tokens: int,
        measure: Callable[[Sequence[StoredSpan]], None],
    ) -> None:
        """`rotation` rotates the model's keys, `read_tokens` bounds a read step, and `measure`
        learns how fast reads are now."""
        self.refusal: str | None = None
        """Why this server turned out to be unable to blend."""
        self._measure_at = 0.0
        self._service, self._config = service, service.config
        self._rotation = rotation
        self._page_size = page_size
        self._read_tokens = read_tokens
        self._measure = measure

    def plan(
        self,
        namespace: str,
        space: tuple[str | None, str | None],
        tokens: Tokens,
        resident_len: int,
        plain_job: LoadJob | None,
        kv_class: KVClass,
        blend: float | str,
    ) -> BlendJob | Detail | None:
        """Plan how a request would blend.

        Args:
            namespace: the request's namespace.
            space: see `LoadJob`.
            tokens: the prompt without its last token, which is always computed.
            resident_len: number of `tokens` in SGLang's tree, in its class.
            plain_job: the load without blending; None if the request would compute.
            kv_class: the request's class.
            blend: the requested share, or `AUTO`, or `OFF`.

        Returns:
            A job that has not started. If the request would not blend: why, or None if none
            of its text is stored.
        """
        service = self._service
        if blend == OFF or kv_class.recompute_ratio >= 1.0 or kv_class.exact:
            return None
        if not service.in_use or not service.store.health.readable:
            return None
        store, content = service.store, service.store.tree.content
        if content is None:
            return None
        if self.refusal is not None:
            return Reason.BLEND_UNSUPPORTED, self.refusal
        name, worst = store.namespace(namespace), kv_class.worst(self._config.approximation_depth)
        match = store.tree.match(name, tokens, min_quality=worst)
        if match.num_tokens - resident_len < HEAD_TOKENS:
            # Such a short match is a coincidence: compute its tokens exactly.
            match = StoredMatch()
        prefix_len = max(match.num_tokens, resident_len)
        done = prefix_len if plain_job is None else max(plain_job.stop, prefix_len)
        runs = content.find(name, tokens, prefix_len)
        stop = (runs[-1].stop if runs else prefix_len) // self._page_size * self._page_size
        runs = tuple(run.part(prefix_len, stop) for run in runs if run.start < stop)
        more = sum(max(run.stop - max(run.start, done), 0) for run in runs)
        min_tokens = self._config.blend_min_tokens
        if more < min_tokens:
            return (Reason.BLEND_TOO_SHORT, f"{more:,} of {min_tokens:,} tokens") if more else None
        kinds = np.full(stop - resident_len, TokenKind.COMPUTED, np.uint8)
        kinds[: prefix_len - resident_len] = TokenKind.KEPT
        for run in runs:
            kinds[run.start - resident_len : run.stop - resident_len] = TokenKind.REUSED
        if prefix_len < HEAD_TOKENS:
            kinds[: HEAD_TOKENS - resident_len] = TokenKind.COMPUTED
        work = RequestLengths(resident_len, stop - resident_len, len(tokens) + 1 - stop)
        read = (*runs_of(match, resident_len), *runs)
        num_bytes = store.readers.bytes_to_read([run.span for run in read], codes=True)
        io = store.readers.seconds_to_read(num_bytes)
        share, estimate = self._choose(
            work, kinds, io, RECOMPUTE_RATIOS if blend == AUTO else (float(blend),)
        )
        if (refusal := self._too_slow(estimate, plain_job)) is not None:
            # A drive that was slow may be faster again, and so may be blending.
            self._measure([run.span for run in read])
            learnt, now = estimate.compute, time.monotonic()
            _, estimate = self._choose(work, kinds, io, (share,), measured=False)
            if self._too_slow(estimate, plain_job) or now < self._measure_at:
                return refusal
            # Trials share the model with other requests for a small part of the time only,
            # however slow blends were.
            pause = MEASURE_SECONDS * max(learnt / self._config.blend_seconds, 1.0)
            self._measure_at = now + pause
        # Groups are read one after the other, so each must fit by itself.
        for group in groups_of(read, self._read_tokens):
            if not store.readers.can_read([run.span for run in group], in_codes=True):
                return Reason.NO_BUFFERS, ""
        # Touched, so that segments that are opened later are not evicted before.
        for segment in dict.fromkeys(run.span.segment for run in read):
            store.tree.touch(StoredMatch((StoredSpan(segment, 0, 1),)))
        estimate = dataclasses.replace(estimate, bits=kv_class.bits)
        return BlendJob(
            store,
            kv_class,
            space,
            tokens[:stop],
            match,
            resident_len,
            rotation=self._rotation,
            estimate=estimate,
            runs=read,
            kinds=kinds,
            recompute_ratio=share,
            num_new=work.new,
            read_tokens=self._read_tokens,
        )

    def _too_slow(self, estimate: Estimate, plain_job: LoadJob | None) -> Detail | None:
        """Return why a blend with this estimate is refused, or None."""
        max_seconds = self._config.blend_seconds
        if estimate.compute > max_seconds:
            return Reason.BLEND_TOO_LONG, f"{estimate.compute:.1f} of {max_seconds:g} s"
        if estimate.load is None or estimate.recompute is None:
            return None
        other = estimate.recompute
        if plain_job is not None and plain_job.estimate.load is not None:
            other = min(other, plain_job.estimate.load)
        if self._config.load != "always" and estimate.load > other:
            return Reason.BLEND_SLOWER, f"{1e3 * estimate.load:.1f} ms and {1e3 * other:.1f} ms"
        return None

    def _choose(
        self,
        work: RequestLengths,
        kinds: Uint8s,
        io: float,
        shares: Sequence[float],
        *,
        measured: bool = True,
    ) -> tuple[float, Estimate]:
        """Choose the largest share whose blend takes hardly longer than with the smallest.

        `measured`: see `Estimator.estimate_blend`.
        """
        counts, estimates = np.bincount(kinds, minlength=len(TokenKind)), []
        for share in shares:
            checked = CHECKED_LAYERS / self._service.shape.num_layers if share else 0.0
            again = min(share + checked, 1.0)
            computed = float(counts[TokenKind.COMPUTED] + again * counts[TokenKind.REUSED])
            estimator = self._service.estimator
            estimates.append(estimator.estimate_blend(work, computed, io, measured=measured))
        # Without measurements, all shares seem to take equally long.
        chosen = best_within_tolerance(estimates) if estimates[-1].known else -1
        return shares[chosen], estimates[chosen]
