"""Weights and memory that are taken away: when the store is used, and by whose name."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers import io_struct
from sglang.utils import TypeBasedDispatcher

from impress_sglang.plugin.factory import kv_tensors
from impress_sglang.plugin.weights import around_handler, watch_messages
from tests.integration.worlds import NEW, OLD, OTHER, STORED, TOKENS, World
from tests.unit.store_checks import check_store


@pytest.fixture
def world(world: World) -> World:
    world.store_prompt()
    world.asked = 0
    return world


class Unheard:
    """A message that no release had yet."""


def test_messages_that_may_change_weights() -> None:
    """They set the store aside; those that are known not to change any go their way."""
    causes: list[str] = []
    watch: Any = SimpleNamespace(begin=causes.append, end=lambda *, settled: causes.append(settled))
    update = io_struct.UpdateWeightFromDiskReqInput(model_path="m")
    messages = [io_struct.GetInternalStateReq(), update, Unheard()]
    scheduler = SimpleNamespace(
        _request_dispatcher=TypeBasedDispatcher(
            [(type(message), lambda it: (it,)) for message in messages]
        ),
        weight_updater=SimpleNamespace(_session=None, offload_tags=()),
    )
    watch_messages(scheduler, watch)
    for message in messages:
        assert scheduler._request_dispatcher(message) == (message,)
    assert causes == ["<lambda>", True] * 2


def test_update_that_leaves_kvs(world: World) -> None:
    """Nothing is read nor written until the next flush."""
    world.prefill("resident", OTHER)
    assert world.call("update_weights_from_disk", flush_cache=False).success
    assert world.service.suspended == "update_weights_from_disk"
    assert world.stored(STORED) == 0
    world.prefill("mixed", range(2000, 2064))
    assert not world.cache._saves.writing_tokens
    # Back to the first weights, but KVs of the others may be among what is resident.
    assert world.call("update_weights_from_disk", model_path=OLD, flush_cache=False).success
    assert world.service.suspended and world.stored(STORED) == 0
    assert world.flush()
    assert world.service.suspended is None and world.stored(STORED) == TOKENS


def test_update_that_changes_nothing(world: World) -> None:
    """What is resident is still right, so that the store goes on."""
    world.prefill("resident", OTHER)
    assert not world.call("update_weights_from_disk", model_path="missing").success
    assert world.service.suspended is None and world.stored(STORED) == TOKENS


def test_session(world: World) -> None:
    """Weights may come without a message until it ends; passes run in between."""
    assert world.call("begin_weight_update").success
    assert not world.call("begin_weight_update").success
    assert world.flush() and world.asked == 0
    assert world.service.suspended == "begin_weight_update"
    world.allocator.alloc(3)
    assert world.call("end_weight_update").success
    assert world.asked == 0, "KVs of the session are resident"
    assert world.flush() and world.service.suspended is None


def test_write_under_way_is_given_up(world: World) -> None:
    """A layer that is being read is waited for, no other is read, and nothing is published."""
    before = world.pool.reads
    world.pool.go_on.clear()
    world.pool.reading.clear()
    world.prefill("written", OTHER)
    assert world.pool.reading.wait(30)
    with ThreadPoolExecutor(1) as pool:
        release = pool.submit(world.call, "release_memory_occupation", tags=["kv_cache"])
        time.sleep(0.2)
        assert not release.done(), "the pool is paused under a copy"
        world.pool.go_on.set()
    assert release.exception() is None and world.pool.paused
    world.service.store.writes.drain()
    assert world.pool.reads == before + 1
    assert not world.cache._saves.writing_tokens
    world.call("resume_memory_occupation", tags=["kv_cache"])
    assert world.service.suspended is None
    assert world.stored(OTHER) == 0 and world.stored(STORED) == TOKENS
    check_store(world.service.store)
    assert world.files() == 1


def test_released_weights_are_not_read(world: World) -> None:
    """As frameworks for reinforcement learning do: release, resume, load, and resume the pool."""
    world.call("release_memory_occupation")
    assert world.saver.paused == {"kv_cache", "weights", "cuda_graph"}
    assert world.flush() and world.asked == 0
    world.call("resume_memory_occupation", tags=["weights", "cuda_graph"])
    world.call("begin_weight_update")
    world.weights = NEW
    world.call("end_weight_update")
    assert world.asked == 0 and world.service.suspended == "release_memory_occupation"
    world.call("resume_memory_occupation", tags=["kv_cache"])
    assert world.asked == 1 and world.used() and world.service.identity == NEW


def test_identity_that_cannot_be_computed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The server goes on without the store, and asks again at the next flush, which also notices
    other weights that nobody told of."""
    world.weights = "unreadable"
    assert world.flush()
    assert world.service.suspended == "no identity" and world.stored(STORED) == 0
    assert "the next flush tries again" in caplog.text
    assert world.cache.summary()["suspended"] == "no identity"
    for weights, stored in ((OLD, TOKENS), (NEW, 0)):
        world.weights = weights
        assert world.flush() and world.used()
        assert world.service.identity == weights and world.stored(STORED) == stored


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


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        *(({"action": action}, None) for action in ("snapshot", "compare", "checksum")),
        ({"method": "save_sharded_model"}, None),
        ({"method": "another"}, "called"),
    ],
)
def test_calls_of_methods(world: World, fields: dict[str, str], cause: str | None) -> None:
    """Whatever a scheduler is told to call may change weights, but for what only reads them."""
    world.prefill("written", OTHER)

    def called(request: Any) -> str:
        world.weights = NEW
        return "answer"

    request = SimpleNamespace(**fields)
    assert around_handler(called, world.scheduler, world.cache.weights, request) == "answer"
    assert world.service.suspended == cause
    world.service.store.writes.drain()
    assert world.stored(OTHER) == (TOKENS if cause is None else 0)
