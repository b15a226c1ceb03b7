"""A tree cache that loads beside the model's passes, with SGLang around it, as in a scheduler.

Requests, the tree and the pools' allocators are SGLang's. The scheduler, the KV pool and the model
(`tiny_model.Model`) are stand-ins: a request is queued, admitted, computed and ended step by step,
and the model is what SGLang's would be, so that all KVs can be compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, ReqKvInfo
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.sampling.sampling_params import SamplingParams
from torch import Tensor

from impress_sglang.blend.plugin import blends
from impress_sglang.config import OFF, ImpressConfig
from impress_sglang.plugin.pools import PoolLayers
from impress_sglang.plugin.report_transport import Report
from impress_sglang.plugin.tree_cache import ImpressTreeCache
from impress_sglang.serving import prefix_frequency
from impress_sglang.serving.ranks import ALONE, Ranks
from impress_sglang.serving.service import Service
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.codecs import plain_codec
from tests.integration import tiny_model
from tests.unit.kv_factory import make_shape
from tests.unit.store_factory import DEFAULTS
from tests.unit.waiting import wait_until

SHAPE = make_shape(layers=4, probe=(), coded=True)
IDENTITY, SIZE = "0" * 32, 4096


class Batch:
    """What the scheduler has of running requests."""

    def __init__(self) -> None:
        self.reqs: list[Any] = []

    def is_empty(self) -> bool:
        return not self.reqs


def new_request(
    rid: str,
    tokens: Sequence[int],
    namespace: str | None = None,
    sampling: dict[str, Any] | None = None,
    **wanted: object,
) -> Any:
    """SGLang's; `wanted` are custom parameters, without `impress_`."""
    custom = {f"impress_{name}": value for name, value in wanted.items()} or None
    params = SamplingParams(custom_params=custom, **({"max_new_tokens": 4} | (sampling or {})))
    req: Any = Req(rid, "", array("q", tokens), params, extra_key=namespace)
    req.full_untruncated_fill_ids = req.origin_input_ids
    return req


def told_of(req: Any) -> Report:
    report: Report = req.impress_report
    return report


