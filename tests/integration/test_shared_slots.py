"""Slots of prefixes in codes: the room that they take, and requests that fail with them."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

from impress_sglang.errors import PrefixUnreadable
from impress_sglang.integration.passes import KnownRequest
from impress_sglang.options import AUTO
from impress_sglang.serving.custom_params import load_options_of
from impress_sglang.serving.estimate import RequestLengths
from impress_sglang.serving.loading import SelectiveLoading, SharedLoading
from impress_sglang.serving.request import StoredRequest
from impress_sglang.storage.quality import Quality
from impress_sglang.transfer.loader import LayerInputs
from impress_sglang.transfer.slots import LayerSlots
from tests.integration import test_weights
from tests.integration.test_weights import TOKENS, World
from tests.unit.kv_factory import make_shape

SHAPE = make_shape(layers=3, probe=(), coded=True)


class CodedWorld(World):
    """A tree cache whose requests get 5 bits, and what a pass does of them."""

    def ask(
        self,
        rid: str,
        length: int = TOKENS,
        new: int = 8,
        bits: object = 5.0,
        retention: float = 1.0,
        fork: int = TOKENS,
    ) -> Any:
        """A request with the first tokens of a stored prompt is matched."""
        prompt = [*range(1000, 1000 + fork), *range(1500, 1500 + TOKENS - fork)]
        tokens = array("q", [*prompt[:length], *range(5000, 5000 + new)])
        custom = {"impress_retention": retention, "impress_bits": bits}
        req = Req(rid, "", tokens, SamplingParams(custom_params=custom))
        req.full_untruncated_fill_ids = tokens
        key = RadixKey(tokens, None, limit=len(tokens) - 1)
        match = self.cache.match_prefix(MatchPrefixParams(key=key, req=req))
        req.last_node = match.last_device_node
        req.host_hit_length = match.host_hit_length
        req.prefix_len = match.device_prefix_len
        return req

    def admit(self, req: Any) -> StoredRequest | None:
        loaded = self.cache.init_load_back(
            InitLoadBackParams(best_match_node=None, host_hit_length=req.host_hit_length, req=req)
        )
        return None if loaded is None else self.runtime.live[req.rid]

    def load(self, request: StoredRequest, layer: int) -> None:
        pool = self.pool.get_key_buffer(layer)
        inputs = LayerInputs(
            torch.randn(4, SHAPE.num_query_heads, SHAPE.key_dim),
            torch.randn(4, SHAPE.num_kv_heads, SHAPE.key_dim),
            pool[:0],
            0.3,
        )
        slots = LayerSlots.of(pool, pool.clone(), request.slots)
        self.runtime.load_layer(layer, request, inputs, slots)
        self.runtime.finish_layer(request)

    def end(self, request: StoredRequest) -> None:
        """As `on_release` does."""
        self.cache._forget(request.rid)
        self.runtime.release(request.rid)
        if not request.uses:
            self.cache._private_tokens -= request.k
            self.allocator.free(request.slots)

    def idle_part(self, length: int = TOKENS) -> None:
        request = self.admit(self.ask("first", length))
        assert request is not None
        for layer in range(SHAPE.num_layers):
            self.load(request, layer)
        self.end(request)
        assert self.cache._residents.idle_tokens == length

    def prompt_of(self, rid: str, length: int) -> tuple[list[str], list[int]]:
        """A pass that completes a prompt nobody has stored, as `begin_saves` is told of it."""
        (row,) = self.rows.alloc_rows(1)
        tokens = array("q", range(3000, 3000 + length))
        req = Req(rid, "", tokens, SamplingParams())
        req.full_untruncated_fill_ids = tokens
        req.kv = SimpleNamespace(req_pool_idx=row)
        self.cache._known.note(req)
        return [rid], [length]

    @property
    def room(self) -> int:
        """What SGLang admits by."""
        return int(self.allocator.create_prefill_budget(self.cache).remaining_total)


@pytest.fixture
def page_size() -> int:
    return 1


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_size: int) -> Iterator[CodedWorld]:
    monkeypatch.setattr(test_weights, "SHAPE", SHAPE)
    world = CodedWorld(tmp_path, page_size, load="always")
    world.store_prompt(1000)
    yield world
    for rid in list(world.runtime.live):
        world.end(world.runtime.live[rid])
    world.runtime.prefetches.drop_all()
    world.cache.check_integrity()
    cache = world.cache
    held = world.allocator.available_size() + cache.evictable_size() + cache.protected_size()
    assert held == world.allocator.size
    world.runtime.close()


@pytest.mark.parametrize("length", [TOKENS, 24])
def test_admission_takes_no_more_room_than_it_promised(world: CodedWorld, length: int) -> None:
    """SGLang counts idle parts as room until they are used; then it must have counted them."""
    world.idle_part()
    req, before = world.ask("second", length), world.room
    request = world.admit(req)
    assert request is not None and request.report["shared_tokens"] == length
    assert before - world.room <= req.host_hit_length
    for layer in range(SHAPE.num_layers):
        world.load(request, layer)


@pytest.mark.parametrize("where", ["restore_base", "raise_units"])
def test_nobody_joins_what_ran_out_of_memory(
    world: CodedWorld, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = world.admit(world.ask("first"))
    second = world.admit(world.ask("second"))
    assert first is not None and second is not None
    for request in (first, second):
        world.load(request, 0)
    writer = world.runtime._loaders.precise._writer

    def fails(*_: Any) -> None:
        raise MemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(writer), where, fails)
        with pytest.raises(MemoryError):
            world.load(first, 1)
    # As `attention._load_layer` does.
    world.runtime.fail(first)
    world.runtime.finish_layer(first)
    # What is in the slots now is not what the levels say: another must not attend to it.
    with pytest.raises(PrefixUnreadable):
        world.load(second, 1)
    # And who comes before the two have left loads it for itself.
    third = world.admit(world.ask("third"))
    assert third is not None
    assert not set(third.slots.tolist()) & set(first.slots.tolist())
    for layer in range(SHAPE.num_layers):
        world.load(third, layer)


def test_who_comes_after_one_that_ran_out_of_memory(
    world: CodedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With SGLang's overlap a request is admitted before the failed one has left."""
    first = world.admit(world.ask("first"))
    assert first is not None
    world.load(first, 0)
    world.runtime.fail(first)
    second = world.admit(world.ask("second"))
    assert second is not None
    for layer in range(SHAPE.num_layers):
        world.load(second, layer)


