"""A prefix in codes: the bits that its slots get, what is read for that, and from where."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from impress_sglang.errors import PrefixUnreadable
from impress_sglang.precision.allocation import planes_of
from impress_sglang.precision.codec import NUM_PLANES
from impress_sglang.precision.floors import Floors
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.loader import LayerInputs, LoadStats
from impress_sglang.transfer.precise import ALLOCATIONS, SCORED_QUERIES, PreciseLoader
from impress_sglang.transfer.resident import PartLoad, PartUse, UsedUnits
from impress_sglang.transfer.slots import LayerSlots
from tests.unit import dense
from tests.unit.coded_factory import BLOCK, SHAPE, CodedCase, CodedPart, restored, units_of
from tests.unit.kv_factory import flip_byte, make_shape
from tests.unit.spying import calls_of

Coded = Callable[..., CodedCase]
PREFIXES = {
    "one": [CodedPart(700)],
    "short": [CodedPart(3)],
    "inside": [CodedPart(1500, 70, 1337)],
    "several": [CodedPart(300, 17), CodedPart(64), CodedPart(900, 0, 555)],
}
BITS = [4.0, 5.0, 6.5, 8.0]
# Planes that belong to the base, of each layer and head of SHAPE.
FLOORS = np.array([[0, 2], [1, 0], [2, 1]], np.uint8)
with_and_without_floors = pytest.mark.parametrize(
    "floors", [None, FLOORS], ids=["no floors", "floors"]
)


def least_planes(floors: Floors | None, layer: int) -> Tensor:
    """What the units of each head have in any case, [G, 1]."""
    own = np.zeros(SHAPE.num_kv_heads, np.uint8) if floors is None else floors[layer]
    return torch.from_numpy(own).long()[:, None]


def inputs(case: CodedCase, seed: int = 5, new: int = 4) -> LayerInputs:
    generator = torch.Generator().manual_seed(seed)
    shape = case.shape

    def rows(count: int, heads: int) -> Tensor:
        found = torch.randn(count, heads, shape.key_dim, generator=generator)
        return found.to(shape.dtype)

    return LayerInputs(rows(new, shape.num_query_heads), rows(new, 2), rows(6, 2), 0.3)


def squares(given: LayerInputs, prefix: Tensor) -> Tensor:
    """Squared attention weights [G, m] of the prefix, of the queries that score, in float64."""
    first = max(0, len(given.queries) - SCORED_QUERIES)
    before = torch.cat([given.resident_keys, given.new_keys[:first]])
    queries, new = given.queries[first:], given.new_keys[first:]
    found = dense.column_sums(queries, prefix, before, new, given.scaling, squares=True)
    return torch.from_numpy(found).unflatten(0, (prefix.shape[1], -1)).sum(1)


def load(
    case: CodedCase,
    layer: int,
    bits: float,
    rule: str = "query",
    stats: LoadStats | None = None,
    seed: int = 5,
    new: int = 4,
) -> Tensor:
    """Load a layer as the request under way does; checks slots, and gives the levels."""
    loader = PreciseLoader(case.shape, ALLOCATIONS[rule])
    slots, given = case.layer_slots(layer), inputs(case, seed, new)
    loader.load(layer, case.units, given, slots, bits, stats or LoadStats())
    case.check(layer)
    return case.levels(layer)


def load_all(case: CodedCase, bits: float, **how: Any) -> list[Tensor]:
    """The levels of all layers."""
    return [load(case, layer, bits, **how) for layer in range(SHAPE.num_layers)]


@with_and_without_floors
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rule", ALLOCATIONS)
@pytest.mark.parametrize("name", PREFIXES)
def test_slots_get_the_bits_that_were_asked_for(
    name: str, rule: str, bits: float, floors: Floors | None, coded: Coded
) -> None:
    """On top of what belongs to the base, as far as there is room."""
    case, stats = coded(PREFIXES[name], floors=floors), LoadStats()
    for layer in range(SHAPE.num_layers):
        planes, least = load(case, layer, bits, rule, stats), least_planes(floors, layer)
        assert (planes >= least).all() and int(planes.max()) <= NUM_PLANES
        fixed = int(least.sum()) * planes.shape[1]
        room = NUM_PLANES * planes.numel() - fixed
        assert int(planes.sum()) == fixed + min(planes_of(bits, planes.numel()), room)
    if floors is None:
        assert bits - 2 / planes.numel() < stats.mean_bits <= bits
    else:
        assert stats.mean_bits >= bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pools_of_few_bits(dtype: torch.dtype, coded: Coded) -> None:
    shape = make_shape(layers=1, key_dim=64, value_dim=64, dtype=dtype, probe=(), coded=True)
    case = coded(PREFIXES["several"], shape=shape)
    load(case, 0, 6.0)


@pytest.mark.parametrize("new", [4, SCORED_QUERIES, SCORED_QUERIES + 23])
@pytest.mark.parametrize("name", ["one", "several"])
def test_planes_go_where_an_error_weighs_most(name: str, new: int, coded: Coded) -> None:
    case = coded(PREFIXES[name])
    planes = load(case, 0, 5.0, new=new)
    base = case.expected(0, torch.zeros_like(planes))[0]
    by_token = squares(inputs(case, new=new), base)
    weights = case.units.weights(by_token)
    gains = torch.stack([weights, weights / 16])
    given = torch.arange(NUM_PLANES)[:, None, None] < planes
    assert gains[given].min() >= gains[~given].max() * (1 - 1e-3)


def test_what_is_read_is_the_base_and_the_planes(coded: Coded) -> None:
    case, stats = coded(PREFIXES["one"]), LoadStats()
    planes = load_all(case, 5.0, stats=stats)
    case.source.close()
    (span,) = case.spans
    count = sum(int(own.sum()) for own in planes)
    read = case.source.stats
    assert read.ssd_needed_bytes == span.layout.base_bytes * SHAPE.num_layers + count * BLOCK
    assert read.ssd_bytes >= read.ssd_needed_bytes
    assert stats.base_bytes == span.layout.num_groups * span.layout.group_bytes * SHAPE.num_layers
    assert sum(stats.planes) == count
    assert stats.units == sum(own.numel() for own in planes)


@pytest.mark.parametrize(("device_pages", "host_pages"), [(400, 0), (0, 400), (9, 13), (40, 60)])
def test_caches_give_what_the_drive_gave(device_pages: int, host_pages: int, coded: Coded) -> None:
    case = coded(PREFIXES["several"], device_pages=device_pages, host_pages=host_pages)
    assert case.cache is not None
    for _ in range(3):
        for layer in range(SHAPE.num_layers):
            load(case, layer, 6.0)
            case.cache.check_integrity()
        case.source.close()
        stats = case.source.stats
        case.request()
    if device_pages + host_pages == 400:
        assert stats.ssd_bytes == 0 and stats.ssd_chunks == 0
    assert stats.device_chunks + stats.host_chunks > 0


def test_what_is_read_ahead_is_used(coded: Coded) -> None:
    case = coded(PREFIXES["several"])
    load_all(case, 5.0)
    case.request()
    case.read_ahead(0.5)
    load_all(case, 5.0)
    case.source.close()
    stats = case.source.stats
    base = sum(
        span.layout.base_bytes - int(span.spared_blocks.sum()) * BLOCK for span in case.spans
    )
    assert stats.ahead_used_bytes == stats.ahead_bytes == SHAPE.num_layers * base
    assert stats.ahead_bytes < stats.ssd_bytes, "of planes only the request says"


@pytest.mark.parametrize("where", ["base", "plane"])
def test_a_damaged_block_is_found(where: str, coded: Coded) -> None:
    case = coded(PREFIXES["one"])
    segment, layout = case.spans[0].segment, case.spans[0].layout
    offset = segment.layout.codes_offset(1)
    flip_byte(case.paths[0], offset + (5 if where == "base" else layout.base_bytes + 5))
    load(case, 0, 8.0)
    with pytest.raises(PrefixUnreadable, match="checksum"):
        load(case, 1, 8.0)


def test_a_question_raises_what_it_lacks_of_a_resident_prefix(coded: Coded) -> None:
    case = coded(PREFIXES["several"])
    alone = []
    for seed in (5, 6):
        case.request()
        alone.append(load_all(case, 5.0, seed=seed))
        case.source.close()
    case.request()
    load_all(case, 5.0, seed=5)
    case.request(resident=True)
    stats = LoadStats()
    for layer in range(SHAPE.num_layers):
        before = case.levels(layer)
        after = load(case, layer, 5.0, stats=stats, seed=6)
        assert (after >= before).all()
        # Weights come from keys that have more bits by now: nearly the same choice.
        assert (after >= alone[1][layer]).float().mean() > 0.9
    case.source.close()
    assert stats.base_bytes == 0
    assert stats.mean_bits > 5.0
    raised = sum(int((a - b).clamp_min(0).sum()) for a, b in zip(*alone, strict=True))
    assert 0 < case.source.stats.ssd_needed_bytes <= 1.5 * raised * BLOCK


def test_two_requests_of_a_pass_read_a_prefix_once(coded: Coded) -> None:
    case = coded(PREFIXES["one"])
    for layer in range(SHAPE.num_layers):
        for _ in range(3):
            load(case, layer, 5.0)
    case.source.close()
    planes = sum(int(case.levels(layer).sum()) for layer in range(SHAPE.num_layers))
    base = case.spans[0].layout.base_bytes * SHAPE.num_layers
    assert case.source.stats.ssd_needed_bytes == base + planes * BLOCK


def test_a_part_of_a_part_is_enough(coded: Coded) -> None:
    """A request that shares only some tokens raises the units that have them."""
    case = coded(PREFIXES["one"])
    load_all(case, 4.0)
    case.request(resident=True)
    (part,) = case.parts
    use = PartUse(part, 130, 300)
    units = UsedUnits([use], torch.device("cpu"))
    loader, stats = PreciseLoader(SHAPE, ALLOCATIONS["query"]), LoadStats()
    for layer in range(SHAPE.num_layers):
        slots = case.layer_slots(layer)
        own = LayerSlots.of(slots.keys.pool, slots.values.pool, use.slots)
        loader.load(layer, units, inputs(case), own, 8.0, stats)
        case.check(layer)
        touched = case.levels(layer).amax(0).nonzero().flatten() * part.layout.unit_tokens
        assert ((touched + part.layout.unit_tokens > 130) & (touched < 300)).all()
        assert len(touched)
    assert stats.mean_bits == 8.0


def test_a_broken_part_serves_nobody_else(coded: Coded) -> None:
    case = coded(PREFIXES["one"])
    case.parts[0].broken = True
    with pytest.raises(PrefixUnreadable):
        load(case, 0, 5.0)


@pytest.mark.parametrize("token", [130, 192, 320, 699])
def test_a_part_that_is_cut_holds_what_it_held(token: int, coded: Coded) -> None:
    """Both pieces are raised as if each had been loaded by itself; a unit may be of both."""
    case = coded(PREFIXES["one"])
    load_all(case, 5.0)
    case.source.close()
    (part,) = case.parts
    assert part.load is not None and part.load[0].leave()
    rest = part.cut(token)
    assert (part.stop, rest.start, rest.stop) == (token, token, 700) and rest.loaded
    whole = case.spans[0]
    pieces = [dataclasses.replace(whole, start=own.start, stop=own.stop) for own in (part, rest)]
    source = case.open(pieces, in_slots=[True, True])
    PartLoad(source, [part, rest], pending=1)
    units = units_of([part, rest])
    for layer in range(SHAPE.num_layers):
        slots = case.layer_slots(layer)
        loader = PreciseLoader(SHAPE, ALLOCATIONS["query"])
        loader.load(layer, units, inputs(case, 6), slots, 7.0, LoadStats())
        tokens = torch.arange(700)
        held = torch.zeros(SHAPE.num_kv_heads, 700, dtype=torch.int64)
        for own in (part, rest):
            inside = tokens[own.start : own.stop]
            place = inside // own.layout.unit_tokens - own.units[0]
            held[:, inside] = torch.from_numpy(own.levels[layer]).long()[:, place]
        _, _, codes, _ = case._codes[layer]
        for side, own_codes in zip((slots.keys, slots.values), codes, strict=True):
            expected = restored(own_codes, held.T[..., None])
            assert (side.pool[case.slots] - expected).abs().max() <= 1e-4
    source.close()


def test_what_is_in_slots_is_not_read_ahead(coded: Coded) -> None:
    case = coded(PREFIXES["several"])
    load_all(case, 6.0)
    case.request(resident=True)
    case.read_ahead(0.5)
    case.source.close()
    assert case.source.stats.ahead_bytes == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_pieces_of_a_segment_are_read_into_one_image(ahead: bool, coded: Coded) -> None:
    """Memory does not grow with their number, and what two of them need is read once."""
    case = coded([CodedPart(1500)])
    (whole,) = case.spans
    places = [(0, 70), (70, 300), (310, 800), (800, 1500)]
    pieces = [dataclasses.replace(whole, start=start, stop=stop) for start, stop in places]
    source = case.open(pieces)
    if ahead:
        source.read_ahead(0.5)
    found = source.read_base(0)
    alone = case.open([whole])
    (base,) = alone.read_base(0)
    assert base is not None
    for (start, stop), own in zip(places, found, strict=True):
        assert own is not None
        assert torch.equal(own.groups, base.groups[start // 64 : -(-stop // 64)])
    assert source.layer_bytes == alone.layer_bytes
    assert case.pool.used_bytes == 2 * alone.layer_bytes
    source.close()
    alone.close()
    assert case.pool.used_bytes == 0
    assert source.stats.ssd_bytes == alone.stats.ssd_bytes


def test_a_load_brings_all_its_parts_whoever_comes_first(coded: Coded) -> None:
    """What was read does not last until the next request wants it."""
    case = coded(PREFIXES["several"])
    loader, everything = PreciseLoader(SHAPE, ALLOCATIONS["query"]), case.units
    alone = units_of(case.parts[-1:])
    for layer in range(SHAPE.num_layers):
        slots, stats = case.layer_slots(layer), [LoadStats(), LoadStats()]
        loader.restore(layer, alone, slots, stats[0])
        assert [part.layers_loaded for part in case.parts] == [layer + 1] * len(case.parts)
        case.check(layer)
        loader.restore(layer, everything, slots, stats[1])
        assert stats[0].base_bytes > 0 == stats[1].base_bytes


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
@with_and_without_floors
def test_the_next_base_is_restored_while_planes_are_read(
    prefix: list[CodedPart],
    floors: Floors | None,
    coded: Coded,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If it is there already; what is in the slots, and read, is the same either way."""
    case, usual = coded(prefix, floors=floors), coded(prefix, floors=floors)
    case.read_ahead(0.2)
    usual.read_ahead(0.2)
    loader, stats, others = PreciseLoader(SHAPE, ALLOCATIONS["query"]), LoadStats(), LoadStats()
    asked = calls_of(monkeypatch, CodedSource, "ask_units")
    last = SHAPE.num_layers - 1
    for layer in range(SHAPE.num_layers):
        given, slots = inputs(case, seed=layer), case.layer_slots(layer)
        following = case.layer_slots(layer + 1) if layer < last else None
        own = dataclasses.replace(given, following=following)
        loader.load(layer, case.units, own, slots, 5.0, stats)
        early = len(asked) > 0
        assert [part.layers_loaded for part in case.parts] == [
            min(layer + 1 + early, SHAPE.num_layers)
        ] * len(case.parts)
        case.source.end_layer(layer)
        loader.load(layer, usual.units, given, usual.layer_slots(layer), 5.0, others)
        usual.source.end_layer(layer)
        case.check(layer)
        assert torch.equal(case.levels(layer), usual.levels(layer))
        asked.clear()
    case.source.close()
    usual.source.close()
    for name in ("ssd_bytes", "ssd_needed_bytes", "ahead_used_bytes", "selected_chunks"):
        assert getattr(case.source.stats, name) == getattr(usual.source.stats, name), name
    assert stats.base_bytes == others.base_bytes and stats.planes == others.planes


