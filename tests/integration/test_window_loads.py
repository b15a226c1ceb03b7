"""Prefixes of a model with sliding windows, in SGLang's pool, allocator and tree for these."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from torch import Tensor

from impress_sglang.config import EXACTLY
from impress_sglang.plugin.pools import PoolLayers
from impress_sglang.plugin.tree_nodes import match_resident
from impress_sglang.storage.layout import KVShape
from tests.integration.tiny_model import draw
from tests.integration.tree_world import SHAPE, SIZE, TreeWorld

WINDOW, ROWS = 100, 2048
WINDOWED, WHOLE = (0, 2), (1, 3)


class WindowWorld(TreeWorld):
    """Every other layer has windows."""

    window, num_rows = WINDOW, ROWS
    components = (ComponentType.FULL, ComponentType.SWA)

    def make_pool(self, size: int, page_size: int) -> None:
        sizes = size, self.num_rows, page_size, SHAPE.dtype
        self.pool = SWAKVPool(
            *(*sizes, SHAPE.num_kv_heads, SHAPE.key_dim, [*WINDOWED], [*WHOLE], "cpu"),
            enable_memory_saver=False,
            v_head_dim=SHAPE.value_dim,
        )
        self.allocator = SWATokenToKVPoolAllocator(*sizes, "cpu", self.pool, False)

    def shape_with(self, layers: PoolLayers) -> KVShape:
        page = self.allocator.page_size
        bits = self.config.code_bits if self.config.bits != EXACTLY else 0.0
        shape = dataclasses.replace(SHAPE, num_layers=len(WHOLE), code_bits=bits)
        shape = layers.add(shape, [self.pool.swa_kv_pool], -(-WINDOW // page) * page)
        # Behind those of the others.
        assert [*map(layers.number, (*WHOLE, *WINDOWED))] == [0, 1, 2, 3]
        return shape

    def place(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        number, windowed = self.pool.layers_mapping[layer]
        pool = self.pool.swa_kv_pool if windowed else self.pool.full_kv_pool
        rows = self.pool.full_to_swa_index_mapping[slots] if windowed else slots
        return pool.k_buffer[number], pool.v_buffer[number], rows

    def window_of(self, layer: int) -> int | None:
        return WINDOW if layer in WINDOWED else None

    def allocate(self, count: int) -> Tensor | None:
        allocator = self.allocator
        allocator.evict_to_free_tokens(self.cache, count)
        slots: Tensor = allocator.full_attn_allocator.alloc(count)
        allocator.set_full_to_swa_mapping(slots, allocator.swa_attn_allocator.alloc(count))
        return slots

    def check_slots(self) -> None:
        cache, allocator = self.cache, self.allocator
        whole = cache.full_evictable_size() + cache.full_protected_size()
        rows = cache.swa_evictable_size() + cache.swa_protected_size()
        assert allocator.full_available_size() + whole == SIZE
        assert allocator.swa_available_size() + rows == self.num_rows
        cache._check_requests()
        cache.sanity_check()

    def resident(self, tokens: list[int]) -> int:
        """How many tokens of a prompt a request could use now."""
        return int(match_resident(self.cache, RadixKey(array("q", tokens))).device_prefix_len)


@pytest.fixture(params=[1, 16, 32, 64, 128], ids="pages-of-{}".format)
def page(request: pytest.FixtureRequest) -> int:
    size: int = request.param
    return size


@pytest.fixture
def world(tmp_path: Path, page: int) -> Iterator[WindowWorld]:
    world = WindowWorld(tmp_path, page, bits="exact")
    yield world
    world.service.store.writes.drain()
    world.flush()
    assert world.cache._allocation.is_empty()
    world.close()


def test_what_was_computed_comes_back(world: WindowWorld, page: int) -> None:
    prompt = draw(1, 700)
    told, computed = world.run_for_kvs("computed", prompt)
    assert told["path"] == "computed"
    world.flush()
    for name, common in (("whole", 700), ("fork", 450), ("shorter than a window", 90)):
        asked, length = [*prompt[:common], *draw(2 + common, 30)], common // page * page
        told, loaded = world.run_for_kvs(name, asked)
        assert told["loaded_tokens"] == length
        world.assert_same_kvs(computed, loaded, length)
        world.check_slots()
        # What was computed behind it is what it would be behind what was computed.
        world.flush()


def test_layers_with_windows_beside_few_bits(tmp_path: Path) -> None:
    """They are as they were, as if of another shape."""
    world = WindowWorld(tmp_path)
    prompt = draw(17, 700)
    _, computed = world.run_for_kvs("computed", prompt)
    world.flush()
    told, loaded = world.run_for_kvs("loaded", [*prompt, 1])
    assert (told["path"], told["loaded_tokens"], told["bits"]) == ("ssd", len(prompt), 6.0)
    for layer, (computed_kvs, others) in enumerate(zip(computed, loaded, strict=True)):
        for mine, other in zip(computed_kvs, others, strict=True):
            mine, other = (one[len(prompt) - WINDOW : len(prompt)] for one in (mine, other))
            off = float((mine - other).norm() / mine.norm())
            assert off == 0.0 if layer in WINDOWED else 0.0 < off < 0.05
    world.close()


def test_a_tail_behind_what_is_resident(world: WindowWorld, page: int) -> None:
    """It is shorter than a window, of which the beginning is resident."""
    prompt = draw(4, 640)
    _, computed = world.run_for_kvs("computed", prompt)
    world.flush()
    world.run("first", [*prompt[:512], 1])
    assert world.resident(prompt) == 512
    told, loaded = world.run_for_kvs("second", [*prompt[:576], *draw(5, 20)])
    length = 576 // page * page
    assert told["loaded_tokens"] + told["resident_tokens"] == length
    world.assert_same_kvs(computed, loaded, length)


def test_rows_that_were_evicted_come_back(world: WindowWorld, page: int) -> None:
    """All slots are there, and nobody can use them until the last rows are."""
    prompt = draw(6, 768)
    _, computed = world.run_for_kvs("computed", prompt)
    length = 768 // page * page
    assert world.resident(prompt) == length
    world.run("other", draw(7, 256))
    world.cache.evict(EvictParams(swa_num_tokens=ROWS))
    fork = [*prompt[:640], *draw(8, 40)]
    told, loaded = world.run_for_kvs("fork", fork)
    assert told["loaded_tokens"] == 640
    world.assert_same_kvs(computed, loaded, 640)
    told, loaded = world.run_for_kvs("whole", [*prompt, 1])
    assert told["loaded_tokens"] + told["resident_tokens"] == length
    world.assert_same_kvs(computed, loaded, length)


def test_only_what_has_its_rows_is_restored(world: WindowWorld, page: int) -> None:
    """As if the prompt had been computed in chunks."""
    prompt = draw(9, 768)
    at_384 = mock.patch.object(world.cache.planner, "usable_tokens", lambda _: 384)
    req = world.request("chunks", prompt)
    world.begin(req)
    row = world.rows.req_to_token[req.kv.req_pool_idx, :512].long()
    world.allocator.free_swa(row)
    req.kv.set_evicted_seqlen(ComponentType.SWA, 512)
    world.end(req)
    world.service.store.writes.drain()
    world.flush()
    for name, planned in (("fork", nullcontext()), ("as another rank can go on", at_384)):
        with planned:
            assert world.run(name, [*prompt[:500], 1])["path"] == "computed"
        world.flush()
    window = -(-WINDOW // page) * page
    shortest = [*prompt[: 512 + window], *draw(10, 20)]
    # What the fork has stored is followed by what has no rows, and that by what has.
    assert world.run("least", shortest)["loaded_tokens"] == 512 + window


def test_room_that_jobs_and_writes_have(world: WindowWorld, page: int) -> None:
    """SGLang gets rows that are promised to others, if there are no more."""
    world.run("stored", draw(11, 512))
    world.flush()
    req = world.request("waits", [*draw(11, 512), 1])
    world.poll()
    assert [len(job.aux_slots) for job in world.jobs.loading] == [-(-WINDOW // page) * page]
    world.check_slots()
    world.cache.evict_for_alloc(EvictParams(swa_num_tokens=ROWS))
    assert world.allocator.swa_available_size() == ROWS and not list(world.jobs.loading)
    world.serve(req)


class TightWorld(WindowWorld):
    """Rows for little more than one prompt."""

    num_rows = 320


def test_whoever_is_next_needs_rows_that_others_hold(tmp_path: Path) -> None:
    """Nothing runs, so nobody would ever give them back."""
    world = TightWorld(tmp_path, bits="exact")
    seeds = 13, 14, 15
    for seed in seeds:
        world.run(f"stored {seed}", draw(seed, 200))
    world.flush()
    waiting = [world.request(f"next {seed}", [*draw(seed, 200), *draw(16, 90)]) for seed in seeds]
    for req in waiting:
        world.settle(req)
    world.poll()
    assert world.match(waiting[0]) == 200
    fits, _ = world.allocator.create_prefill_budget(world.cache).check_prefill(
        extend_input_len=90,
        total_tokens=95,
        max_new_tokens=4,
        input_tokens=90,
        swa_host_hit_length=0,
        chunk_limit=256,
    )
    assert fits, "SGLang would not admit it"
    for req in waiting:
        world.serve(req)
    world.close()


def test_a_purge_reaches_what_has_no_rows(world: WindowWorld, page: int) -> None:
    prompt = draw(12, 512)
    world.run("stored", prompt)
    world.cache.evict(EvictParams(swa_num_tokens=ROWS))
    assert world.cache.full_evictable_size() >= 256 and not world.resident(prompt)
    sweeps = world.cache.sweeps
    while sweeps.step("purge", None, RadixKey(array("q", prompt[:256])))[1]:
        pass
    assert not world.cache.full_evictable_size()