def test_a_taken_prefetch_leaves_none_behind(world: CodedWorld) -> None:
    world.runtime.store.ahead.set_waste_budget(0.2)
    long, short = world.ask("long"), world.ask("short", 40)
    world.cache.prefetch(long)
    world.cache.prefetch(short)
    assert set(world.runtime.prefetches._waiting) == {"long", "short"}
    short_again = world.ask("long", 40)
    assert world.admit(short_again) is not None
    assert "long" not in world.runtime.prefetches


def test_a_prefix_that_is_used_in_codes_is_the_last_to_be_removed(world: CodedWorld) -> None:
    """Also where all of it is in slots: the quota removes what was used longest ago."""
    (segment,) = world.runtime.store.tree.segments()
    for _ in range(2):
        before = segment.hits, segment.last_access
        request = world.admit(world.ask("r"))
        assert request is not None
        for layer in range(SHAPE.num_layers):
            world.load(request, layer)
        world.end(request)
        assert segment.hits == before[0] + 1 and segment.last_access > before[1]


def test_a_part_of_a_prefix_has_slots_of_its_own(world: CodedWorld) -> None:
    """A offset row, filled from codes: nobody shares it, and it shares nothing that is there."""
    world.idle_part()
    req = world.ask("part", retention=0.25)
    request = world.admit(req)
    assert request is not None and req.host_hit_length == TOKENS // 4
    assert request.k == TOKENS // 4 and request.start == TOKENS - TOKENS // 4
    assert not request.uses and isinstance(request.loading, SelectiveLoading)
    assert world.cache._private_tokens == TOKENS // 4
    assert request.quality == Quality(1, 0.25, 5.0)
    assert request.report["used_tokens"] == request.report["loaded_tokens"] == TOKENS // 4
    assert request.report["shared_tokens"] == 0 and request.report["bits"] == 5.0
    for layer in range(SHAPE.num_layers):
        world.load(request, layer)
    assert request.loading is None, "given back after the last layer"
    assert request.stats.layers_by_probe == SHAPE.num_layers
    assert 4.0 <= float(str(request.report["bits_mean"])) <= 5.0
    assert int(str(request.report["base_bytes"])) > 0
    assert world.cache._residents.idle_tokens == TOKENS, "what others share stays"


def test_what_was_read_for_a_part_while_it_waited_is_its_own(world: CodedWorld) -> None:
    world.runtime.store.ahead.set_waste_budget(0.2)
    world.cache.prefetch(world.ask("part", retention=0.5))
    (prefetch,) = world.runtime.prefetches._waiting.values()
    whole = world.admit(world.ask("whole"))
    assert whole is not None and isinstance(whole.loading, SharedLoading)
    assert prefetch.source not in {own.source for own in whole.loading._loads}
    part = world.admit(world.ask("part", retention=0.5))
    assert part is not None and isinstance(part.loading, SelectiveLoading)
    assert part.loading._source is prefetch.source
    assert part.report["prefetched"] and not world.runtime.prefetches._waiting


@pytest.mark.parametrize("retention", [1.0, 0.5])
def test_a_prefix_that_no_buffer_holds_is_computed(world: CodedWorld, retention: float) -> None:
    pool = world.runtime.store._memory.pool
    limit, pool.limit_bytes = pool.limit_bytes, 1
    assert world.ask("first", retention=retention).host_hit_length == 0
    pool.limit_bytes = limit
    assert world.ask("second", retention=retention).host_hit_length > 0