@pytest.mark.parametrize("why", ["not read", "evicted", "not lasting"])
def test_a_base_that_would_be_waited_for_is_left_for_its_turn(why: str, coded: Coded) -> None:
    case = coded(PREFIXES["one"])
    if why != "not read":
        case.read_ahead(0.2)
    if why == "not lasting":
        case.parts[0].lasting = False
    loader = PreciseLoader(SHAPE, ALLOCATIONS["query"])
    for layer in range(SHAPE.num_layers):
        if why == "evicted" and layer + 1 < SHAPE.num_layers:
            (tenant,) = [
                own for own in case.pool._open.values() if own.owner == (case.source, layer + 1)
            ]
            tenant.evict()
        following = case.layer_slots(layer + 1) if layer + 1 < SHAPE.num_layers else None
        own = dataclasses.replace(inputs(case), following=following)
        loader.load(layer, case.units, own, case.layer_slots(layer), 5.0, LoadStats())
        assert case.parts[0].layers_loaded == layer + 1
        case.check(layer)


@pytest.mark.parametrize("how", ["given up", "broken"])
def test_slots_that_a_part_has_lost_are_not_written(how: str, coded: Coded) -> None:
    case = coded(PREFIXES["several"])
    gone, *others = case.parts
    if how == "given up":
        gone.load = None
    else:
        gone.broken = True
    units, slots = units_of(others), case.layer_slots(0)
    PreciseLoader(SHAPE, ALLOCATIONS["query"]).restore(0, units, slots, LoadStats())
    assert [part.layers_loaded for part in case.parts] == [0, 1, 1]
    for pool in (slots.keys.pool, slots.values.pool):
        assert (pool[gone.slots] == -77.0).all()
        assert not (pool[others[0].slots] == -77.0).any()


