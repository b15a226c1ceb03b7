"""Planes of a prefix in codes, where requests for different bits share slots and reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from impress_sglang.errors import PrefixUnreadable
from impress_sglang.options import AUTO, BITS
from impress_sglang.precision.codec import NUM_PLANES, planes_of
from impress_sglang.serving.paper.loading import SharedLoading, loads_nothing
from impress_sglang.serving.paper.request import StoredRequest
from impress_sglang.storage.layout import BLOCK_BYTES
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.loader import LayerInputs
from impress_sglang.transfer.resident import PartUse, ResidentPart
from impress_sglang.transfer.scoring import TorchScorer
from impress_sglang.transfer.slots import LayerSlots
from tests.integration.worlds import SHAPE, STORED, TOKENS, World
from tests.unit.spying import calls_of
from tests.unit.waiting import wait_until

LEAST, SIX, MOST = BITS[0], 6.0, BITS[-1]
PAIRS = [(LEAST, MOST), (SIX, MOST), (MOST, SIX), (LEAST, SIX), (SIX, SIX)]


@pytest.fixture
def options() -> dict[str, Any]:
    return {"load": "always", "readahead": 0.2}


@pytest.fixture
def world(world: World) -> World:
    """A store with a prompt, of which nothing is resident."""
    world.store_prompt(1000)
    return world


class Pools:
    """KVs of each layer; the pool of `World` has one buffer for all."""

    def __init__(self, world: World) -> None:
        self._world = world
        pool = world.pool.get_key_buffer(0)
        self._layers = [(torch.zeros_like(pool), torch.zeros_like(pool)) for _ in range(3)]

    def load(self, *requests: StoredRequest) -> list[Tensor]:
        """A pass loads them all; returns the KVs of each."""
        for layer in range(len(self._layers)):
            for request in requests:
                self.load_layer(layer, request)
        return [
            torch.stack([pool[own.slots] for pools in self._layers for pool in pools])
            for own in requests
        ]

    def load_layer(self, layer: int, request: StoredRequest) -> None:
        """Load a layer of one request."""
        inputs = LayerInputs(*[torch.zeros(1, 2, SHAPE.key_dim)] * 3, 0.3)
        slots = LayerSlots.of(*self._layers[layer], request.slots)
        self._world.runtime.load_layer(layer, request, inputs, slots)
        self._world.runtime.finish_layer(request)


def admitted(world: World, rid: str, bits: float) -> StoredRequest:
    request = world.admit(world.ask(rid, bits=bits))
    assert request is not None
    return request


def run(world: World, *requests: StoredRequest) -> list[float]:
    """A pass loads them all; returns the bits that each got."""
    Pools(world).load(*requests)
    return [float(str(request.report["bits_mean"])) for request in requests]


def read_ahead(world: World, rid: str, bits: float) -> Any:
    """All that a request for these bits wants is read while it waits."""
    req = world.ask(rid, bits=bits)
    world.cache.prefetch(req)
    source = world.runtime.prefetches._waiting[rid].source
    source.lead = SHAPE.num_layers
    world.runtime.store.ahead.top_up()
    wait_until(lambda: not source.is_reading)
    assert source.there == 1.0
    return req


def blocks_of(part: ResidentPart, planes: int) -> int:
    """How many blocks so many planes of a part are in all layers."""
    size = part.layout.unit_stride // BLOCK_BYTES
    return (
        planes
        * SHAPE.num_layers
        * part.layout.num_heads
        * len(PartUse(part, part.start, part.stop).units)
        * size
    )


@pytest.mark.parametrize("bits", BITS)
def test_all_that_is_wanted_is_read_ahead_and_nothing_is_scored(
    world: World, bits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And who wants no more of them afterwards loads nothing."""
    scored = calls_of(monkeypatch, TorchScorer, "column_sums")
    first = world.admit(read_ahead(world, "first", bits))
    assert first is not None and run(world, first) == [bits]
    world.end(first)
    assert not scored
    assert first.reads.ahead_used_bytes == first.reads.ssd_needed_bytes == first.reads.ssd_bytes > 0
    (use,) = first.uses
    assert (use.part.planes == planes_of(bits)).all() and not use.part.floors.any()
    for number, own in enumerate(own for own in BITS if own <= bits):
        request = admitted(world, f"again-{number}", own)
        assert loads_nothing(request.loading) and run(world, request) == [bits]
        world.end(request)
        assert not request.reads.ssd_needed_bytes


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_who_joins_a_load_lets_it_read_what_both_want(
    world: World, first: float, second: float
) -> None:
    """Each block once."""
    requests = [admitted(world, "first", first), admitted(world, "second", second)]
    most = max(first, second)
    assert run(world, *requests) == [most, most]
    for request in requests:
        world.end(request)
    part = requests[0].uses[0].part
    assert sum(own.reads.selected_chunks for own in requests) == blocks_of(part, planes_of(most))
    alone = admitted(fresh(world, part), "alone", most)
    run(world, alone)
    world.end(alone)
    read = [sum(own.reads.ssd_needed_bytes for own in them) for them in (requests, [alone])]
    assert read[0] == read[1] > 0


