"""What serves stored prefixes in one scheduler: the store, what is learnt of costs, and counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from impress_sglang.config import ImpressConfig
from impress_sglang.cost import Estimator
from impress_sglang.options import EXACT_BITS, ON
from impress_sglang.serving.kv_class import KVClass
from impress_sglang.serving.metrics import ServingMetrics
from impress_sglang.serving.report import RecentRequests, RequestTotals
from impress_sglang.serving.served_store import ServedStore
from impress_sglang.serving.sights import Memory
from impress_sglang.serving.why import Explainer
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import Quality
from impress_sglang.store.lookahead import LookAhead
from impress_sglang.store.policies import LoadOptions, make_policy
from impress_sglang.store.store import PrefixStore
from impress_sglang.transfer.basis_codec import BasisCodec


class Service:
    """The store of a scheduler and what goes with it; the scheduler's thread owns it."""

    def __init__(
        self,
        config: ImpressConfig,
        shape: KVShape,
        identity: str,
        device: torch.device,
        hidden_size: int,
        codec: BasisCodec | None = None,
        make_store: type[PrefixStore] = PrefixStore,
    ) -> None:
        """Open the store; `device`: where slots are, `hidden_size`: of the model.

        `codec` codes KVs, if the shape names a basis.

        Raises:
            ConfigError: a directory cannot be written, or the caches do not fit in memory.
            StoreInUseError: another server uses it for the same model.
        """
        self.config = config
        self.shape = shape
        self.policy = make_policy(config)
        self.live: Mapping[str, Any] = {}
        """Requests that are not over, by id."""
        self.self_test_seconds: float | None = None
        """What showing took that KVs come back as they were; None if nothing is stored."""
        self.totals = RequestTotals()
        self.recent = RecentRequests(show_prompts=config.show_prompts == ON)
        self.make_blends: Callable[..., Any] | None = None
        """Makes what plans blends and computes them; None unless the server blends."""
        self.metrics: ServingMetrics | None = None
        """What Prometheus reads; None unless metrics are wanted."""
        self.describe_pool: Callable[[], dict[str, int]] = dict
        """Returns who has how much of the pool of slots, in tokens; set by the pool's owner."""
        self._looks_ahead = config.lookahead == ON
        self.lookahead = LookAhead()
        """What queued requests will use, and each request's turn."""
        kept = self.lookahead if self._looks_ahead else None
        self.served = ServedStore(config, identity, shape, device, kept, codec, make_store)
        self.codec = codec
        """Codes KVs by a basis; None: there is none, and codes are those without one."""
        self.estimator = Estimator(hidden_size, overlapped=config.readahead > 0)
        self.counts: Memory | None = None
        """Where prompts are counted for this rank of all replicas; None: for this process."""
        self.usual = self.class_of(LoadOptions(bits=config.usual_bits, blend=config.blend))
        """The class of a request that asks for nothing else."""
        self.explainer = Explainer(config, self.served, self.least)
        """Says why a request got its prefix, or got none."""

    @property
    def store(self) -> PrefixStore:
        """The store, for callers that know that one is open."""
        return self.served.store

    def class_of(self, wanted: LoadOptions) -> KVClass:
        """The class of the KVs that a request gets."""
        suffice = self.shape.coded and self.policy.bits(wanted) <= self.config.code_bits
        bits = self.shape.code_bits if suffice else EXACT_BITS
        return KVClass.of(dataclasses.replace(wanted, bits=bits))

    def least(self, wanted: LoadOptions) -> Quality | None:
        """The worst stored quality that a request takes; None: nothing that is stored."""
        return self.least_of(self.class_of(wanted))

    def least_of(self, own: KVClass) -> Quality | None:
        """The same, of a request in a class."""
        if own.exact and not self.shape.exact:
            return None
        return own.worst(self.config.approximation_depth)

    def count(self, report: dict[str, Any]) -> None:
        """Count a request that has ended, by its report."""
        self.totals.add(report)
        if self.metrics is not None:
            self.metrics.observe(report)

    def tell_metrics(self, *, now: bool = False, idle: bool = False) -> None:
        """Export the counts: at most once a second, or `now`, or if `idle` and there is news."""
        if idle:
            # No batch will come that would poll.
            self.served.poll()
        if self.metrics is not None:
            self.metrics.tell(self.summary, now=now or (idle and self.metrics.has_news))

    def summary(self) -> dict[str, Any]:
        """What `GET /impress/stats` shows, but for the result of the last check."""
        self.served.poll()
        totals, store = self.totals.items(), self.served.opened
        return {
            "config": dataclasses.asdict(self.config),
            "identity": self.served.identity,
            "suspended": self.served.suspended,
            "self_test_seconds": self.self_test_seconds,
            "probe_kv_heads": list(self.shape.probe_kv_heads),
            "kv_heads": self.shape.num_kv_heads,
            "requests_live": len(self.live),
            "device_pool": self.describe_pool(),
            "totals": {k: round(v, 3) if isinstance(v, float) else v for k, v in totals},
            "store": None if store is None else store.summary(),
            "pins": None if store is None else store.pins.summary(),
            "cache": None if store is None else store.cache.summary(),
            "reorder": None,
        }

    def close(self) -> None:
        """Finish writes and close the store; nothing is served after that."""
        self.served.close()