def test_buffers_are_given_back_when_the_last_request_is_done_with_a_layer(coded: Coded) -> None:
    case = coded(PREFIXES["one"])
    held, _ = case.parts[0].load or pytest.fail()
    held.pending = 3
    for layer in range(SHAPE.num_layers):
        load(case, layer, 5.0)
        held.end_layer(layer)
        assert case.pool.used_bytes == case.source.layer_bytes
        if layer == 0:
            assert not held.leave(), "one of them ended early"
        else:
            held.end_layer(layer)
    assert case.pool.used_bytes == 0
    assert case.source.layer == SHAPE.num_layers - 1


def test_requests_that_take_each_others_buffers_get_the_same_bits(coded: Coded) -> None:
    """With room for one layer of one of them; planes are wanted when the base is gone."""
    cases = [coded(PREFIXES["several"]) for _ in range(2)]
    pool = cases[0].pool
    pool.limit_bytes = cases[0].source.layer_bytes
    for case in cases:
        case.source.close()
        case.pool = pool
        case.request()
    loader = PreciseLoader(SHAPE, ALLOCATIONS["query"])
    for layer in range(SHAPE.num_layers):
        for case in cases:
            loader.restore(layer, case.units, case.layer_slots(layer), LoadStats())
            assert pool.held_bytes <= pool.limit_bytes
        for case in cases:
            given = inputs(case)
            loader.add_planes(layer, case.units, given, case.layer_slots(layer), 6.0, LoadStats())
            assert pool.held_bytes <= pool.limit_bytes
        for case in cases:
            case.check(layer)
            planes = case.levels(layer)
            assert int(planes.sum()) == planes_of(6.0, planes.numel())
    for case in cases:
        case.close()
    assert pool.used_bytes == 0
