"""Serves stored prefixes in one scheduler: holds the store, the learnt costs, and the counters.

The store is opened, suspended, and replaced with the weights that are served. Work that may wait
for the disk runs in the background; a server continues computing meanwhile.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch

from impress_sglang.config import EXACT_BITS, ON, ImpressConfig
from impress_sglang.cost import Estimator
from impress_sglang.errors import ImpressError
from impress_sglang.serving.kv_class import KVClass
from impress_sglang.serving.metrics import ServingMetrics
from impress_sglang.serving.prefix_frequency import Memory
from impress_sglang.serving.report import RecentRequests, RequestTotals
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import Quality
from impress_sglang.store.disk import StoreDisk
from impress_sglang.store.lookahead import LookAhead
from impress_sglang.store.memory import StoreMemory
from impress_sglang.store.orders import MultiStepJobs, Purge
from impress_sglang.store.policies import LoadOptions, make_policy
from impress_sglang.store.quota import WriteBudget
from impress_sglang.store.store import PrefixStore
from impress_sglang.threads import BackgroundThread
from impress_sglang.transfer.codecs import Codec

logger = logging.getLogger(__name__)

# Reasons why no store is used: one is being opened, or could not be opened.
OPENING = "opening"
NOT_OPENED = "not opened"
# Seconds that a starting server waits for a store with many segments to open.
START_SECONDS = 5.0


class Service:
    """The store of a scheduler and its costs, counters and memory. Thread: scheduler.

    At most one store is open; it passes its memory to the next one.
    """

    store_class = PrefixStore

    def __init__(
        self,
        config: ImpressConfig,
        shape: KVShape,
        identity: str,
        device: torch.device,
        hidden_size: int,
        codec: Codec | None = None,
    ) -> None:
        """Open the store of these weights; `device` has the slots, `hidden_size` is the model's.

        `codec` codes KVs; None if the shape has no codes. A store that takes longer to open than
        START_SECONDS is taken over later, and requests are computed until then.

        Raises:
            ConfigError: a directory cannot be written, or the caches do not fit in memory.
            StoreInUseError: another server uses it for the same model.
        """
        self.config = config
        self.shape = shape
        self.policy = make_policy(config)
        self.self_test_seconds: float | None = None
        """Duration of the self-test that KVs come back unchanged; None if nothing is stored."""
        self.totals = RequestTotals()
        self.recent = RecentRequests(show_prompts=config.show_prompts == ON)
        self.metrics: ServingMetrics | None = None
        """Metrics for Prometheus; None unless enabled."""
        self.describe_pool: Callable[[], dict[str, int]] = dict
        """Returns the use of the pool of slots, in tokens; set by the pool's owner."""
        self.lookahead = LookAhead(enabled=config.lookahead == ON)
        """Chunks that queued requests will use, and the turn of each request."""
        self._make_store = functools.partial(
            self.store_class,
            config,
            shape=shape,
            lookahead=self.lookahead,
            budget=WriteBudget(config.write_gb_per_day),
            codec=codec,
        )
        self.codec = codec
        """Codes KVs; None if the shape has no codes."""
        self.estimator = Estimator(hidden_size, overlapped=config.readahead > 0)
        self.counts: Memory | None = None
        """Memory in which this rank of all replicas counts prompts; None: only this process."""
        default = LoadOptions(bits=config.default_bits, blend=config.blend)
        self.default_class = self.class_of(default)
        """Class of requests without options."""
        self.identity = identity
        """Model identity of the store that is open or being opened; empty if there is none."""
        self.suspended_by: str | None = None
        """Why the store may not be used, even if open (`plugin.weights`); None if it may."""
        self.opened: PrefixStore | None = None
        """The open store; None while there is none."""
        self.purges = MultiStepJobs[str, Purge]()
        # Belongs to the open store, or is kept for the next one.
        self._memory = StoreMemory.allocate(config, shape, device)
        self._opener = BackgroundThread("impress-store")
        self._opening: Future[StoreDisk] | None = self._opener.submit(StoreDisk, config, identity)
        wait([self._opening], START_SECONDS)
        if self._opening.done():
            self._take_opened()
        else:
            logger.info("the store takes long to open: until it is there, requests are computed")

    @property
    def store(self) -> PrefixStore:
        """The open store, for callers that use it, or while a request reads it."""
        assert self.opened is not None
        return self.opened

    @property
    def suspended(self) -> str | None:
        """Why the store is not used; None while it is."""
        return OPENING if self.suspended_by is None and self.opened is None else self.suspended_by

    @property
    def in_use(self) -> bool:
        """Whether prefixes are matched with the store, and offered to it."""
        return self.policy.stores and self.suspended is None

    def resume(self) -> None:
        """Resume the use of the store, or of the one being opened: all KVs in the pool now belong
        to `identity`."""
        if self.suspended_by is not None:
            self.suspended_by = None
            self._log_used()

    def reopen(self, identity: str) -> None:
        """Switch to other weights; must be called while no request reads a prefix.

        The old store is closed and the new one opened in the background; `adopt_opened` starts to
        use the new one.
        """
        logger.info("prefixes of other weights are set aside; opening the store of %s", identity)
        self._discard_opening()
        store, self.opened = self.opened, None
        # Another store has other segments: purges begin again.
        self.purges.clear()
        if store is not None:
            # Now, so that no write reports its end to the tree cache from the other thread.
            store.writes.abandon()
            # Memory is kept: allocating it again would take long, or fail.
            self._memory = store.retire().emptied(self.config)
            self._opener.submit(_close_logged, store.leave_disk)
        self.identity = identity
        self._opening = self._opener.submit(StoreDisk, self.config, identity)

    def poll(self) -> None:
        """Process results of other threads; never waits."""
        self.adopt_opened()
        if self.opened is not None:
            self.opened.poll()

    def adopt_opened(self) -> None:
        """Start to use a store that was opened in the background, if ready; never waits for it."""
        if self._opening is None or not self._opening.done():
            return
        try:
            self._take_opened()
        except Exception as error:
            # Answers are correct without the store, whatever the error is.
            logger.error(
                "the store of these weights cannot be opened; the next flush tries again: %s",
                error,
                exc_info=not isinstance(error, ImpressError),
            )
            self.identity = ""
            self.suspended_by = self.suspended_by or NOT_OPENED
            return
        self._log_used()

    def _take_opened(self) -> None:
        opening, self._opening = self._opening, None
        assert opening is not None
        disk = opening.result()
        try:
            self.opened = self._make_store(identity=self.identity, disk=disk, memory=self._memory)
        except BaseException:
            self._opener.submit(_close_logged, disk.close)
            raise

    def _discard_opening(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None and not opening.cancel():
            self._opener.submit(_close_late, opening)

    def _log_used(self) -> None:
        if self.suspended is None:
            logger.info("the store is used again, for weights %s", self.identity)

    def class_of(self, options: LoadOptions) -> KVClass:
        """Return the class of the KVs that a request gets."""
        suffice = self.shape.coded and self.policy.bits(options) <= self.config.code_bits
        bits = self.shape.code_bits if suffice else EXACT_BITS
        return KVClass.of(dataclasses.replace(options, bits=bits))

    def min_quality(self, wanted: LoadOptions) -> Quality | None:
        """Worst stored quality that a request accepts; None if it accepts no stored KVs."""
        return self.min_quality_of(self.class_of(wanted))

    def min_quality_of(self, kv_class: KVClass) -> Quality | None:
        """Worst stored quality that requests of a class accept; None as in `min_quality`."""
        if kv_class.exact and not self.shape.exact:
            return None
        return kv_class.worst(self.config.approximation_depth)

    def reorder(self) -> dict[str, int] | None:
        """Search for prefixes worth reordering; None if the policy never reorders."""
        return None

    def count(self, report: dict[str, Any]) -> None:
        """Count a finished request by its report."""
        self.totals.add(report)
        if self.metrics is not None:
            self.metrics.observe(report)

    def publish_metrics(self, *, now: bool = False, idle: bool = False) -> None:
        """Export the counts: at most once a second, or `now`, or if `idle` and there is news."""
        if idle:
            # No batch will come that would poll.
            self.poll()
        if self.metrics is not None:
            self.metrics.publish(self.summary, now=now or (idle and self.metrics.has_changed))

    def summary(self) -> dict[str, Any]:
        """Return the content of `GET /impress/stats`: store, caches, and finished requests."""
        self.poll()
        totals, store = self.totals.items(), self.opened
        return {
            "config": dataclasses.asdict(self.config),
            "identity": self.identity,
            "suspended": self.suspended,
            "self_test_seconds": self.self_test_seconds,
            "probe_kv_heads": list(self.shape.probe_kv_heads),
            "kv_heads": self.shape.num_kv_heads,
            "device_pool": self.describe_pool(),
            "totals": {k: round(v, 3) if isinstance(v, float) else v for k, v in totals},
            "store": None if store is None else store.summary(),
            "pins": None if store is None else store.pins.summary(),
            "cache": None if store is None else store.cache.summary(),
            "reorder": None,
        }

    def close(self) -> None:
        """Finish writes and close the store; nothing is served afterwards.

        Waits for a store that is being opened no longer than `--impress-io-timeout`.
        """
        (self._memory if self.opened is None else self.opened).close()
        self._discard_opening()
        self._opener.close(self.config.io_timeout)


def _close_logged(close: Callable[[], None]) -> None:
    try:
        close()
    except Exception:
        logger.exception("a store that is not used any more could not be closed")


def _close_late(opening: Future[StoreDisk]) -> None:
    """Close the store of an opening that has ended, if it succeeded."""
    if opening.exception() is None:
        _close_logged(opening.result().close)
