"""Planes that all units get, where requests for different bits share slots and reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from impress_sglang.errors import PrefixUnreadable
from impress_sglang.options import AUTO
from impress_sglang.serving.loading import loads_nothing
from impress_sglang.serving.request import StoredRequest
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.scoring import TorchScorer
from tests.integration.worlds import SHAPE, STORED, TOKENS, World
from tests.unit.spying import calls_of
from tests.unit.waiting import wait_until


@pytest.fixture
def options() -> dict[str, Any]:
    return {"load": "always", "readahead": 0.2}


@pytest.fixture
def world(world: World) -> World:
    """A store with a prompt, of which nothing is resident."""
    world.store_prompt(1000)
    return world


def admitted(world: World, rid: str, bits: float) -> StoredRequest:
    request = world.admit(world.ask(rid, bits=bits))
    assert request is not None
    return request


def run(world: World, *requests: StoredRequest) -> list[float]:
    """A pass loads them all; returns the bits that each got on average."""
    for layer in range(SHAPE.num_layers):
        for request in requests:
            world.load(request, layer)
    return [float(str(request.report["bits_mean"])) for request in requests]


def allocate_evenly(world: World) -> None:
    config = dataclasses.replace(world.runtime.config, allocate="even")
    world.runtime.admission._config = config


@pytest.mark.parametrize(("bits", "planes"), [(6, 1), (8, 2)])
def test_they_are_read_ahead_and_scored_by_nobody(
    world: World, bits: int, planes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And who wants no more of them afterwards loads nothing."""
    allocate_evenly(world)
    scored = calls_of(monkeypatch, TorchScorer, "column_sums")
    picked = calls_of(monkeypatch, CodedSource, "read_units")
    req = world.ask("first", bits=bits)
    world.cache.prefetch(req)
    wait_until(lambda: not world.runtime.prefetches._waiting["first"].source.is_reading)
    first = world.admit(req)
    assert first is not None and first.planes == planes
    world.load(first)
    world.end(first)
    assert not scored and not picked and first.report["bits_mean"] == bits
    assert first.reads.ahead_used_bytes == first.reads.ssd_needed_bytes > 0
    (use,) = first.uses
    assert use.part.has(planes) and (use.part.levels == planes).all()
    for rid, own in (("second", bits), ("fewer", 4)):
        request = admitted(world, rid, own)
        assert loads_nothing(request.loading)
        world.load(request)
        world.end(request)
        assert request.report["bits_mean"] == bits and not request.reads.ssd_needed_bytes


@pytest.mark.parametrize(("first", "second"), [(4.0, 8.0), (5.0, 8.0), (8.0, 5.0)])
def test_who_joins_a_load_gets_its_own_bits(world: World, first: float, second: float) -> None:
    requests = [admitted(world, "first", first), admitted(world, "second", second)]
    for wanted, found in zip((first, second), run(world, *requests), strict=True):
        assert found >= wanted - 0.01


def test_who_joins_a_load_of_more_bits_wants_none_on_top_of_them(world: World) -> None:
    allocate_evenly(world)
    first = admitted(world, "first", 6.0)
    world.runtime.admission._config = world.runtime.config
    second = admitted(world, "second", 5.0)
    assert run(world, first, second)[1] <= 6.5


@pytest.mark.parametrize("allocate", ["query", "even"])
@pytest.mark.parametrize(("first", "second"), [(4.0, 8.0), (5.0, 6.0), (6.0, 5.0)])
def test_who_takes_what_was_read_for_another_gets_its_own_bits(
    world: World, first: float, second: float, allocate: str
) -> None:
    if allocate == "even":
        allocate_evenly(world)
    world.cache.prefetch(world.ask("first", bits=first))
    request = admitted(world, "second", second)
    assert "first" not in world.runtime.prefetches
    (found,) = run(world, request)
    assert found >= second - (0.01 if second == 8.0 or allocate == "even" else 0.2)


def test_who_changes_its_mind_gets_the_bits_of_its_last_plan(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read ahead in 5 bits; then the drive is seen to be faster."""
    estimator = world.runtime.estimator

    def pick(bits: float) -> None:
        def choose(estimates: Any) -> Any:
            return next(own for own in estimates if own.bits == bits)

        monkeypatch.setattr(estimator, "most_bits", choose)

    pick(5.0)
    req = world.request("r", [*STORED, *range(5000, 5008)], bits=AUTO, retention=1.0)
    world.match(req)
    world.cache.prefetch(req)
    pick(6.0)
    world.match(req)
    request = world.admit(req)
    assert request is not None and (request.bits, request.planes) == (6.0, 1)
    assert run(world, request)[0] >= 6.0


def test_a_part_that_is_there_is_raised_with_a_source_of_fewer_bits(world: World) -> None:
    world.end(world.loaded("first", 32, bits=4.0))
    world.cache.prefetch(world.ask("second", bits=4.0))
    third = admitted(world, "third", 8.0)
    assert run(world, third)[0] == 8.0 and len(third.uses) == 2


@pytest.mark.parametrize("bits", [4.0, 5.0])
def test_who_loads_nothing_goes_on_with_no_slots_that_are_half_raised(
    world: World, bits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.end(world.loaded("first", bits=4.0))
    other, raising = admitted(world, "other", bits), admitted(world, "raising", 8.0)
    assert loads_nothing(other.loading) == (bits == 4.0)
    writer = world.runtime._loaders.precise._writer

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


@pytest.mark.parametrize("options", [{"load": "faster", "readahead": 0.2, "host_gb": 0.1}])
@pytest.mark.parametrize("state", ["in host memory", "under way", "on SSD"])
def test_what_need_not_be_read_costs_nothing(
    world: World, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix in slots in 4 bits, and a request for 8."""
    if state == "under way":
        admitted(world, "first", 8.0)
    else:
        world.end(world.loaded("first", bits=8.0 if state == "in host memory" else 4.0))
        (part,) = world.cache._residents
        part.levels[:] = part.planes = 0
        part.whole = False
    forecast, estimator = world.runtime.store.forecast, world.runtime.estimator
    for name in ("seconds_to_read", "seconds_to_pick"):
        monkeypatch.setattr(forecast, name, lambda num_bytes: num_bytes)
    for name in ("seconds", "least"):
        monkeypatch.setattr(estimator.computing, name, lambda new, pairs: 1e-3 * new)
    found = world.ask("second", bits=8.0).host_hit_length
    assert (found > 0) == (state != "on SSD")
    assert found in (0, 1, TOKENS)