FORK = 40


@pytest.mark.parametrize("page_size", [16])
def test_slots_are_taken_and_given_back_in_pages(world: CodedWorld, page_size: int) -> None:
    """Of a prompt that leaves another one inside a page; its page there is nobody else's."""
    world.store_prompt(1000, FORK)
    world.idle_part()
    requests = [world.admit(world.ask(rid, fork=FORK)) for rid in ("a", "b")]
    for request in requests:
        assert request is not None and request.num_tokens == TOKENS
        pages = request.slots.view(-1, page_size)
        assert torch.equal(pages, pages[:, :1] + torch.arange(page_size))
        assert not (pages[:, 0] % page_size).any()
    first, second = requests
    assert first is not None and second is not None
    same = first.slots == second.slots
    assert same.tolist() == [token // page_size != FORK // page_size for token in range(TOKENS)]
    assert first.report["loaded_tokens"] == 32 and second.report["loaded_tokens"] == 16
    world.cache.check_integrity()
    for layer in range(SHAPE.num_layers):
        for request in (first, second):
            world.load(request, layer)
    world.end(first)
    assert world.allocator.available_size() == world.allocator.size - (TOKENS + 32)
    world.end(second)
    # What was shared stays, and what was not does not.
    assert world.cache._residents.idle_tokens == TOKENS + 16
    assert world.allocator.available_size() == world.allocator.size - (TOKENS + 16)


@pytest.mark.parametrize("page_size", [16])
@pytest.mark.parametrize("bits", [5.0, "exact"])
def test_a_prefix_ends_with_a_page(world: CodedWorld, bits: object) -> None:
    request = world.admit(world.ask("r", length=50, bits=bits))
    assert request is not None and request.prefix_len == request.k == 48
    assert world.allocator.available_size() == world.allocator.size - 48
    for layer in range(SHAPE.num_layers):
        world.load(request, layer)
    world.end(request)
    # What is in no whole page of the tree is not saved: its slots are not the tree's.
    (save,) = world.cache.passes.begin_saves(*world.prompt_of("p", 50)).values()
    assert len(save.slots) == 48
    save.abandon()
    world.runtime.store.writes.drain()


@pytest.mark.parametrize("page_size", [16])
def test_a_rest_in_a_page_with_another_segment_is_computed(
    world: CodedWorld, page_size: int
) -> None:
    """All of its pages or none: a prefix does not end inside of one."""
    world.store_prompt(1000, FORK)
    world.idle_part()
    admission = world.runtime.admission
    admission._config = dataclasses.replace(admission._config, min_prefix_tokens=33)
    req = world.ask("r", fork=FORK)
    request = world.admit(req)
    assert request is not None and request.prefix_len == 32
    assert req.host_hit_length % page_size == req.prefix_len % page_size == 0
    for layer in range(SHAPE.num_layers):
        world.load(request, layer)


@pytest.mark.parametrize(
    ("megabytes_per_second", "asked", "bits"),
    [(1e9, None, 8.0), (0.4, None, 6.0), (1e-3, None, 5.0), (1e9, 4.5, 4.5), (1e-3, 7, 7.0)],
)
def test_auto_gives_the_most_bits_that_load_while_computing(
    world: CodedWorld,
    megabytes_per_second: float,
    asked: float | None,
    bits: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = world.runtime
    config = runtime.admission._config = dataclasses.replace(runtime.config, bits=AUTO)
    params = SamplingParams(custom_params={} if asked is None else {"impress_bits": asked})
    wanted = load_options_of(params, config)
    key = RadixKey(array("q", range(1000, 1000 + TOKENS)), None)
    match, _ = world.cache._plan(key, 0, KnownRequest(world.ask("r")))
    assert match.num_tokens == TOKENS
    stored = runtime.store.forecast.coded_bytes(match.spans)
    # Computing takes as long as reading in 6.5 bits at 0.4 MB/s.
    seconds = stored.expected(6.5) / 0.4e6
    monkeypatch.setattr(
        runtime.store.forecast, "seconds_to_read", lambda count: count / megabytes_per_second / 1e6
    )
    monkeypatch.setattr(runtime.estimator, "_overlapped", True)
    monkeypatch.setattr(runtime.estimator, "_compute_seconds", lambda before, new: seconds)
    monkeypatch.setattr(runtime.estimator.loading, "seconds", lambda *_: 0.0)
    runtime.estimator.note_forward(100, 5000, 0.1)
    assert runtime.admission.decide(match, RequestLengths(0, TOKENS, 8), wanted).bits == bits


@pytest.mark.parametrize(("length", "saved"), [(15, 0), (16, 1)])
def test_a_prompt_is_saved_from_the_shortest_length_on(
    world: CodedWorld, length: int, saved: int
) -> None:
    saves = world.cache.passes.begin_saves(*world.prompt_of("p", length))
    assert len(saves) == saved
    for save in saves.values():
        save.abandon()
    world.runtime.store.writes.drain()
