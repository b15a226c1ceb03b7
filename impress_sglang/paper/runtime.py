"""What serves parts of stored prefixes in one process: plans them, opens them, and ends them.

The attention backend loads their layers in between. One thread.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from impress_sglang.config import ImpressConfig
from impress_sglang.cost import RequestLengths
from impress_sglang.errors import PrefixUnreadable
from impress_sglang.options import EXACT_BITS
from impress_sglang.paper.loader import LoadStats, PartLoader
from impress_sglang.paper.scores import retained_tokens
from impress_sglang.paper.source import PartSource
from impress_sglang.paper.store import PartStore
from impress_sglang.serving.load_planner import LoadPlan
from impress_sglang.serving.report import split_again
from impress_sglang.serving.service import Service
from impress_sglang.storage.layout import KVShape
from impress_sglang.store.policies import LoadOptions
from impress_sglang.store.stored import StoredMatch

logger = logging.getLogger(__name__)

# Retentions that auto chooses from, besides its floor.
RETENTIONS = (1.0, 0.75, 0.5, 0.35)


@dataclasses.dataclass(eq=False, slots=True)
class StoredRequest:
    """A request that runs with `k` tokens of a stored prefix of `m` tokens.

    If k < m, its row begins with an offset, and attention sees only what comes after it:

        |<- start = m - k ->|<- resident ->|<- k ->|<- new ... ->|

    Invariants: the k slots are private (counted as protected by the tree) until `adopted`; layers
    below `layers_loaded` are in them, or zeros if the request has `failed`.
    """

    resident_slots: Tensor  # int64 [resident]
    slots: Tensor  # int64 [k]
    num_tokens: int
    store: PartStore
    source: PartSource
    report: dict[str, object]
    stats: LoadStats = dataclasses.field(default_factory=LoadStats)
    layers_loaded: int = 0
    loading: bool = True  # the source is open
    failed: bool = False  # they could not be loaded: SGLang drops what its pass computes
    adopted: bool = False  # its slots belong to SGLang's tree

    @property
    def k(self) -> int:
        """Tokens of the stored prefix that each layer uses."""
        return len(self.slots)

    @property
    def start(self) -> int:
        """First entry of the row that attention sees; 0: all of the prefix is used."""
        return self.num_tokens - self.k

    def end_layer(self) -> None:
        """Note that the next layer is in its slots; after the last one, end loading."""
        if self.loading:
            self.source.end_layer(self.layers_loaded)
        self.layers_loaded += 1
        if self.layers_loaded == self.source.num_layers:
            self.end_loading()

    def end_loading(self) -> None:
        """Close the source, and write what is known so far into the report; may be called again."""
        if self.loading:
            self.loading = False
            # What was read ahead is counted then.
            self.store.close_source(self.source)
        self.report.update(
            {
                name: round(value, 3) if isinstance(value, float) else value
                for name, value in dataclasses.asdict(self.stats).items()
            },
            bits_mean=EXACT_BITS,
            **self.source.stats.as_dict(),
        )


class ServingRuntime(Service):
    """Store, loader and live requests of one scheduler."""

    def __init__(
        self,
        config: ImpressConfig,
        shape: KVShape,
        identity: str,
        device: torch.device,
        hidden_size: int,
        codec: None = None,
    ) -> None:
        """Open the store; see `Service`."""
        super().__init__(config, shape, identity, device, hidden_size, make_store=PartStore)
        self.live: dict[str, StoredRequest] = {}
        """Requests that run with a stored prefix, by id."""
        self.loader = PartLoader(shape, config.alpha)

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
        if self.config.auto_retention and not wanted.chosen:
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

    def open(
        self,
        rid: str,
        plan: LoadPlan,
        resident_slots: Tensor,
        report: dict[str, object],
        allocate: Callable[[int], Tensor | None],
    ) -> StoredRequest | None:
        """Admit a request with its planned prefix; None if it must do without one.

        `resident_slots` are int64 [plan.start]. `allocate` takes n slots from SGLang's pool,
        int64 [n]; None if there is no room. The request's report is changed.
        """
        store, stored, k = self.parts, plan.stop - plan.start, tokens_used(plan)
        try:
            source = store.open_part(plan.match, plan.start, plan.stop, whole=k == stored)
        except PrefixUnreadable as error:
            logger.warning("request %s does without its stored prefix: %s", rid, error)
            store.report(error)
            return None
        slots = allocate(k)
        if slots is None:
            store.close_source(source)
            return None
        store.ahead.join(source)
        parts = {"resident": plan.start, "loaded": k, "unused": stored - k}
        report.update(
            path="ssd",
            prefix_tokens=plan.stop,
            used_tokens=plan.start + k,
            stored_tokens=stored,
            loaded_tokens=k,
            tokens=split_again(report, **parts),
        )
        self.live[rid] = request = StoredRequest(
            resident_slots, slots, stored, store, source, report
        )
        return request

    def fail(self, request: StoredRequest, error: Exception) -> None:
        """Give up a prefix that cannot be loaded; an unreadable segment is forgotten."""
        logger.warning("the stored prefix of a request cannot be loaded: %s", error)
        request.failed = True
        request.end_loading()
        if isinstance(error, PrefixUnreadable):
            self.store.report(error)

    def release(self, rid: str) -> StoredRequest | None:
        """End a request, or take it off its slots; None if it has no stored prefix.

        Its private slots belong to the caller again.
        """
        request = self.live.pop(rid, None)
        if request is not None:
            request.end_loading()
        return request

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
