"""Weights and memory that are taken away and replaced: when the store is used, and by whose name.

The handlers are SGLang's, hooked as in a server. Its workers, the memory saver and the forward
passes are stand-ins; whoever touches what is released, fails.
"""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.weight_updater import (
    SchedulerWeightUpdaterManager,
)
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams
from torch import Tensor

from impress_sglang.config import ImpressConfig
from impress_sglang.integration.compat import WEIGHT_HANDLERS
from impress_sglang.integration.factory import kv_tensors
from impress_sglang.integration.passes import KnownRequest
from impress_sglang.integration.plugin import _around_weights
from impress_sglang.integration.radix_cache import ImpressRadixCache
from impress_sglang.management.store import PrefixStore
from impress_sglang.serving.pool_reader import PoolAccess
from impress_sglang.serving.runtime import ServingRuntime
from impress_sglang.serving.saving import Save
from impress_sglang.storage.writer import WriteAbandoned
from tests.unit.kv_factory import make_shape
from tests.unit.store_factory import DEFAULTS
from tests.unit.waiting import wait_until

SHAPE = make_shape(layers=3, probe=(), coded=True)
OLD, NEW = "0" * 32, "1" * 32
TOKENS = 64


class Pool:
    """Stands in for SGLang's KV pool; a read may be held up."""

    start_layer = 0

    def __init__(self) -> None:
        self.paused = False
        self.reading = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self._buffer = torch.randn(TOKENS * 5, SHAPE.num_kv_heads, SHAPE.key_dim)

    def get_key_buffer(self, layer: int) -> Tensor:
        self.reading.set()
        assert self.go_on.wait(30)
        assert not self.paused, "the pool is read while it is paused"
        return self._buffer

    def get_value_buffer(self, layer: int) -> Tensor:
        return self.get_key_buffer(layer)


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


