"""Whose pages a server stores: the digest of the weights that its scheduler has now.

HiCache tells its backends a model's name, which says nothing of the weights. So the scheduler is
noted before it builds HiCache, and its messages are watched as for a store of ours: from the first
change of weights until HiCache is empty, pages are neither read nor written.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from sglang.srt.layers.dp_attention import get_dp_tp_group

from impress_sglang.errors import ConfigError, UnsupportedError
from impress_sglang.hicache.pages import PageStore
from impress_sglang.plugin.factory import draft_runners, identity_of
from impress_sglang.plugin.ranks import identity_of_rank, ranks_of
from impress_sglang.plugin.weights import WeightWatch, watch_messages
from impress_sglang.serving.ranks import Ranks

logger = logging.getLogger(__name__)

_ours: Weights | None = None


class Weights:
    """The identity of a scheduler's weights, and why pages are set aside, if they are."""

    def __init__(self, scheduler: Any) -> None:
        """`scheduler` is SGLang's, which need not be complete."""
        self._scheduler = scheduler
        self.identity = ""
        self.aside: str | None = None
        self._open: Callable[[str], PageStore] | None = None
        self._pages: PageStore | None = None
        self._pools: Sequence[Any] = ()

    @functools.cached_property
    def context(self) -> Any:
        """What else is taken from SGLang's `TreeCacheBuildContext`."""
        group = get_dp_tp_group()
        return SimpleNamespace(
            tp_worker=self._scheduler.tp_worker,
            server_args=self._scheduler.server_args,
            tp_rank=group.rank_in_group,
            tp_size=group.world_size,
            # A backend of ours is refused in a pipeline.
            params=SimpleNamespace(tp_cache_group=group.cpu_group, pp_size=1),
        )

    def read(self) -> str:
        """The identity of the current weights, which all ranks have to read together."""
        drafts = draft_runners(self._scheduler.tp_worker)
        return identity_of_rank(
            ranks_of(self.context), lambda: identity_of(self.context, "HiCache", drafts)
        )

    @property
    def pages(self) -> PageStore | None:
        """The pages of these weights; None while the weights change, or without a backend."""
        return None if self.aside is not None else self._pages

    def attach(self, open_pages: Callable[[str], PageStore], pools: Sequence[Any]) -> None:
        """Open the pages of the weights' identity, and of those that follow.

        `pools` will be all of HiCache's.
        """
        self.identity = self.identity or self.read()
        self._open, self._pools = open_pages, pools
        self._pages = open_pages(self.identity)

    def detach(self) -> None:
        """Close the pages."""
        pages, self._pages, self._open = self._pages, None, None
        if pages is not None:
            pages.close()

    def watch(self) -> None:
        """Set pages aside while weights change, for a scheduler that is complete."""
        ranks = ranks_of(self.context)
        watch = WeightWatch(self, self.read, lambda: None, self._is_empty, ranks)
        watch_messages(self._scheduler, watch)
        wrapper = self._scheduler.flush_wrapper
        wrapper._flush_cache = functools.partial(self._flush, wrapper._flush_cache, watch, ranks)

    def take_over(self) -> None:
        """See `ServedStore.take_over`: there is nothing to wait for."""

    def reopen(self, identity: str) -> None:
        """Serve other weights; if their pages cannot be opened, the next flush tries again."""
        if self._open is None:
            self.identity = identity
            return
        if self._pages is not None:
            self._pages.close()
        self.identity, self._pages = "", None
        try:
            self._pages = self._open(identity)
            self.identity = identity
        except ConfigError as error:
            logger.error("pages of the new weights are not used: %s", error)

    def use_again(self) -> None:
        """Read and write pages again: all KVs of HiCache belong to `identity`."""
        self.aside = None

    def _flush(self, flush: Callable[[], bool], watch: WeightWatch, ranks: Ranks) -> bool:
        flushed = flush()
        # Identities are read together, or not at all.
        if ranks.all(flushed and self._is_empty()):
            watch.flushed()
        return flushed

    def _is_empty(self) -> bool:
        allocator = self._scheduler.token_to_kv_pool_allocator
        sizes = [(pool.available_size(), pool.logical_size) for pool in self._pools]
        return all(
            free == size for free, size in [(allocator.available_size(), allocator.size), *sizes]
        )


def note(scheduler: Any) -> Weights:
    """Note the scheduler of this process, before it builds HiCache."""
    global _ours
    _ours = Weights(scheduler)
    return _ours


def weights_of_server() -> Weights:
    """The weights of this process.

    Raises:
        UnsupportedError: no scheduler was noted.
    """
    if _ours is None:
        raise UnsupportedError(
            "HiCache tells no weights, so its pages need the plugin of IMPRESS: start the server "
            "with --hicache-storage-backend dynamic, and with impress in SGLANG_PLUGINS if that is "
            "set"
        )
    return _ours