class TreeWorld:
    """One tree cache with its store, and requests on their way."""

    service_class: type[Service] = Service
    cache_class: type[ImpressTreeCache] = ImpressTreeCache
    shape = SHAPE
    window: int | None = None
    components: tuple[Any, ...] = (ComponentType.FULL,)

    def __init__(
        self,
        root: Path,
        page_size: int = 1,
        *,
        size: int = SIZE,
        ranks: Ranks = ALONE,
        eagle: bool = False,
        **options: Any,
    ) -> None:
        """`eagle`: keys are those of pairs of tokens."""
        defaults = {"policy": "impress", "retention": 1.0, "bits": 6.0}
        defaults |= {"min_prefix_tokens": 16, "load": "always"}
        self.config = ImpressConfig(ssd_dir=str(root), **(DEFAULTS | defaults | options))
        self.model = tiny_model.Model(self.shape)
        self.rows = ReqToTokenPool(16, size, "cpu", enable_memory_saver=False)
        self.pool: Any
        self.allocator: Any
        self.make_pool(size, page_size)
        layers = PoolLayers(self.pool)
        layers.draft_offset = int(eagle)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            is_eagle=eagle,
            tree_components=self.components,
            tree_core_backend="python",
            enable_kv_cache_events=True,
            sliding_window_size=self.window,
        )
        shape = self.shape_with(layers)
        rest = torch.device("cpu"), tiny_model.HIDDEN, plain_codec(shape)
        self.service: Any = self.service_class(self.config, shape, IDENTITY, *rest)
        # Which windows of a text stand for it depends on this key.
        self.service.counts = prefix_frequency.new_memory()
        self.service.counts[: prefix_frequency._SEED] = 1
        self.cache: Any = self.cache_class(
            params, self.service, self.model, layers, None, self.read_identity, ranks
        )
        if self.config.blend != OFF:
            self.cache.loads_class = blends.BlendLoads
        self.scheduler = SimpleNamespace(
            waiting_queue=[],
            running_batch=Batch(),
            last_batch=None,
            chunked_req=None,
            chunked_prefill_size=256,
            disaggregation_mode=DisaggregationMode.NULL,
            require_mlp_sync=False,
            new_token_ratio_tracker=SimpleNamespace(current=0.5),
            forward_stream=None,
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=self.model)),
        )
        self.cache.attach(self.scheduler)
        # A pass does not wait for the layers of its prefix here: it begins behind the last one.
        self.cache.loads._early_admission._possible = False

    def read_identity(self) -> str:
        return IDENTITY

    def make_pool(self, size: int, page_size: int) -> None:
        self.pool = tiny_model.Pool(self.shape, size + 64)
        rest = torch.float32, "cpu", self.pool, False
        self.allocator = (
            TokenToKVPoolAllocator(size, *rest)
            if page_size == 1
            else PagedTokenToKVPoolAllocator(size, page_size, *rest)
        )

    def shape_with(self, layers: PoolLayers) -> KVShape:
        return self.shape

    def place(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The pool of keys and that of values of a layer, and where these have slots."""
        return self.pool.keys[layer], self.pool.values[layer], slots

    def window_of(self, layer: int) -> int | None:
        """To how many tokens before its own each one attends; None: to all."""
        return None

    def allocate(self, count: int) -> Tensor | None:
        return self.allocator.alloc(count)

    @property
    def jobs(self) -> Any:
        return self.cache.loads.jobs

    def request(self, rid: str, tokens: Sequence[int], **wanted: Any) -> Any:
        """One that is queued; see `new_request`."""
        req = new_request(rid, tokens, **wanted)
        self.match(req)
        self.scheduler.waiting_queue.append(req)
        if self.scheduler.enable_lmcache:
            self.cache.prefetch_from_storage(req.cache_request_handle)
        return req

    def match(self, req: Any) -> int:
        """How many tokens SGLang finds in its tree for a request, all but its last token."""
        tokens = req.full_untruncated_fill_ids
        key = RadixKey(tokens, req.extra_key, limit=len(tokens) - 1)
        match = self.cache.match_prefix(MatchPrefixParams(key=key, req=req))
        req.last_node, req.host_hit_length = match.last_device_node, match.host_hit_length
        return int(match.device_prefix_len)

    def poll(self) -> None:
        """What the scheduler does once per pass."""
        self.cache.check_hicache_events()

    def rest(self) -> None:
        """Until nothing is loaded: the end of a job may come after the pass that waited for it."""
        wait_until(lambda: not self.jobs.jobs or bool(self.poll()))

    def waits(self, req: Any) -> bool:
        handle = req.cache_request_handle
        return self.scheduler.enable_lmcache and not self.cache.check_prefetch_progress(handle)

    def settle(self, req: Any) -> None:
        """Poll until a request need not wait any longer."""

        def ready() -> bool:
            self.poll()
            return not self.waits(req)

        wait_until(ready)

    def admit(self, req: Any) -> int:
        """A request that need not wait is admitted; returns how long its prefix is."""
        length = self.match(req)
        req.lock = self.cache.lock(req.last_node)
        self.scheduler.waiting_queue.remove(req)
        self.cache.finish_storage_prefetch_admission(req.cache_request_handle, 0, None)
        (row,) = self.rows.alloc_rows(1)
        tokens, page = len(req.origin_input_ids), self.cache.page_size
        prefix = self.cache.path_device_indices(req.last_node)[:length].long()
        new = self.allocate(-(-(tokens - length) // page) * page)
        assert new is not None
        self.rows.req_to_token[row, :tokens] = torch.cat([prefix, new])[:tokens]
        req.kv = ReqKvInfo(req_pool_idx=row, cache_protected_len=length, cache_inserted_len=length)
        return length

    def compute(self, req: Any) -> None:
        """The pass of a request: KVs of its new tokens, behind what is in its prefix."""
        tokens = torch.tensor([*req.origin_input_ids]) % tiny_model.WORDS
        first = req.kv.cache_protected_len
        row = self.rows.req_to_token[req.kv.req_pool_idx, : len(tokens)].long()
        hidden, positions = self.model.embedding[tokens[first:]], torch.arange(first, len(tokens))
        for layer, weights in enumerate(self.model.projections):
            q, k, v = self.model.projected(hidden, positions, layer)
            keys, values, places = self.place(layer, row)
            keys[places[first:]], values[places[first:]] = k, v
            output = tiny_model.rectangular_attention(
                q,
                keys[places],
                values[places],
                scaling=tiny_model.SCALING,
                causal=True,
                window=self.window_of(layer),
            )
            hidden = hidden + output.flatten(1) @ weights[3]

    def end(self, req: Any) -> None:
        req.finished_reason = FINISH_LENGTH(1)
        req.full_untruncated_fill_ids = req.origin_input_ids
        self.cache.checkpoint(req, up_to=len(req.origin_input_ids))
        self.release(req)

    def release(self, req: Any) -> None:
        """As SGLang gives the row of a request back."""
        tokens, row = len(req.origin_input_ids), req.kv.req_pool_idx
        kept = req.kv.cache_protected_len
        rest = self.rows.req_to_token[row, kept:tokens].long()
        if len(rest):
            self.allocator.free(rest)
        self.cache.unlock(req.lock)
        self.cache.on_release(req, checkpointed=True)
        self.rows.free_slots.append(row)

    def run(self, rid: str, tokens: Sequence[int], **wanted: object) -> dict[str, Any]:
        """All of a request; returns its report."""
        report = self.serve(self.request(rid, tokens, **wanted))
        self.service.store.writes.drain()
        return report

    def run_for_kvs(
        self, rid: str, tokens: Sequence[int], **wanted: object
    ) -> tuple[dict[str, Any], tiny_model.KVs]:
        """All of a request; returns its report, and the KVs of its prompt."""
        req = self.request(rid, tokens, **wanted)
        self.begin(req)
        kvs = self.kvs(req, len(tokens))
        self.end(req)
        self.service.store.writes.drain()
        return told_of(req), kvs

    def begin(self, req: Any) -> None:
        """A queued request is admitted as soon as it may be, and computed."""
        self.settle(req)
        self.admit(req)
        self.compute(req)

    def serve(self, req: Any, answer: Sequence[int] = ()) -> dict[str, Any]:
        """All of a request that is queued; returns its report."""
        self.begin(req)
        report = told_of(req)
        req.output_ids = array("q", answer)
        self.end(req)
        return report

    def abort(self, req: Any) -> None:
        self.scheduler.waiting_queue.remove(req)
        self.cache.release_aborted_request(req.cache_request_handle)

    def flush(self, empty_cache: bool = True) -> bool:
        """SGLang's, when it is idle."""
        self.rest()
        assert not self.cache.has_pending_cache_operations()
        self.cache.reset()
        self.rows.clear()
        self.allocator.clear()
        return True

    def check_slots(self) -> None:
        """SGLang's equation, where no request runs."""
        held = self.cache.evictable_size() + self.cache.protected_size()
        assert self.allocator.available_size() + held == self.allocator.size
        self.cache._check_requests()

    def kvs(self, req: Any, count: int) -> tiny_model.KVs:
        """The KVs of the first tokens of an admitted request."""
        row = self.rows.req_to_token[req.kv.req_pool_idx, :count].long()
        found = []
        for layer in range(len(self.model.projections)):
            keys, values, places = self.place(layer, row)
            found.append((keys[places], values[places]))
        return found

    def assert_same_kvs(self, left: tiny_model.KVs, right: tiny_model.KVs, length: int) -> None:
        """Of the first tokens, to the bit; of layers with windows those that the next one needs."""
        page = self.cache.page_size
        for layer, pairs in enumerate(zip(left, right, strict=True)):
            window = self.window_of(layer)
            first = 0 if window is None else max(length - -(-window // page) * page, 0)
            for one, other in zip(*pairs, strict=True):
                assert torch.equal(one[first:length], other[first:length])

    def close(self) -> None:
        """Nothing runs, waits or is lost any more."""
        self.rest()
        if self.service.in_use:
            self.service.store.writes.drain()
        self.check_slots()
        assert not self.jobs.waiters and not list(self.cache._tracked)
        self.cache.release_host_resources()
