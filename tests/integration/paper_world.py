"""The paper's tree cache in a world of `tree_world`: it loads in the model's pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey

from impress_sglang.paper.plugin.part_cache import PartCache
from impress_sglang.paper.request import StoredRequest
from impress_sglang.paper.service import PartService
from tests.integration.tree_world import IDENTITY, TreeWorld, matched, new_request
from tests.integration.worlds import STORED, TOKENS
from tests.unit.kv_factory import make_shape
from tests.unit.store_checks import check_store

USUAL: dict[str, Any] = {"policy": "paper", "retention": 0.5, "bits": "exact", "blend": "off"}


class PaperWorld(TreeWorld):
    """The store has `STORED`, of which nothing is resident."""

    service_class, cache_class = PartService, PartCache
    shape = make_shape(layers=3)

    def __init__(self, root: Path, *, size: int = 4 * TOKENS, **options: Any) -> None:
        self.identity = IDENTITY
        super().__init__(root, size=size, **(USUAL | options))
        self.prefill("stored", STORED)
        self.service.store.writes.drain()
        self.cache.reset()
        self.allocator.clear()

    def read_identity(self) -> str:
        return self.identity

    def loads(self, req: Any) -> int:
        """A request is matched, and SGLang notes what was found; how much would be loaded."""
        match = matched(self.cache, req)
        req.host_hit_length, req.prefix_len = match.host_hit_length, match.device_prefix_len
        return int(match.host_hit_length)

    def ask(self, rid: str, **wanted: Any) -> Any:
        """A request that begins with the stored prompt is matched."""
        req = new_request(rid, [*STORED, *range(5000, 5008)], **wanted)
        self.loads(req)
        return req

    def begin_load(self, req: Any) -> StoredRequest | None:
        """A request is admitted; None if nothing is loaded for it."""
        loaded = self.cache.init_load_back(
            InitLoadBackParams(best_match_node=None, host_hit_length=req.host_hit_length, req=req)
        )
        return None if loaded is None else self.cache.live[req.rid]

    def load(self, request: StoredRequest) -> None:
        """A pass loads all layers of an admitted request."""
        shape = self.shape
        for layer in range(shape.num_layers):
            keys, values = self.pool.keys[layer], self.pool.values[layer]
            queries = torch.randn(4, shape.num_query_heads, shape.key_dim)
            new_keys = torch.randn(4, shape.num_kv_heads, shape.key_dim)
            request.load(layer, queries, new_keys, 0.3, keys, values)
            request.end_layer()

    def forget(self, rid: str) -> None:
        """A request is over, and nobody counts it."""
        self.cache._tracked.pop(rid, None)
        request = self.cache.live.pop(rid, None)
        if request is not None:
            request.end_loading()
            self.allocator.free(request.slots)

    def prefill(self, rid: str, tokens: Sequence[int], *_: Any) -> Any:
        """A prompt is computed and resident; its write may still go on. Returns its request."""
        req = new_request(rid, tokens)
        self.loads(req)
        slots = self.allocator.alloc(len(tokens))
        for kvs in (*self.pool.keys, *self.pool.values):
            kvs[slots] = 0.5
        key = RadixKey(req.origin_input_ids)
        self.cache.insert(InsertParams(key=key, value=slots))
        req.last_node = self.cache.match_prefix(MatchPrefixParams(key=key)).last_device_node
        self.cache._saves.offer(self.cache._tracked.pop(rid), len(tokens))
        return req

    def close(self) -> None:
        """All requests and writes end, and no slot is lost."""
        # A write would wait for its layers for ever.
        self.pool.go_on.set()
        for rid in {*self.cache.live, *self.cache._tracked}:
            self.forget(rid)
        self.service.store.writes.drain()
        self.check_slots()
        check_store(self.service.store)
        self.service.close()