class World:
    """A tree cache with a store, and SGLang's updater of weights that flushes it."""

    def __init__(self, root: Path, page_size: int = 1, **options: Any) -> None:
        self.pool = Pool()
        self.saver = Saver(self.pool)
        self.rows = ReqToTokenPool(4, 4 * TOKENS, "cpu", enable_memory_saver=False)
        size, rest = TOKENS * 4, (torch.float32, "cpu", self.pool, False)
        self.allocator = (
            TokenToKVPoolAllocator(size, *rest)
            if page_size == 1
            else PagedTokenToKVPoolAllocator(size, page_size, *rest)
        )
        self.weights, self.asked, self.idle = OLD, 0, True
        own = DEFAULTS | {"policy": "impress", "min_prefix_tokens": 16} | options
        config = ImpressConfig(ssd_dir=str(root), **own)
        self.runtime = ServingRuntime(
            config,
            SHAPE,
            OLD,
            torch.device("cpu"),
            hidden_size=64,
            free=self.allocator.free,
            page_size=page_size,
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
        )
        self.cache = ImpressRadixCache(params, self.runtime, self.read_identity, None)
        self.updater = self._updater()

    def _updater(self) -> Any:
        updater = object.__new__(SchedulerWeightUpdaterManager)
        runner = SimpleNamespace(
            weight_updater=SimpleNamespace(
                update_weights_from_disk=self.load,
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

    def load(self, model_path: str, *_: Any, **__: Any) -> tuple[bool, str]:
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
        return getattr(self.updater, handler)(SimpleNamespace(**(request | fields)))

    def prefill(self, rid: str, first: int, fork: int = TOKENS) -> Save:
        """A pass begins that completes a prompt; its write waits for the layers.

        The prompt has other tokens than the one that begins alike, from a token on.
        """
        (row,) = self.rows.alloc_rows(1)
        slots = self.allocator.alloc(TOKENS)
        assert slots is not None
        self.rows.req_to_token[row, :TOKENS] = slots
        tokens = [*range(first, first + fork), *range(first + 500, first + 500 + TOKENS - fork)]
        req = Req(rid, "", array("q", tokens), SamplingParams())
        req.full_untruncated_fill_ids = tokens
        req.kv = SimpleNamespace(req_pool_idx=row)
        self.cache._known.note(req)
        (save,) = self.cache.passes.begin_saves([rid], [TOKENS]).values()
        return save

    def store_prompt(self, first: int, fork: int = TOKENS) -> None:
        """A prompt is in the store, and nothing is resident."""
        self.prefill("stored", first, fork).open(SHAPE.num_layers)
        self.runtime.store.writes.drain()
        del self.cache._saves._begun["stored"]
        assert self.flush() and self.stored(first) == TOKENS
        assert self.files() == (1 if fork == TOKENS else 2)

    def stored(self, first: int) -> int:
        """How many tokens of a prompt the tree cache would find in the store."""
        key = RadixKey(array("q", range(first, first + TOKENS)), None)
        req = Req("looking", "", array("q", [first]), SamplingParams())
        return self.cache._plan(key, 0, KnownRequest(req))[0].num_tokens

    def used(self) -> bool:
        """Whether the store is used, once it is open: that is done in the background."""

        def is_over() -> bool:
            self.cache.flush_pending_backups()
            return self.runtime.served.suspended != "opening"

        wait_until(is_over)
        return self.runtime.served.suspended is None

    def files(self) -> int:
        return len(list(Path(self.runtime.config.ssd_path).glob("*/segments/*/*")))


@pytest.fixture(autouse=True)
def _hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    install_hooks(monkeypatch)


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


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    world.store_prompt(1000)
    world.asked = 0
    yield world
    world.pool.go_on.set()
    # A write would wait for its layers for ever.
    for save in world.cache._saves._begun.values():
        save.abandon()
    world.cache.check_integrity()
    world.runtime.close()


@pytest.mark.parametrize("target", WEIGHT_HANDLERS)
def test_handlers_are_hooked(target: str) -> None:
    """And take what the hook takes: themselves and a message."""
    hooked = pkgutil.resolve_name(target)
    assert len(inspect.signature(hooked).parameters) == 2
    assert inspect.unwrap(hooked) is not hooked


def test_update_that_flushes(world: World) -> None:
    """The identity is asked once, when the update is over."""
    assert world.call("update_weights_from_disk").success
    assert world.used() and world.asked == 1
    assert world.runtime.served.identity == NEW and world.stored(1000) == 0
    assert world.call("update_weights_from_disk", model_path=OLD).success
    assert world.used() and world.stored(1000) == TOKENS


def test_update_that_leaves_kvs(world: World) -> None:
    """Nothing is read nor written until the next flush."""
    world.prefill("resident", 5)
    assert world.call("update_weights_from_disk", flush_cache=False).success
    assert world.runtime.served.suspended == "update_weights_from_disk"
    assert world.stored(1000) == 0
    with pytest.raises(ValueError, match="not enough values to unpack"):
        world.prefill("mixed", 2000)
    # Back to the first weights, but KVs of the others may be among what is resident.
    assert world.call("update_weights_from_disk", model_path=OLD, flush_cache=False).success
    assert world.runtime.served.suspended and world.stored(1000) == 0
    assert world.flush()
    assert world.runtime.served.suspended is None and world.stored(1000) == TOKENS


def test_update_of_an_empty_pool_needs_no_flush(world: World) -> None:
    assert world.call("update_weights_from_disk", flush_cache=False).success
    assert world.used() and world.runtime.served.identity == NEW


def test_flush_that_is_refused(world: World) -> None:
    world.prefill("running", 5)
    world.idle = False
    assert not world.call("update_weights_from_disk").success
    assert world.runtime.served.suspended == "update_weights_from_disk"


def test_update_that_changes_nothing(world: World) -> None:
    """What is resident is still right, so that the store goes on."""
    world.prefill("resident", 5)
    assert not world.call("update_weights_from_disk", model_path="missing").success
    assert world.runtime.served.suspended is None and world.stored(1000) == TOKENS


def test_session(world: World) -> None:
    """Weights may come without a message until it ends; passes run in between."""
    assert world.call("begin_weight_update").success
    assert not world.call("begin_weight_update").success
    assert world.flush() and world.asked == 0
    assert world.runtime.served.suspended == "begin_weight_update"
    world.allocator.alloc(3)
    assert world.call("end_weight_update").success
    assert world.asked == 0, "KVs of the session are resident"
    assert world.flush() and world.runtime.served.suspended is None


def test_session_that_ends_with_an_empty_pool(world: World) -> None:
    world.prefill("before", 5)
    world.call("begin_weight_update")
    world.weights = NEW
    assert world.flush() and world.asked == 0
    assert world.call("end_weight_update").success
    assert world.used() and world.runtime.served.identity == NEW


@pytest.mark.parametrize("action", ["snapshot", "compare", "checksum"])
def test_checks_that_only_look(world: World, action: str) -> None:
    save = world.prefill("written", 5)
    assert world.call("check_weights", action=action).success
    assert world.runtime.served.suspended is None and world.asked == 0
    save.open(SHAPE.num_layers)
    world.runtime.store.writes.drain()
    assert world.stored(5) == TOKENS


def test_check_that_fills_weights_at_random(world: World) -> None:
    world.prefill("resident", 5)
    world.weights = NEW
    assert world.call("check_weights", action="reset_tensors").success
    assert world.runtime.served.suspended == "check_weights"


def test_write_under_way_is_given_up(world: World) -> None:
    """A layer that is being read is waited for, no other is read, and nothing is published."""
    world.pool.go_on.clear()
    world.pool.reading.clear()
    save = world.prefill("written", 5)
    save.open(1)
    assert world.pool.reading.wait(30)
    done = threading.Event()

    def release() -> None:
        world.call("release_memory_occupation", tags=["kv_cache"])
        done.set()

    thread = threading.Thread(target=release)
    thread.start()
    assert not done.wait(0.2), "the pool is paused under a copy"
    world.pool.go_on.set()
    thread.join(30)
    assert done.is_set() and world.pool.paused
    save.open(SHAPE.num_layers)
    world.runtime.store.writes.drain()
    assert save.finished and world.cache._saves.writing_tokens == 0
    del world.cache._saves._begun["written"]
    world.call("resume_memory_occupation", tags=["kv_cache"])
    assert world.runtime.served.suspended is None
    assert world.stored(5) == 0 and world.stored(1000) == TOKENS
    world.runtime.store.check_integrity()
    assert world.files() == 1


def test_write_that_waits_for_its_layers_is_given_up(world: World) -> None:
    save = world.prefill("written", 5)
    world.call("release_memory_occupation")
    with pytest.raises(WriteAbandoned):
        save.check()
    world.runtime.store.writes.drain()
    assert world.cache._saves.writing_tokens == 0 and world.files() == 1
    world.cache._saves._begun.clear()
    world.call("resume_memory_occupation")
    assert world.stored(5) == 0


def test_released_weights_are_not_read(world: World) -> None:
    """As frameworks for reinforcement learning do: release, resume, load, and resume the pool."""
    world.call("release_memory_occupation")
    assert world.saver.paused == {"kv_cache", "weights", "cuda_graph"}
    assert world.flush() and world.asked == 0
    world.call("resume_memory_occupation", tags=["weights", "cuda_graph"])
    world.call("begin_weight_update")
    world.weights = NEW
    world.call("end_weight_update")
    assert world.asked == 0 and world.runtime.served.suspended == "release_memory_occupation"
    world.call("resume_memory_occupation", tags=["kv_cache"])
    assert world.asked == 1 and world.used() and world.runtime.served.identity == NEW


def test_released_weights_under_a_pool_with_kvs(world: World) -> None:
    world.prefill("resident", 5)
    world.call("release_memory_occupation", tags=["weights"])
    world.call("resume_memory_occupation", tags=["weights"])
    assert world.runtime.served.suspended == "release_memory_occupation" and world.asked == 0
    world.flush()
    assert world.runtime.served.suspended is None


def test_identity_that_cannot_be_computed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The server goes on without the store, and asks again at the next flush."""
    world.weights = "unreadable"
    assert world.flush()
    assert world.runtime.served.suspended == "no identity" and world.stored(1000) == 0
    assert "the next flush tries again" in caplog.text
    assert world.cache.summary()["suspended"] == "no identity"
    world.weights = OLD
    assert world.flush()
    assert world.runtime.served.suspended is None and world.stored(1000) == TOKENS


def test_store_that_cannot_be_opened(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Another server has the one of the new weights; without one all else goes on."""
    world.weights = NEW
    taken = PrefixStore(world.runtime.config, NEW, SHAPE)
    for _ in range(2):
        caplog.clear()
        assert world.flush() and not world.used()
        assert world.runtime.served.suspended == "not opened"
        world.cache.flush_pending_backups()
        world.cache.check_integrity()
        assert caplog.text.count("the next flush tries again") == 1
    # The first weights again: their store was closed.
    world.weights = OLD
    assert world.flush()
    assert world.used() and world.stored(1000) == TOKENS
    taken.close()
    world.weights = NEW
    assert world.flush() and world.used() and world.runtime.served.identity == NEW


def test_a_flush_notices_weights_of_which_nobody_told(world: World) -> None:
    world.weights = NEW
    assert world.flush() and world.used() and world.runtime.served.identity == NEW


def test_what_names_a_model() -> None:
    """Parameters and what is saved with them, tied weights once; no tables that SGLang recasts."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(3, 2)
            self.head = torch.nn.Linear(2, 3, bias=False)
            self.head.weight = self.embed.weight
            self.inner = torch.nn.Module()
            self.inner.register_buffer("scale", torch.tensor(2.0))
            self.inner.register_buffer("cos_sin_cache", torch.ones(4), persistent=False)

    assert [name for name, _ in kv_tensors(Model())] == ["embed.weight", "inner.scale"]


def test_access_to_the_pool_is_of_one_term() -> None:
    access = PoolAccess()
    first = access.term
    with access.reading(first):
        pass
    access.revoke()
    with pytest.raises(WriteAbandoned), access.reading(first):
        raise AssertionError("it reads")
    with access.reading(access.term):
        pass


@pytest.mark.parametrize(("method", "cause"), [("save_sharded_model", None), ("own", "called")])
def test_calls_of_methods(world: World, method: str, cause: str | None) -> None:
    """Whatever a scheduler is told to call may change weights, but for what is known."""
    world.prefill("resident", 5)

    def called(scheduler: Any, request: Any) -> str:
        world.weights = NEW
        return "answer"

    request = SimpleNamespace(method=method)
    assert _around_weights(called, world.updater.scheduler, request) == "answer"
    assert world.runtime.served.suspended == cause


def test_other_tree_caches_are_left_alone() -> None:
    scheduler, request = SimpleNamespace(tree_cache=object()), SimpleNamespace()
    for owner in (scheduler, SimpleNamespace(scheduler=scheduler)):
        answer = _around_weights(lambda *arguments: arguments, owner, request)
        assert answer == (owner, request)
