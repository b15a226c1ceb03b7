"""A tree cache of ours with SGLang around it, as in a scheduler's process.

Requests, pools' allocators, handlers of messages and hooks are SGLang's. Its workers, the memory
saver, the KV pool and the forward passes are stand-ins; whoever touches what is released, fails.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import SetInternalStateReq
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
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
from sglang.srt.sampling.sampling_params import SamplingParams
from torch import Tensor

from impress_sglang.paper.loader import LayerInputs
from impress_sglang.paper.plugin.radix_cache import ImpressRadixCache
from impress_sglang.paper.runtime import ServingRuntime, StoredRequest
from impress_sglang.plugin.admin import MESSAGE, around_message
from impress_sglang.plugin.pools import PoolLayers
from impress_sglang.plugin.report_transport import Report, _carried
from impress_sglang.plugin.weights import around_handler
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import EXACT
from impress_sglang.store.prefix_hashes import namespace_text
from tests.unit.kv_factory import make_shape
from tests.unit.store_factory import make_config
from tests.unit.waiting import wait_until

SHAPE = make_shape(layers=3)
OLD, NEW = "0" * 32, "1" * 32
TOKENS = 64
# What `store_prompt(1000)` stores, and another prompt.
STORED, OTHER = [*range(1000, 1000 + TOKENS)], [*range(3000, 3000 + TOKENS)]


class Pool:
    """Stands in for SGLang's KV pool; a read may be held up."""

    start_layer = 0

    def __init__(self, slots: int) -> None:
        self.paused = False
        self.reading = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self._buffer = torch.randn(slots, SHAPE.num_kv_heads, SHAPE.key_dim)

    def _get_key_buffer(self, layer: int) -> Tensor:
        self.reading.set()
        assert self.go_on.wait(30)
        assert not self.paused, "the pool is read while it is paused"
        return self._buffer

    # SGLang's own waits for a layer that is being loaded before it does the same.
    get_key_buffer = get_value_buffer = _get_value_buffer = _get_key_buffer

    # Without waiting for layers that are loaded.
    _get_key_buffer = get_key_buffer
    _get_value_buffer = get_value_buffer


@dataclasses.dataclass
class Saver:
    """Stands in for SGLang's memory saver."""

    pool: Pool
    paused: set[str] = dataclasses.field(default_factory=set)

    def pause(self, tag: str) -> None:
        self.paused.add(tag)
        self.pool.paused = "kv_cache" in self.paused

    def resume(self, tag: str) -> None:
        self.paused.remove(tag)
        self.pool.paused = "kv_cache" in self.paused


def prompt_of(first: int, fork: int = TOKENS) -> list[int]:
    """It has other tokens than the one that begins alike, from `fork` on."""
    return [*range(first, first + fork), *range(first + 500, first + 500 + TOKENS - fork)]


def report_of(req: Any) -> Report | None:
    """The report that a request was given last; None if it was never matched."""
    carried = _carried(req)
    return None if carried is None else carried.report


def make_runtime(
    root: Path,
    shape: KVShape,
    *,
    hidden_size: int = 64,
    **options: Any,
) -> ServingRuntime:
    config = make_config(root, **({"policy": "paper", "retention": 0.5} | options))
    return ServingRuntime(config, shape, OLD, torch.device("cpu"), hidden_size)


