"""The store of the weights that are served: opened, set aside, and replaced when they are.

What may wait for the disk is done in the background: a server goes on computing meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, wait

import torch

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import ImpressError, PrefixUnreadable
from impress_sglang.management.begun import Begun
from impress_sglang.management.disk import StoreDisk
from impress_sglang.management.expiry import Expiry
from impress_sglang.management.lookahead import LookAhead
from impress_sglang.management.memory import StoreMemory
from impress_sglang.management.policies import make_policy
from impress_sglang.management.purging import Purge
from impress_sglang.management.store import PrefixStore
from impress_sglang.management.wear import WriteBudget
from impress_sglang.storage.layout import KVShape
from impress_sglang.threads import BackgroundThread

logger = logging.getLogger(__name__)

# Why the store is not used while one is opened, and where that failed.
OPENING = "opening"
NOT_OPENED = "not opened"
# How long a server waits at its start for a store with many segments.
START_SECONDS = 5.0


class ServedStore:
    """At most one open store, and the memory that it shares with the one that follows it."""

    def __init__(
        self,
        config: ImpressConfig,
        identity: str,
        shape: KVShape,
        device: torch.device,
        lookahead: LookAhead | None = None,
    ) -> None:
        """Open the store of these weights; `device` is where attention runs.

        `lookahead` knows what not to evict; None: the store does not ask. What takes longer than
        START_SECONDS is taken over when it is there, and requests are computed until then.

        Raises:
            ConfigError: a directory cannot be written, or the caches do not fit in memory.
            StoreInUseError: another server uses it for the same model.
        """
        self.identity = identity
        """Of the store that is open or being opened; empty if there is none."""
        self.aside: str | None = None
        """Why the store may not be used (`integration.weights`), also where one is open."""
        self.expiry = Expiry(config.ttl)
        self.purges = Begun[str, Purge]()
        self._budget = WriteBudget(config.write_gb_per_day)
        self._config = config
        self._shape = shape
        self.stores = make_policy(config).stores
        """Whether the policy has a store at all."""
        # Of the store; where none is open, for the next one.
        self._memory = StoreMemory.allocate(config, shape, device)
        self._lookahead = lookahead
        self._store: PrefixStore | None = None
        self._opener = BackgroundThread("impress-store")
        opening = self._opener.submit(StoreDisk, config, identity)
        self._opening: Future[StoreDisk] | None = opening
        wait([opening], START_SECONDS)
        if opening.done():
            self._take_opened()
        else:
            logger.info("the store takes long to open: until it is there, requests are computed")

    @property
    def opened(self) -> PrefixStore | None:
        """The store, None while another one is being opened."""
        return self._store

    @property
    def store(self) -> PrefixStore:
        """The store, for who knows that one is open: it is used, or a request reads from it."""
        assert self._store is not None
        return self._store

    @property
    def suspended(self) -> str | None:
        """Why the store is not used, None while it is."""
        if self.aside is None and self._store is None:
            return OPENING
        return self.aside

    @property
    def in_use(self) -> bool:
        """Whether prefixes are looked for in the store, and offered to it."""
        return self.stores and self.suspended is None

    def report_miss(self, rid: str, error: PrefixUnreadable) -> None:
        """A request has to do without its stored prefix, which cannot be read."""
        logger.warning("request %s does without its stored prefix: %s", rid, error)
        self.store.report(error)

    def use_again(self) -> None:
        """All KVs in the pool are of `identity`: use its store, once it is open."""
        if self.aside is not None:
            self.aside = None
            self._say_used()

    def reopen(self, identity: str) -> None:
        """Serve other weights; no request reads a prefix.

        The old store is closed and the other one opened behind the caller, one after the other;
        `take_over` makes it ours.
        """
        logger.info("prefixes of other weights are set aside; opening the store of %s", identity)
        self._discard_opening()
        self._discard_store()
        self.identity = identity
        self._opening = self._opener.submit(StoreDisk, self._config, identity)

    def poll(self) -> None:
        """Take in what other threads have done; never waits."""
        self.take_over()
        if self._store is not None:
            self._store.poll()
            self.expiry.poll(self._store)

    def take_over(self) -> None:
        """Take a store that was opened in the background, if it is there; never waits for it."""
        if self._opening is None or not self._opening.done():
            return
        try:
            self._take_opened()
        except Exception as error:
            # Whatever it is, answers are right without the store.
            logger.error(
                "the store of these weights cannot be opened; the next flush tries again: %s",
                error,
                exc_info=not isinstance(error, ImpressError),
            )
            self.identity = ""
            self.aside = self.aside or NOT_OPENED
            return
        self._say_used()

    def _take_opened(self) -> None:
        """Take what was opened, or raise what stood against it."""
        opening, self._opening = self._opening, None
        assert opening is not None
        disk = opening.result()
        try:
            self._store = PrefixStore(
                self._config,
                self.identity,
                self._shape,
                disk=disk,
                memory=self._memory,
                lookahead=self._lookahead,
                budget=self._budget,
            )
        except BaseException:
            self._opener.submit(_close_logged, disk.close)
            raise

    def close(self) -> None:
        """Finish writes and close the store; nothing is served after that.

        Another one that is being opened is waited for no longer than `--impress-io-timeout`.
        """
        if self._store is None:
            self._memory.close()
        else:
            self._store.close()
        self._discard_opening()
        self._opener.close(self._config.io_timeout)

    def _discard_store(self) -> None:
        """Close what is open, in the background where that waits for the disk."""
        store, self._store = self._store, None
        # Names of it mean nothing to another one: who goes on begins anew.
        self.purges.clear()
        self.expiry.forget()
        if store is not None:
            # So that none of them tells the tree cache of its end from the other thread.
            store.writes.abandon()
            # Memory is not allocated again: that would take long, or what is left would not do.
            self._memory = store.retire().emptied(self._config)
            self._opener.submit(_close_logged, store.leave_disk)

    def _discard_opening(self) -> None:
        """Close what is being opened when it is there, in the background."""
        opening, self._opening = self._opening, None
        if opening is not None and not opening.cancel():
            self._opener.submit(_close_late, opening)

    def _say_used(self) -> None:
        if self.suspended is None:
            logger.info("the store is used again, for weights %s", self.identity)


def _close_logged(close: Callable[[], None]) -> None:
    try:
        close()
    except Exception:
        logger.exception("a store that is not used any more could not be closed")


def _close_late(opening: Future[StoreDisk]) -> None:
    """Of an opening that has ended, and whose store nobody wants any more."""
    if opening.exception() is None:
        _close_logged(opening.result().close)