def fresh(world: World, part: ResidentPart) -> World:
    """Nothing of a part is in slots."""
    world.cache._residents.evict(part)
    return world


@pytest.mark.parametrize("wanted", [(SIX, SIX, MOST), (SIX, MOST, SIX), (LEAST, SIX, MOST)])
def test_those_of_a_later_pass_share_its_reads(world: World, wanted: Sequence[float]) -> None:
    """They have joined the load of a request that runs in another pass."""
    first, *others = (admitted(world, str(n), bits) for n, bits in enumerate(wanted))
    run(world, first)
    world.end(first)
    assert run(world, *others) == [max(wanted)] * 2


@pytest.mark.parametrize("second", [LEAST, SIX])
def test_who_comes_after_that_pass_shares_them_too(world: World, second: float) -> None:
    requests = [admitted(world, "first", LEAST), admitted(world, "second", second)]
    run(world, requests[0])
    third = admitted(world, "third", MOST)
    found = run(world, requests[1], third)
    assert found[0] >= second and found[1] == MOST
    for request in (*requests, third):
        world.end(request)
    part = third.uses[0].part
    read = sum(own.reads.selected_chunks for own in (*requests, third))
    assert read == blocks_of(part, NUM_PLANES), "each block once"


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_who_takes_what_was_read_for_another_gets_its_own_bits(
    world: World, first: float, second: float
) -> None:
    read_ahead(world, "first", first)
    request = admitted(world, "second", second)
    assert "first" not in world.runtime.prefetches
    assert run(world, request) == [max(first, second)]


@pytest.mark.parametrize("joins", [False, True], ids=["takes it", "joins it"])
def test_planes_that_are_wanted_late_are_read_ahead_too(world: World, joins: bool) -> None:
    """What was read ahead before has all layers, without them."""
    request = world.admit(read_ahead(world, "first", LEAST)) if joins else None
    if not joins:
        read_ahead(world, "first", LEAST)
    second = admitted(world, "second", MOST)
    assert isinstance(second.loading, SharedLoading)
    (load,) = second.loading._loads
    wait_until(lambda: not load.source.is_reading)
    assert load.source.next_ahead == SHAPE.num_layers and load.source.there == 1.0
    assert run(world, second) == [MOST]
    for own in filter(None, (second, request)):
        world.end(own)
    reads = (request or second).reads
    assert reads.ahead_used_bytes == reads.ssd_needed_bytes == reads.ssd_bytes > 0


