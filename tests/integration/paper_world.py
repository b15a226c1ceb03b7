"""The paper's tree cache with SGLang's requests and allocators around it; it loads in the pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from impress_sglang.paper.loader import LayerInputs
from impress_sglang.paper.plugin.part_cache import PartCache
from impress_sglang.paper.runtime import ServingRuntime, StoredRequest
from impress_sglang.plugin.pools import PoolLayers
from impress_sglang.storage.layout import KVShape
from tests.integration.tiny_model import Pool
from tests.integration.tree_world import IDENTITY, check_slots, matched, new_request
from tests.integration.worlds import STORED, TOKENS
from tests.unit.kv_factory import make_shape
from tests.unit.store_checks import check_store
from tests.unit.store_factory import make_config

SHAPE = make_shape(layers=3)


def make_runtime(
    root: Path,
    shape: KVShape,
    *,
    hidden_size: int = 64,
    **options: Any,
) -> ServingRuntime:
    config = make_config(root, **({"policy": "paper", "retention": 0.5} | options))
    return ServingRuntime(config, shape, IDENTITY, torch.device("cpu"), hidden_size)


class PaperWorld:
    """A tree cache with a store that has `STORED`, of which nothing is resident."""

    def __init__(self, root: Path, *, size: int = 4 * TOKENS, **options: Any) -> None:
        self.pool = Pool(SHAPE, size + TOKENS, 0.5)
        self.rows = ReqToTokenPool(4, size, "cpu", enable_memory_saver=False)
        self.allocator = TokenToKVPoolAllocator(size, torch.float32, "cpu", self.pool, False)
        self.runtime = make_runtime(root, SHAPE, **({"min_prefix_tokens": 16} | options))
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=1,
            tree_components=(ComponentType.FULL,),
            tree_core_backend="python",
        )
        layers, model = PoolLayers(self.pool), torch.nn.Module()
        self.identity = IDENTITY
        self.cache = PartCache(params, self.runtime, model, layers, None, self.read_identity)
        self.cache.attach(SimpleNamespace(waiting_queue=[]))
        self.prefill("stored", STORED)
        self.runtime.store.writes.drain()
        self.cache.reset()
        self.allocator.clear()

    def read_identity(self) -> str:
        return self.identity

    def match(self, req: Any) -> MatchResult:
        """A request is matched, and SGLang notes what was found."""
        match = matched(self.cache, req)
        req.host_hit_length, req.prefix_len = match.host_hit_length, match.device_prefix_len
        return match

    def ask(self, rid: str, **wanted: Any) -> Any:
        """A request that begins with the stored prompt is matched."""
        req = new_request(rid, [*STORED, *range(5000, 5008)], **wanted)
        self.match(req)
        return req

    def admit(self, req: Any) -> StoredRequest | None:
        loaded = self.cache.init_load_back(
            InitLoadBackParams(best_match_node=None, host_hit_length=req.host_hit_length, req=req)
        )
        return None if loaded is None else self.runtime.live[req.rid]

    def load(self, request: StoredRequest) -> None:
        """A pass loads all layers of an admitted request."""
        for layer in range(SHAPE.num_layers):
            keys, values = self.pool.keys[layer], self.pool.values[layer]
            queries = torch.randn(4, SHAPE.num_query_heads, SHAPE.key_dim)
            new_keys = torch.randn(4, SHAPE.num_kv_heads, SHAPE.key_dim)
            inputs = LayerInputs(queries, new_keys, keys, request.slots[:0], 0.3)
            self.runtime.loader.load(
                layer, request.source, inputs, keys, values, request.slots, request.stats
            )
            request.end_layer()

    def end(self, rid: str) -> None:
        """A request is over, and nobody counts it."""
        self.cache._known.pop(rid, None)
        request = self.runtime.release(rid)
        if request is not None:
            self.cache._private_tokens -= request.k
            self.allocator.free(request.slots)

    def prefill(self, rid: str, tokens: Sequence[int]) -> Any:
        """A prompt is computed and resident; its write may still go on. Returns its request."""
        req = new_request(rid, tokens)
        self.match(req)
        slots = self.allocator.alloc(len(tokens))
        assert slots is not None
        key = RadixKey(req.origin_input_ids)
        self.cache.insert(InsertParams(key=key, value=slots))
        req.last_node = self.cache.match_prefix(MatchPrefixParams(key=key)).last_device_node
        self.cache._saves.offer(self.cache._known.pop(rid), len(tokens))
        return req

    def close(self) -> None:
        """All requests and writes end, and no slot is lost."""
        # A write would wait for its layers for ever.
        self.pool.go_on.set()
        for rid in {*self.runtime.live, *self.cache._known}:
            self.end(rid)
        self.runtime.store.writes.drain()
        check_slots(self.cache, self.allocator)
        check_store(self.runtime.store)
        self.runtime.close()
