"""The service of a server that loads within a pass: how much of a stored prefix a request uses."""

from __future__ import annotations

from typing import Any

from impress_sglang.config import AUTO
from impress_sglang.cost import RequestLengths
from impress_sglang.paper.scores import retained_tokens
from impress_sglang.paper.store import PartStore
from impress_sglang.serving.load_planner import LoadPlan
from impress_sglang.serving.service import Service
from impress_sglang.store.policies import LoadOptions
from impress_sglang.store.stored import StoredMatch

# Retentions that auto chooses from, besides its floor.
RETENTIONS = (1.0, 0.75, 0.5, 0.35)


class PartService(Service):
    """A `Service` whose store is a `PartStore`."""

    store_class = PartStore

    @property
    def parts(self) -> PartStore:
        """The store that is open."""
        store = self.store
        assert isinstance(store, PartStore)
        return store

    def plan(
        self, match: StoredMatch, resident_len: int, num_tokens: int, wanted: LoadOptions
    ) -> LoadPlan | None:
        """Plan how a prompt of `num_tokens` tokens, of which `resident_len` are in SGLang's tree,
        would use its stored prefix; None if it would not.

        With auto, it uses the largest share whose reads hide behind computing.
        """
        count = match.num_tokens - resident_len
        if count < self.config.min_prefix_tokens:
            return None
        store, spans = self.parts, match.slice(resident_len, match.num_tokens)
        segments = store.segments
        if not segments.can_read(spans, in_codes=False):
            return None
        work = RequestLengths(resident_len, count, num_tokens - match.num_tokens)
        shares = [wanted.retention]
        if self.config.retention == AUTO and not wanted.chosen:
            shares = [*(own for own in RETENTIONS if own > wanted.retention), wanted.retention]
        for share in shares:
            if share >= 1.0:
                num_bytes: float = segments.bytes_to_read(spans, codes=False)
            else:
                num_bytes = store.expected_bytes(spans, share)
            found = self.estimator.estimate(work, share, segments.seconds_to_read(num_bytes))
            if not found.unhidden():
                break
        loads = self.config.load == "always" or found.loads_faster()
        return LoadPlan(match, resident_len, found, loads)

    def reorder(self) -> dict[str, int]:
        """See `Service.reorder`."""
        self.parts.enqueue_rewrites()
        self.store.poll()
        return self.parts.rewrites

    def summary(self) -> dict[str, Any]:
        """See `Service.summary`."""
        store = self.opened
        reorders = store.rewrites if isinstance(store, PartStore) else None
        return {**super().summary(), "reorder": reorders}


def tokens_used(plan: LoadPlan) -> int:
    """k: how many of the stored tokens of a plan each layer uses."""
    return retained_tokens(plan.stop - plan.start, plan.estimate.retention)