@pytest.mark.parametrize(("first", "then"), [(SIX, MOST), (MOST, SIX)])
def test_who_changes_its_mind_gets_the_bits_of_its_last_plan(
    world: World, first: float, then: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drive is seen to be faster than it was; or slower, when more is there already."""
    estimator = world.runtime.estimator

    def pick(bits: float) -> None:
        def choose(estimates: Any) -> Any:
            return next(own for own in estimates if own.bits == bits)

        monkeypatch.setattr(estimator, "most_bits", choose)

    pick(first)
    req = world.request("r", [*STORED, *range(5000, 5008)], bits=AUTO, retention=1.0)
    world.match(req)
    world.cache.prefetch(req)
    pick(then)
    world.match(req)
    request = world.admit(req)
    assert request is not None and request.bits == then
    assert run(world, request) == [max(first, then)]


@pytest.mark.parametrize("there", [LEAST, SIX])
def test_planes_that_a_part_in_slots_lacks_are_read_ahead(world: World, there: float) -> None:
    """These and nothing else; the slots hold then what they hold where all is read at once."""
    pools, first = Pools(world), admitted(world, "first", there)
    before = pools.load(first)[0]
    world.end(first)
    second = world.admit(read_ahead(world, "second", MOST))
    assert second is not None and torch.equal(second.slots, first.slots)
    (raised,) = pools.load(second)
    world.end(second)
    (use,) = second.uses
    lacking = blocks_of(use.part, NUM_PLANES - planes_of(there))
    assert second.reads.ssd_needed_bytes == second.reads.ahead_used_bytes == lacking * BLOCK_BYTES
    assert second.report["bits_mean"] == MOST and second.report["base_bytes"] == 0
    (at_once,) = Pools(world).load(admitted(fresh(world, use.part), "at once", MOST))
    assert torch.equal(raised, at_once) and not torch.allclose(before, at_once, atol=1e-4)


def test_planes_of_what_is_in_slots_are_read_ahead_beside_the_rest(world: World) -> None:
    world.end(world.loaded("first", 32, bits=LEAST))
    second = world.admit(read_ahead(world, "second", SIX))
    assert second is not None and len(second.uses) == 2 and run(world, second) == [SIX]
    world.end(second)
    assert second.reads.ahead_used_bytes == second.reads.ssd_needed_bytes > 0


def test_a_part_that_is_there_is_raised_with_a_source_of_fewer_bits(world: World) -> None:
    world.end(world.loaded("first", 32, bits=LEAST))
    read_ahead(world, "second", SIX)
    third = admitted(world, "third", MOST)
    assert "second" not in world.runtime.prefetches, "it goes on with that"
    assert run(world, third) == [MOST] and len(third.uses) == 2


def test_what_is_read_for_a_part_is_not_for_another_one_in_its_place(world: World) -> None:
    """A request waits for planes of a part that is evicted, and comes back with fewer."""
    first = admitted(world, "first", SIX)
    run(world, first)
    world.end(first)
    read_ahead(world, "waits", MOST)
    fresh(world, first.uses[0].part)
    pools = Pools(world)
    again = admitted(world, "again", LEAST)
    pools.load(again)
    world.end(again)
    raising = admitted(world, "raising", MOST)
    (raised,) = pools.load(raising)
    world.end(raising)
    (at_once,) = Pools(world).load(admitted(fresh(world, raising.uses[0].part), "at once", MOST))
    assert torch.equal(raised, at_once)


@pytest.mark.parametrize("bits", [LEAST, MOST])
def test_who_loads_nothing_goes_on_with_no_slots_that_are_half_raised(
    world: World, bits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.end(world.loaded("first", bits=LEAST))
    other, raising = admitted(world, "other", bits), admitted(world, "raising", MOST)
    assert loads_nothing(other.loading) == (bits == LEAST)
    writer = world.runtime._loaders.coded._writer

    def fails(*_: Any) -> None:
        raise MemoryError("out of memory")

    for request in (other, raising):
        world.load(request, 0)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "raise_units", fails)
        with pytest.raises(MemoryError):
            world.load(raising, 1)
    world.runtime.fail(raising)
    world.runtime.finish_layer(raising)
    assert not loads_nothing(other.loading)
    with pytest.raises(PrefixUnreadable):
        world.load(other, 1)
    # Who comes then loads it into slots of its own.
    third = world.loaded("third", bits=MOST)
    assert not set(third.slots.tolist()) & set(raising.slots.tolist())
    assert third.report["bits_mean"] == MOST


def test_planes_that_cannot_be_read_break_their_part(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.end(world.loaded("first", bits=LEAST))
    raising = admitted(world, "raising", MOST)
    part = raising.uses[0].part

    def fails(*_: Any) -> None:
        raise PrefixUnreadable("ab12", "test")

    with monkeypatch.context() as patch:
        patch.setattr(CodedSource, "read", fails)
        with pytest.raises(PrefixUnreadable) as error:
            world.load(raising)
    world.runtime.give_up_reading(raising, error.value)
    assert part.broken and part.users
    assert not any(cover.part for cover in world.cache._residents.cover(_spans(world)))


def _spans(world: World) -> Any:
    req = world.ask("looking")
    return world.cache._known[req.rid].plan.spans


@pytest.mark.parametrize("options", [{"load": "faster", "readahead": 0.2, "host_gb": 0.1}])
@pytest.mark.parametrize("state", ["in host memory", "under way", "on SSD"])
def test_what_need_not_be_read_costs_nothing(
    world: World, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix in slots in the fewest bits, and a request for the most."""
    if state == "under way":
        admitted(world, "first", MOST)
    else:
        world.end(world.loaded("first", bits=MOST if state == "in host memory" else LEAST))
        (part,) = world.cache._residents
        part.planes[:] = 0
    forecast, estimator = world.runtime.store.forecast, world.runtime.estimator
    monkeypatch.setattr(forecast, "seconds_to_read", lambda num_bytes: num_bytes)
    for name in ("seconds", "least"):
        monkeypatch.setattr(estimator.computing, name, lambda new, pairs: 1e-3 * new)
    found = world.ask("second", bits=MOST).host_hit_length
    assert (found > 0) == (state != "on SSD")
    assert found in (0, 1, TOKENS)


@pytest.mark.parametrize("bits", [LEAST, MOST])
def test_what_another_request_loads_is_not_read_ahead(world: World, bits: float) -> None:
    """Who waits meanwhile joins that load; what is read for it beside would be for nothing."""
    first = admitted(world, "first", LEAST)
    second = world.ask("second", bits=bits)
    world.cache.prefetch(second)
    assert "second" not in world.runtime.prefetches
    run(world, first)
    request = world.admit(second)
    assert request is not None and run(world, request) == [bits]
    assert world.runtime.store.ahead._ahead_bytes == world.runtime.store.ahead._used_bytes


@pytest.mark.parametrize("length", [TOKENS, 32])
def test_planes_of_a_shorter_prefix_are_read_ahead(world: World, length: int) -> None:
    """Of a part that goes on behind it, which is cut there as the request is admitted."""
    world.end(world.loaded("first", bits=LEAST))
    second = world.ask("second", length, bits=MOST)
    world.cache.prefetch(second)
    source = world.runtime.prefetches._waiting["second"].source
    request = world.admit(second)
    assert request is not None and isinstance(request.loading, SharedLoading)
    assert [own.source for own in request.loading._loads] == [source]
    assert run(world, request) == [MOST]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("where", ["read", "restore_base", "raise_units"])
@pytest.mark.parametrize("bits", [LEAST, MOST])
def test_who_fails_leaves_no_part_half_loaded(
    world: World, bits: float, where: str, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also none that it does not use itself, but that the same load brings for a longer prompt."""
    pools = Pools(world)
    first = world.admit(world.ask("first", 32, bits=LEAST))
    assert first is not None
    pools.load(first)
    world.end(first)
    longer = admitted(world, "longer", SIX)
    shorter = world.admit(world.ask("shorter", 32, bits=SIX))
    assert shorter is not None and len(longer.uses) == 2 and len(shorter.uses) == 1
    for number in range(layer):
        pools.load_layer(number, shorter)
    fail_at_last(monkeypatch, world, where)
    with pytest.raises(MemoryError):
        pools.load_layer(layer, shorter)
    monkeypatch.undo()
    world.runtime.fail(shorter)
    world.runtime.finish_layer(shorter)
    third = admitted(world, "third", bits)
    (found,) = pools.load(third)
    expected = found.clone()
    got = [(use.start, use.stop, use.part.planes.tolist()) for use in third.uses]
    assert all(min(planes) >= planes_of(bits) for _, _, planes in got)
    for request in (third, longer, shorter):
        world.end(request)
    residents = world.cache._residents
    residents.check_integrity()
    for planes, own in enumerate(BITS):
        for part in list(residents):
            residents.evict(part)
        request = admitted(world, f"at once in {own}", own)
        (at_once,) = Pools(world).load(request)
        world.end(request)
        for start, stop, levels in got:
            for number, level in enumerate(levels):
                if level == planes:
                    each = slice(2 * number, 2 * number + 2)
                    expected[each, start:stop] = at_once[each, start:stop]
    assert torch.allclose(found, expected, atol=1e-5)


def fail_at_last(monkeypatch: pytest.MonkeyPatch, world: World, where: str) -> None:
    """Memory runs out in the last step of a layer in which so much is done."""

    def fails(*_: Any) -> None:
        raise MemoryError("out of memory")

    if where == "read":
        monkeypatch.setattr(CodedSource, "_read", fails)
        return
    writer = world.runtime._loaders.coded._writer
    usual, left = getattr(writer, where), [where == "raise_units"]

    def fails_at_last(*args: Any) -> None:
        if not left.pop():
            fails()
        left.append(False)
        usual(*args)

    monkeypatch.setattr(writer, where, fails_at_last)


@pytest.mark.parametrize("options", [{"load": "always", "readahead": 0.2, "host_gb": 0.1}])
@pytest.mark.parametrize("cached", BITS)
def test_planes_in_host_memory_cost_nothing_and_others_do(world: World, cached: float) -> None:
    """Also where nothing is in slots: as much is expected to be read as is read."""
    first = world.loaded("first", bits=cached)
    world.end(first)
    part = first.uses[0].part
    fresh(world, part)
    forecast = world.runtime.store.forecast
    stored = forecast.coded_bytes(_spans(world))
    for bits in BITS:
        lacking = max(planes_of(bits) - planes_of(cached), 0)
        assert stored.expected(planes_of(bits)) == blocks_of(part, lacking) * BLOCK_BYTES


@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_in_slots_is_not_opened(
    world: World, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prefix of which a part has what is wanted, only the rest is."""
    world.end(world.loaded("first", 32, bits=SIX))
    opened = calls_of(monkeypatch, type(world.runtime.store), "open_coded")
    second = world.admit(
        read_ahead(world, "second", SIX) if ahead else world.ask("second", bits=SIX)
    )
    assert second is not None and len(second.uses) == 2
    (call,) = opened
    (span,) = call.args[1]
    assert (span.start, span.stop) == (32, second.uses[1].stop) and call.args[2] == [None]
    assert run(world, second) == [SIX]
