"""HiCache's storage backend: pages of its host pools, by its hashes, in a `PageStore`.

HiCache gives its backends a model name, which does not identify the weights. So the scheduler is
remembered before it builds HiCache, and its messages are watched as for a store of ours: from the
first change of weights until HiCache is empty, pages are neither read nor written.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.layers.dp_attention import get_dp_tp_group
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.observability.metrics_collector import StorageMetrics
from torch import Tensor

from impress_sglang.codes.groups.codec import DIM_GRAIN, GROUP_TOKENS, GroupLayout, encode_layer
from impress_sglang.codes.groups.slots import restore
from impress_sglang.codes.rows.fit import SINK_TOKENS
from impress_sglang.config import BITS, BITS_TEXT, ImpressConfig, bytes_of
from impress_sglang.errors import ConfigError, NotCodable, UnsupportedError
from impress_sglang.hicache.pages import KEY_BYTES, PageStore
from impress_sglang.plugin.factory import draft_runners, identity_of
from impress_sglang.plugin.rank_groups import identity_of_rank, ranks_of
from impress_sglang.plugin.unsupported import check_values
from impress_sglang.plugin.weights import WeightWatch, watch_messages
from impress_sglang.serving.ranks import Ranks
from impress_sglang.threads import use_one_torch_thread

logger = logging.getLogger(__name__)

_FORMAT = 1
_SGLANGS = {"backend_name", "module_path", "class_name", "interface_v1"}
_OPTIONS = {"ssd_dir", "ssd_gb", "min_free_gb", "io_timeout"}
# Order of the axes of [2, layers, tokens, heads, dim] in a page; each is its own inverse.
_AXES = {
    "layer_first": (0, 1, 2, 3, 4),
    "page_first": (0, 2, 1, 3, 4),
    "page_first_direct": (0, 1, 2, 3, 4),
}


class _Pool:
    """A host pool of HiCache's: the keys of its pages, and their bytes.

    Few bits are the codes that need no basis (`codes.groups`). HiCache does not tell which page
    begins a sequence, nor which queries attend to it: the first tokens of each page, which may be
    attention sinks, are kept exactly, and all channels count alike.
    """

    def __init__(self, pool: Any, name: str, rank: str, bits: float | None = None) -> None:
        """`bits` per element of each page, or `UnsupportedError`; None: exact pages."""
        self.pool = pool
        page = pool.get_dummy_flat_data_page()
        self.page_bytes, self._dtype, self._codes = page.nbytes, page.dtype, None
        if bits is not None:
            if type(pool) is not MHATokenToKVPoolHost or pool.layout not in _AXES:
                raise UnsupportedError(
                    f"a {type(pool).__name__} as {pool.layout} has no pages in few bits: drop bits"
                )
            tokens, dim = pool.page_size, pool.head_dim
            floats = (torch.float32, torch.bfloat16, torch.float16)
            if tokens % GROUP_TOKENS or dim % DIM_GRAIN or page.dtype not in floats:
                raise UnsupportedError(
                    f"pages have few bits where they have a multiple of {GROUP_TOKENS} tokens "
                    f"(--page-size), heads of a multiple of {DIM_GRAIN} and 16 or 32 bits: drop "
                    "bits"
                )
            self._codes = GroupLayout(pool.head_num, dim, dim, int(bits))
            self._shape = (2, pool.layer_num, tokens, pool.head_num, dim)
            self._axes = _AXES[pool.layout]
        form = (type(pool).__name__, pool.layout, page.dtype, page.nbytes, pool.page_size)
        place = (pool.start_layer, pool.end_layer, pool.storage_format_tag, rank, bits)
        self._salt = repr((str(name), *map(str, form), *map(str, place))).encode()

    def encode(self, page: Tensor) -> memoryview | None:
        """Return the bytes to store of a page; None if it cannot be coded."""
        if self._codes is not None:
            # On a thread of HiCache's, parallel to the model.
            use_one_torch_thread()
            form = [self._shape[axis] for axis in self._axes]
            kvs = page.view(form).permute(self._axes)
            try:
                codes = encode_layer(self._codes, *kvs.flatten(1, 2))
            except NotCodable as error:
                logger.warning("a page is not stored: %s", error)
                return None
            first = kvs[:, :, :SINK_TOKENS].contiguous().view(-1).view(torch.uint8)
            page = torch.cat([codes.flatten(), first])
        return memoryview(page.contiguous().view(-1).view(torch.uint8).numpy())

    def decode(self, content: memoryview) -> Tensor:
        """Return the flat page of stored bytes."""
        if self._codes is None:
            return torch.frombuffer(content, dtype=self._dtype)
        page = torch.empty(self._shape, dtype=self._dtype)
        keys, values = page.flatten(1, 2)
        size = len(keys) // GROUP_TOKENS * self._codes.group_bytes
        codes, first = torch.frombuffer(content, dtype=torch.uint8).split(
            [size, len(content) - size]
        )
        groups = codes.view(-1, self._codes.group_bytes)
        restore(self._codes, groups, 0, torch.arange(len(keys)), keys, values)
        sinks = page[:, :, :SINK_TOKENS]
        sinks.copy_(first.clone().view(self._dtype).view(sinks.shape))
        return page.permute(self._axes).flatten()

    def keys(self, hashes: Sequence[str]) -> list[bytes]:
        return [
            hashlib.blake2b(digest.encode() + self._salt, digest_size=KEY_BYTES).digest()
            for digest in hashes
        ]


class ImpressStorage(HiCacheStorage):
    """A backend of SGLang's HiCache; see its class for the methods.

    Disk errors raise nothing here: an unreadable page is a miss, and ends HiCache's prefix.
    """

    def __init__(self, storage_config: Any, _: Any = None) -> None:
        """Find the pages of this server's weights."""
        extra = dict(storage_config.extra_config or {})
        self._bits = extra.pop("bits", None)
        if self._bits not in (None, *BITS):
            raise ConfigError(f"bits of HiCache's pages must be one of {BITS_TEXT}")
        if unknown := sorted(extra.keys() - _SGLANGS - _OPTIONS):
            raise ConfigError(f"unknown in the extra config of HiCache: {', '.join(unknown)}")
        if not {"ssd_dir", "ssd_gb"} <= extra.keys() or not extra.get("interface_v1"):
            raise ConfigError(
                "the extra config of HiCache needs ssd_dir, ssd_gb and interface_v1: `impress "
                "hicache-config` prints it"
            )
        self._options = ImpressConfig.from_options(
            {name: value for name, value in extra.items() if name in _OPTIONS}
        )
        self._storage_config = storage_config
        self.pools: dict[str, _Pool] = {}
        self._stats = StorageMetrics()
        if _guard is None:
            raise UnsupportedError(
                "HiCache tells no weights, so its pages need the plugin of IMPRESS from the start: "
                "start the server with --hicache-storage-backend dynamic and this config, and "
                "with impress in SGLANG_PLUGINS if that is set"
            )
        self._weights = _guard
        options = resolved_view(self._weights.context.server_args)
        check_values(options)
        why = "stores no pages of HiCache with that"
        check_values(storage_config, {why: ("pp_size attn_cp_size dcp_size", (1,))})
        check_values(options, {why: ("attn_dp_size", (1,))})
        if options.enable_dp_attention or storage_config.should_split_heads:
            raise UnsupportedError(f"IMPRESS {why}: drop --enable-dp-attention or tp_lcm_size")
        # HiCache's keys have the id of an adapter, which SGLang makes of its name and path.
        why = "cannot tell an adapter from what was at its path before, by HiCache's keys"
        check_values(options, {why: ("enable_lora lora_paths", (None, False))})
        self._weights.attach(self)

    def open_pages(self, identity: str) -> PageStore:
        # All ranks of a model with MLA have the same pages, which the first one writes.
        rank = 0 if self._storage_config.is_mla_model else self._storage_config.tp_rank
        name = f"{_FORMAT} {identity[:-4]} {rank}"
        return PageStore(
            self._options.ssd_path,
            hashlib.blake2b(name.encode(), digest_size=16).hexdigest(),
            ssd_bytes=bytes_of(self._options.ssd_gb),
            min_free_bytes=bytes_of(self._options.min_free_gb),
            patience=self._options.io_timeout,
        )

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self.register_mem_host_pool_v2(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        # States of Mamba differ between ranks whose latent KVs are the same.
        alike = self._storage_config.is_mla_model and host_pool_name != PoolName.MAMBA
        rank = "" if alike else f"{self._storage_config.tp_rank}/{self._storage_config.tp_size}"
        bits = self._bits if host_pool_name == PoolName.KV else None
        self.pools[host_pool_name] = _Pool(host_pool, host_pool_name, rank, bits)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self.batch_exists_v2(keys).kv_hit_pages

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        if (pages := self._weights.pages) is None:
            return PoolTransferResult.empty()
        count = pages.leading(self.pools[PoolName.KV].keys(keys))
        hits, ends = {PoolName.KV: count} if count else {}, set(range(1, count + 1))
        for transfer in pool_transfers or ():
            has = pages.has(self.pools[transfer.name].keys(keys[:count]))
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                last = has.index(False) if False in has else count
                good = set(range(1, last + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
                good = {end for end in ends if all(has[max(0, end - window) : end])}
            else:
                raise UnsupportedError(f"pages are not stored by {transfer.hit_policy}")
            if good:
                hits[transfer.name] = max(good)
            ends &= good
        return PoolTransferResult(max(ends, default=0), hits, sorted(ends))

    def batch_get_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: Any = None
    ) -> list[bool]:
        return self._get(PoolName.KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: Any = None
    ) -> list[bool]:
        return self._set(PoolName.KV, keys, host_indices)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {t.name: self._get(t.name, t.keys or [], t.host_indices) for t in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {t.name: self._set(t.name, t.keys or [], t.host_indices) for t in transfers}

    def _not_called(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError('HiCache calls it only without "interface_v1"')

    get = batch_get = set = batch_set = exists = _not_called

    def clear(self) -> None:
        if (pages := self._weights.pages) is not None:
            pages.clear()

    def get_stats(self) -> StorageMetrics:
        stats, self._stats = self._stats, StorageMetrics()
        return stats

    def close(self) -> None:
        self._weights.detach()

    def _get(self, name: str, hashes: list[str], host_indices: Tensor | None) -> list[bool]:
        pool = self.pools[name]
        put = pool.pool.set_from_flat_data_page
        return self._copy_pages(
            pool,
            hashes,
            host_indices,
            "prefetch",
            lambda pages, keys, starts: pages.get(
                keys, lambda place, content: put(starts[place], pool.decode(content))
            ),
        )

    def _set(self, name: str, hashes: list[str], host_indices: Tensor | None) -> list[bool]:
        pool = self.pools[name]
        page_at = pool.pool.get_data_page
        return self._copy_pages(
            pool,
            hashes,
            host_indices,
            "backup",
            lambda pages, keys, starts: pages.set(
                keys, lambda place: pool.encode(page_at(starts[place]))
            ),
        )

    def _copy_pages(
        self,
        pool: _Pool,
        hashes: list[str],
        host_indices: Tensor | None,
        kind: str,
        move: Callable[[PageStore, list[bytes], list[int]], list[bool]],
    ) -> list[bool]:
        """Return which pages were moved; none unless each of them has slots.

        SGLang's metrics of this `kind` record their number, and the GB/s.
        """
        pages, size = self._weights.pages, pool.pool.page_size
        if pages is None or host_indices is None or host_indices.numel() != len(hashes) * size:
            return [False] * len(hashes)
        began = time.perf_counter()
        moved = move(pages, pool.keys(hashes), host_indices[::size].tolist())
        if self._storage_config.enable_storage_metrics:
            seconds, count = time.perf_counter() - began, sum(moved)
            getattr(self._stats, f"{kind}_pgs").append(count)
            rate = count * pool.page_bytes / seconds / 1e9
            getattr(self._stats, f"{kind}_bandwidth").append(rate)
        return moved


_guard: PageStoreGuard | None = None


class PageStoreGuard:
    """The identity of a scheduler's weights, and why pages are suspended, if they are."""

    def __init__(self, scheduler: Any) -> None:
        """`scheduler` is SGLang's, which need not be complete."""
        self._scheduler = scheduler
        self.identity = ""
        self.suspended_by: str | None = None
        self._backend: ImpressStorage | None = None
        self._pages: PageStore | None = None

    @functools.cached_property
    def context(self) -> Any:
        """The parts of SGLang's `TreeCacheBuildContext` that are needed."""
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
        """Read the identity of the current weights; all ranks must do so together."""
        drafts = draft_runners(self._scheduler)
        return identity_of_rank(
            ranks_of(self.context), lambda: identity_of(self.context, "HiCache", drafts)
        )

    @property
    def pages(self) -> PageStore | None:
        """The pages of these weights; None while the weights change, or without a backend."""
        return None if self.suspended_by is not None else self._pages

    def attach(self, backend: ImpressStorage) -> None:
        """Open the pages of these weights, and later of new ones, for HiCache's backend."""
        self.identity = self.identity or self.read()
        self._backend, self._pages = backend, backend.open_pages(self.identity)

    def detach(self) -> None:
        pages, self._pages, self._backend = self._pages, None, None
        if pages is not None:
            pages.close()

    def watch(self) -> None:
        """Suspend pages while weights change, for a complete scheduler.

        Without a backend by now there will be none: nobody would have seen weights change.
        """
        global _guard
        if not self.identity:
            _guard = None
            return
        ranks = ranks_of(self.context)
        watch = WeightWatch(self, self.read, lambda: None, self._is_empty, ranks)
        watch_messages(self._scheduler, watch)
        wrapper = self._scheduler.flush_wrapper
        wrapper._flush_cache = functools.partial(self._flush, wrapper._flush_cache, watch, ranks)

    def adopt_opened(self) -> None:
        """See `Service.adopt_opened`: there is nothing to wait for."""

    def reopen(self, identity: str) -> None:
        """Serve other weights; if their pages cannot be opened, the next flush tries again."""
        if self._backend is None:
            self.identity = identity
            return
        if self._pages is not None:
            self._pages.close()
        self.identity, self._pages = "", None
        try:
            self._pages = self._backend.open_pages(identity)
            self.identity = identity
        except ConfigError as error:
            logger.error("pages of the new weights are not used: %s", error)

    def resume(self) -> None:
        """Resume reads and writes: all KVs of HiCache belong to `identity`."""
        self.suspended_by = None

    def _flush(self, flush: Callable[[], bool], watch: WeightWatch, ranks: Ranks) -> bool:
        flushed = flush()
        # All ranks read identities together, or none does.
        if ranks.all(flushed and self._is_empty()):
            watch.flushed()
        return flushed

    def _is_empty(self) -> bool:
        allocator = self._scheduler.token_to_kv_pool_allocator
        pools = {} if self._backend is None else self._backend.pools
        return allocator.available_size() == allocator.size and all(
            pool.pool.available_size() == pool.pool.logical_size for pool in pools.values()
        )


def remember_scheduler(scheduler: Any) -> PageStoreGuard:
    """Remember the scheduler of this process, before it builds HiCache."""
    global _guard
    _guard = PageStoreGuard(scheduler)
    return _guard