class World:
    """A tree cache with a store, and SGLang's updater of weights that flushes it."""

    def __init__(self, root: Path, *, size: int = 4 * TOKENS, **options: Any) -> None:
        self.pool = Pool(size + TOKENS)
        self.saver = Saver(self.pool)
        self.rows = ReqToTokenPool(4, size, "cpu", enable_memory_saver=False)
        self.allocator = TokenToKVPoolAllocator(size, torch.float32, "cpu", self.pool, False)
        self.weights, self.asked, self.idle = OLD, 0, True
        self.runtime = make_runtime(root, SHAPE, **({"min_prefix_tokens": 16} | options))
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=1,
        )
        layers, model = PoolLayers(self.pool), torch.nn.Module()
        self.cache = ImpressRadixCache(
            params, self.runtime, model, layers, None, self.read_identity
        )
        assert self.cache.impress is not None
        self.impress = self.cache.impress
        self.updater = self._updater()

    def _updater(self) -> Any:
        updater = object.__new__(SchedulerWeightUpdaterManager)
        runner = SimpleNamespace(
            weight_updater=SimpleNamespace(
                update_weights_from_disk=self.load_weights,
                begin_weight_update=lambda: None,
                end_weight_update=lambda run_post_load: None,
            ),
            check_weights=lambda **_: None,
            model=torch.nn.Linear(1, 1),
        )
        updater.tp_worker = SimpleNamespace(
            weight_update_runners=lambda: [("target", runner)], model_runner=runner
        )
        updater.scheduler = SimpleNamespace(
            tree_cache=self.cache,
            _engine_paused=False,
            disaggregation_mode=DisaggregationMode.NULL,
            record_weight_version_change=lambda new_version: None,
            weight_updater=updater,
        )
        updater.draft_worker = updater.metrics_collector = updater._session = None
        updater.memory_saver_adapter = self.saver
        updater.flush_cache = self.flush
        updater.is_fully_idle = lambda ignore_waiting=False: self.idle
        updater.offload_tags = set()
        updater.tp_cpu_group = None
        return updater

    def read_identity(self) -> str:
        self.asked += 1
        assert "weights" not in self.saver.paused, "weights are read while they are released"
        if self.weights == "unreadable":
            raise RuntimeError("no weights")
        return self.weights

    def load_weights(self, model_path: str, *_: Any, **__: Any) -> tuple[bool, str]:
        assert not self.runtime.served.in_use
        if model_path == "missing":
            return False, "no such model"
        self.weights = model_path
        return True, ""

    def flush(self, empty_cache: bool = True) -> bool:
        """SGLang's `Scheduler.flush_cache`."""
        if self.idle:
            self.cache.reset()
            self.rows.clear()
            self.allocator.clear()
        return self.idle

    def call(self, handler: str, **fields: Any) -> Any:
        """Send a message of SGLang."""
        request = {
            "tags": None,
            "selector": "all",
            "flush_cache": True,
            "model_path": NEW,
            "load_format": None,
            "recapture_cuda_graph": False,
            "weight_version": None,
            "torch_empty_cache": False,
            "allow_quant_error": False,
            "skip_tensor_list": None,
        }
        original, message = getattr(self.updater, handler), SimpleNamespace(**(request | fields))
        return around_handler(original, self.updater.scheduler, self.impress.weights, message)

    def told(self, verb: str, **fields: Any) -> Any:
        """The answer to an admin request that came by SGLang's way."""
        text = json.dumps({"verb": verb} | fields)
        message = SetInternalStateReq(server_args=dict(MESSAGE), rid=text)
        sent: list[Any] = []
        self.updater.scheduler.send_control_output = lambda answer, _: sent.append(answer)
        assert not around_message(lambda *_: pytest.fail("ours"), self.updater.scheduler, message)
        (answer,) = sent
        assert answer.updated
        return json.loads(answer.rid)

    def request(
        self,
        rid: str,
        tokens: Sequence[int],
        *,
        namespace: str | None = None,
        sampling: dict[str, Any] | None = None,
        **wanted: object,
    ) -> Any:
        """SGLang's; `wanted` are custom parameters, without `impress_`."""
        custom = {f"impress_{name}": value for name, value in wanted.items()} or None
        params = SamplingParams(custom_params=custom, **(sampling or {}))
        req: Any = Req(rid, "", array("q", tokens), params, extra_key=namespace)
        req.full_untruncated_fill_ids = req.origin_input_ids
        return req

    def match(self, req: Any) -> MatchResult:
        """A request is matched, and SGLang notes what was found."""
        tokens = req.origin_input_ids
        key = RadixKey(tokens, req.extra_key, limit=len(tokens) - 1)
        match = self.cache.match_prefix(MatchPrefixParams(key=key, req=req))
        req.last_node, req.host_hit_length = match.last_device_node, match.host_hit_length
        req.prefix_len = match.device_prefix_len
        return match

    def ask(
        self, rid: str, length: int = TOKENS, new: int = 8, *, fork: int = TOKENS, **wanted: object
    ) -> Any:
        """A request with the first tokens of a stored prompt is matched."""
        tokens = [*prompt_of(1000, fork)[:length], *range(5000, 5000 + new)]
        req = self.request(rid, tokens, **wanted)
        self.match(req)
        return req

    def admit(self, req: Any) -> StoredRequest | None:
        loaded = self.cache.init_load_back(
            InitLoadBackParams(best_match_node=None, host_hit_length=req.host_hit_length, req=req)
        )
        return None if loaded is None else self.runtime.live[req.rid]

    def load(self, request: StoredRequest, *layers: int) -> None:
        """A pass loads some layers of an admitted request, or all."""
        for layer in layers or range(SHAPE.num_layers):
            pool = self.pool.get_key_buffer(layer)
            queries = torch.randn(4, SHAPE.num_query_heads, SHAPE.key_dim)
            new_keys = torch.randn(4, SHAPE.num_kv_heads, SHAPE.key_dim)
            inputs = LayerInputs(queries, new_keys, pool, request.slots[:0], 0.3)
            self.runtime.loader.load(
                layer,
                request.source,
                inputs,
                pool,
                pool.clone(),
                request.slots,
                request.stats,
            )
            request.end_layer()

    def end(self, request: StoredRequest) -> None:
        """Its request is over, and nobody counts it."""
        rid = next(rid for rid, own in self.runtime.live.items() if own is request)
        self.cache._known.pop(rid, None)
        self.runtime.release(rid)
        self.cache._private_tokens -= request.k
        self.allocator.free(request.slots)

    def loaded(self, rid: str, *args: Any, **wanted: Any) -> StoredRequest:
        """A request is matched, admitted and loaded."""
        request = self.admit(self.ask(rid, *args, **wanted))
        assert request is not None
        self.load(request)
        return request

    def compute(
        self,
        rid: str,
        question: int,
        *,
        prompt: Sequence[int] = STORED,
        answer: Sequence[int] = (),
        matches: int = 1,
        retracted: bool = False,
        **how: Any,
    ) -> int:
        """How many tokens are stored after a request for a prompt and a question of its own."""
        tokens = [*prompt, *range(question, question + TOKENS)]
        req = self.request(rid, tokens, **how)
        for number in range(matches):
            if retracted and number:
                self.cache.on_release(req, checkpointed=False)
            self.match(req)
        self._offer(req)
        self.runtime.store.writes.drain()
        req.output_ids = array("q", answer)
        self.cache._saves.end(self.cache._known[rid])
        del self.cache._known[rid]
        node = req.last_node
        while node is not self.cache.root_node and not node.children:
            above = node.parent
            self.cache._free_leaf(node)
            node = above
        return sum(segment.info.num_tokens for segment in self.runtime.store.tree.segments())

    def _offer(self, req: Any) -> None:
        """The prompt of a request is computed, and in SGLang's tree."""
        self.make_resident(req.origin_input_ids, req.extra_key)
        key = RadixKey(req.origin_input_ids, req.extra_key)
        req.last_node = self.cache.match_prefix(MatchPrefixParams(key=key)).last_device_node
        self.cache._saves.offer(self.cache._known[req.rid], len(req.origin_input_ids))

    def prefill(self, rid: str, first: int, fork: int = TOKENS) -> Any:
        """A prompt is computed and resident; its write may still go on. Returns its request."""
        req = self.request(rid, prompt_of(first, fork))
        self.match(req)
        self._offer(req)
        return req

    def store(self, tokens: Sequence[int]) -> None:
        """A prompt is in the store, and nothing is resident."""
        req = self.request("stored", tokens)
        self.match(req)
        self._offer(req)
        self.runtime.store.writes.drain()
        del self.cache._known["stored"]
        assert self.flush()

    def store_prompt(self, first: int, fork: int = TOKENS) -> None:
        self.store(prompt_of(first, fork))
        assert self.stored(first) == TOKENS
        assert self.files() == (1 if fork == TOKENS else 2)

    def make_resident(self, tokens: Sequence[int], namespace: str | None = None) -> None:
        """A prefix is computed; its KVs are in SGLang's tree."""
        slots = self.allocator.alloc(len(tokens))
        assert slots is not None
        key = RadixKey(array("q", tokens), namespace)
        found = self.cache.insert(InsertParams(key=key, value=slots))
        self.allocator.free(slots[: found.prefix_len])

    def stored(self, first: int) -> int:
        """How many tokens of a prompt the tree cache would find in the store."""
        tokens = np.arange(first, first + TOKENS, dtype=np.int32)
        return self.cache._planner.match(namespace_text(None, None), tokens, EXACT).num_tokens

    def used(self) -> bool:
        """Whether the store is used, once it is open: that is done in the background."""

        def is_over() -> bool:
            self.cache.flush_pending_backups()
            return self.runtime.served.suspended != "opening"

        wait_until(is_over)
        return self.runtime.served.suspended is None

    def files(self) -> int:
        return len(list(Path(self.runtime.config.ssd_path).glob("*/segments/*/*")))

    def settle(self) -> None:
        """All requests and writes end; a write would wait for its layers for ever."""
        self.pool.go_on.set()
        for request in list(self.runtime.live.values()):
            self.end(request)
        if self.runtime.served.in_use:
            self.runtime.store.writes.drain()

    def check_slots(self) -> None:
        """SGLang's equation, where no request runs."""
        cache = self.cache
        held = self.allocator.available_size() + cache.evictable_size() + cache.protected_size()
        assert held == self.allocator.size
        self.check_integrity()

    def check_integrity(self) -> None:
        self.cache._check_requests()
        if self.runtime.served.opened is not None:
            self.runtime.store.check_integrity()

    def close(self) -> None:
        self.settle()
        self.check_integrity()
        self.runtime.close()


def install_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a server; what needs several processes or an accelerator is left out."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    monkeypatch.setattr(torch.distributed, "barrier", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda **_: 1)
    # SGLang asks for the module of the build's accelerator, which a CPU machine lacks.
    monkeypatch.setattr(torch, "get_device_module", lambda device="cpu": torch.cpu)
    monkeypatch.setattr(
        SchedulerWeightUpdaterManager, "_assert_weight_cache_inactive", lambda *_: None
    )
