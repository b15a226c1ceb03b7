"""A prefix in codes: the bits that its slots get, what is read for that, and from where."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from impress_sglang.errors import PrefixUnreadable
from impress_sglang.precision.codec import BASE_BITS, LEVELS, NUM_PLANES, PLANE_BITS
from impress_sglang.precision.floors import Floors
from impress_sglang.tiers.placement import Tier
from impress_sglang.transfer.coded_loader import CodedLoader
from impress_sglang.transfer.loader import LayerInputs, LoadStats
from impress_sglang.transfer.resident import PartLoad, PartUse
from tests.unit.coded_factory import (
    BLOCK,
    SHAPE,
    CodedCase,
    CodedPart,
    in_slots,
    restored,
    uses_of,
)
from tests.unit.kv_factory import flip_byte, make_shape

Coded = Callable[..., CodedCase]
PREFIXES = {
    "one": [CodedPart(700)],
    "short": [CodedPart(3)],
    "inside": [CodedPart(1500, 70, 1337)],
    "several": [CodedPart(300, 17), CodedPart(64), CodedPart(900, 0, 555)],
}
PLANES = range(NUM_PLANES + 1)
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


def load(case: CodedCase, layer: int, planes: int, stats: LoadStats | None = None) -> Tensor:
    """Load a layer as the request under way does; checks slots, and gives the levels."""
    if not layer and planes > case.source.planes:
        case.source.want(planes)
    CodedLoader().load(layer, case.uses, planes, case.layer_slots(layer), stats or LoadStats())
    case.check(layer)
    return case.levels(layer)


def load_all(case: CodedCase, planes: int, stats: LoadStats | None = None) -> list[Tensor]:
    """The levels of all layers."""
    return [load(case, layer, planes, stats) for layer in range(case.shape.num_layers)]


@with_and_without_floors
@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("name", PREFIXES)
def test_slots_get_the_bits_that_were_asked_for(
    name: str, planes: int, floors: Floors | None, coded: Coded
) -> None:
    """On top of what belongs to the base, as far as there is room."""
    case, stats = coded(PREFIXES[name], floors=floors), LoadStats()
    for layer, levels in enumerate(load_all(case, planes, stats)):
        wanted = (least_planes(floors, layer) + planes).clamp_max(NUM_PLANES)
        assert torch.equal(levels, wanted.expand_as(levels))
    if floors is None:
        assert stats.mean_bits == LEVELS[planes]
    else:
        assert stats.mean_bits >= LEVELS[planes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pools_of_few_bits(dtype: torch.dtype, coded: Coded) -> None:
    shape = make_shape(layers=1, key_dim=64, value_dim=64, dtype=dtype, probe=(), coded=True)
    case = coded(PREFIXES["several"], shape=shape)
    load(case, 0, 1)


@with_and_without_floors
def test_what_is_read_is_the_base_and_the_planes(floors: Floors | None, coded: Coded) -> None:
    case, stats = coded(PREFIXES["one"], floors=floors), LoadStats()
    levels = load_all(case, 1, stats)
    case.source.close()
    (span,) = case.spans
    count = sum(int(own.sum()) for own in levels)
    read = case.source.stats
    assert read.ssd_needed_bytes == span.layout.base_bytes * SHAPE.num_layers + count * BLOCK
    assert read.ssd_bytes >= read.ssd_needed_bytes
    assert read.selected_chunks == count
    assert stats.base_bytes == span.layout.num_groups * span.layout.group_bytes * SHAPE.num_layers
    assert sum(stats.planes) == count
    assert stats.units == sum(own.numel() for own in levels)
    assert stats.mean_bits == BASE_BITS + PLANE_BITS * count / stats.units


@pytest.mark.parametrize(("device_pages", "host_pages"), [(400, 0), (0, 400), (9, 13), (40, 60)])
def test_caches_give_what_the_drive_gave(device_pages: int, host_pages: int, coded: Coded) -> None:
    case = coded(PREFIXES["several"], device_pages=device_pages, host_pages=host_pages)
    assert case.cache is not None
    for _ in range(3):
        for layer in range(SHAPE.num_layers):
            load(case, layer, 1)
            case.cache.check_integrity()
        case.source.close()
        stats = case.source.stats
        case.request()
    if device_pages + host_pages == 400:
        assert stats.ssd_bytes == 0 and stats.ssd_chunks == 0
    assert stats.device_chunks + stats.host_chunks > 0


@with_and_without_floors
@pytest.mark.parametrize("planes", PLANES)
def test_all_that_is_wanted_is_read_ahead(planes: int, floors: Floors | None, coded: Coded) -> None:
    case = coded(PREFIXES["several"], floors=floors)
    case.request(planes)
    case.read_ahead(0.5)
    levels = load_all(case, planes)
    case.source.close()
    stats = case.source.stats
    base = sum(
        span.layout.base_bytes - int(span.spared_blocks.sum()) * BLOCK for span in case.spans
    )
    units = sum(int(own.sum()) for own in levels)
    assert stats.ahead_used_bytes == stats.ahead_bytes == SHAPE.num_layers * base + units * BLOCK
    assert stats.ahead_bytes == stats.ssd_bytes


@pytest.mark.parametrize("planes", PLANES)
def test_what_enters_a_cache_is_read_ahead_as_a_whole(planes: int, coded: Coded) -> None:
    """Else each layer would wait for the rest of its pages."""
    case = coded(PREFIXES["several"], host_pages=4000)
    assert any(span.spared_blocks.any() for span in case.spans)
    case.request(planes)
    case.read_ahead(0.5)
    load_all(case, planes)
    case.source.close()
    stats = case.source.stats
    assert stats.ahead_used_bytes == stats.ahead_bytes == stats.ssd_bytes
    assert case.cache is not None
    assert stats.ssd_bytes == case.cache.placement.used_pages(Tier.HOST) * BLOCK


@pytest.mark.parametrize("where", ["base", "plane"])
def test_a_damaged_block_is_found(where: str, coded: Coded) -> None:
    case = coded(PREFIXES["one"])
    segment, layout = case.spans[0].segment, case.spans[0].layout
    offset = segment.layout.codes_offset(1)
    flip_byte(case.paths[0], offset + (5 if where == "base" else layout.base_bytes + 5))
    load(case, 0, 1)
    with pytest.raises(PrefixUnreadable, match="checksum"):
        load(case, 1, 1)


@with_and_without_floors
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("planes", PLANES[1:])
def test_a_resident_prefix_is_raised_by_what_it_lacks(
    planes: int, ahead: bool, floors: Floors | None, coded: Coded
) -> None:
    case = coded(PREFIXES["several"], floors=floors)
    before = load_all(case, planes - 1)
    case.request(planes, resident=True)
    if ahead:
        case.read_ahead(0.5)
    stats = LoadStats()
    after = load_all(case, planes, stats)
    case.source.close()
    assert stats.base_bytes == 0
    raised = sum(int((b - a).sum()) for a, b in zip(before, after, strict=True))
    assert raised > 0
    assert case.source.stats.ssd_needed_bytes == raised * BLOCK
    assert bool(case.source.stats.ahead_bytes) == ahead
    case.request(planes, resident=True)
    load_all(case, planes)
    assert case.source.stats.ssd_needed_bytes == 0


def test_two_requests_of_a_pass_read_a_prefix_once(coded: Coded) -> None:
    """Also if they want different bits: all is there for both."""
    case = coded(PREFIXES["one"])
    case.source.want(2)
    for layer in range(SHAPE.num_layers):
        for planes in (1, 2, 0):
            assert (load(case, layer, planes) == 2).all()
    case.source.close()
    planes = sum(int(case.levels(layer).sum()) for layer in range(SHAPE.num_layers))
    base = case.spans[0].layout.base_bytes * SHAPE.num_layers
    assert case.source.stats.ssd_needed_bytes == base + planes * BLOCK


def test_a_source_that_has_begun_wants_no_more(coded: Coded) -> None:
    case = coded(PREFIXES["one"])
    load(case, 0, 1)
    with pytest.raises(AssertionError):
        case.source.want(2)


def test_a_request_for_a_part_of_a_part_raises_all_of_it(coded: Coded) -> None:
    case = coded(PREFIXES["one"])
    load_all(case, 0)
    case.request(2, resident=True)
    (part,) = case.parts
    stats = LoadStats()
    for layer in range(SHAPE.num_layers):
        uses = [PartUse(part, 130, 300)]
        CodedLoader().load(layer, uses, 2, case.layer_slots(layer), stats)
        case.check(layer)
        assert (case.levels(layer) == 2).all()
    assert stats.mean_bits == LEVELS[2]
    assert part.has(2) and not part.has(3)


def test_bits_are_counted_of_what_is_used(coded: Coded) -> None:
    """And not of what else is in the same parts."""
    case, stats = coded([CodedPart(64), CodedPart(1500)]), LoadStats()
    load_all(case, 0)
    first, second = case.parts
    second.planes[:] = 2
    for layer in range(SHAPE.num_layers):
        uses = [PartUse(first, 0, 64), PartUse(second, 0, 10)]
        CodedLoader().load(layer, uses, 0, case.layer_slots(layer), stats)
    assert stats.mean_bits == (LEVELS[0] + LEVELS[2]) / 2


def test_a_broken_part_serves_nobody_else(coded: Coded) -> None:
    case = coded(PREFIXES["one"])
    case.parts[0].broken = True
    with pytest.raises(PrefixUnreadable):
        load(case, 0, 1)


@pytest.mark.parametrize("token", [130, 192, 320, 699])
def test_a_part_that_is_cut_holds_what_it_held(token: int, coded: Coded) -> None:
    """Both pieces are raised as if each had been loaded by itself; a unit may be of both."""
    case = coded(PREFIXES["one"])
    load_all(case, 1)
    case.source.close()
    (part,) = case.parts
    assert part.load is not None and part.load[0].leave()
    rest = part.cut(token)
    assert (part.stop, rest.start, rest.stop) == (token, token, 700) and rest.has(1)
    whole, pieces = case.spans[0], [part, rest]
    spans = [dataclasses.replace(whole, start=own.start, stop=own.stop) for own in pieces]
    source = case.open(spans, 2, in_slots(pieces))
    PartLoad(source, pieces, pending=1)
    for layer in range(SHAPE.num_layers):
        # The second is not wanted in more bits, but loaded with the first.
        CodedLoader().load(layer, uses_of([part]), 2, case.layer_slots(layer), LoadStats())
        _, _, codes, _ = case._codes[layer]
        slots = case.layer_slots(layer)
        for side, own_codes in zip((slots.keys, slots.values), codes, strict=True):
            expected = restored(own_codes, torch.full((700, 1, 1), 2))
            assert (side.pool[case.slots] - expected).abs().max() <= 1e-4
    assert part.has(2) and rest.has(2)
    source.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_pieces_of_a_segment_are_read_into_one_image(ahead: bool, coded: Coded) -> None:
    """Memory does not grow with their number, and what two of them need is read once."""
    case = coded([CodedPart(1500)])
    (whole,) = case.spans
    places = [(0, 70), (70, 300), (310, 800), (800, 1500)]
    pieces = [dataclasses.replace(whole, start=start, stop=stop) for start, stop in places]
    source = case.open(pieces, 1)
    if ahead:
        source.read_ahead(0.5)
    found = source.read(0)
    alone = case.open([whole], 1)
    (base,) = alone.read(0)
    assert base.groups is not None and base.planes is not None
    units = {tuple(unit): row for unit, row in zip(base.raised.tolist(), base.planes, strict=True)}
    for (start, stop), own in zip(places, found, strict=True):
        assert own.groups is not None and own.planes is not None
        assert torch.equal(own.groups, base.groups[start // 64 : -(-stop // 64)])
        for unit, row in zip(own.raised.tolist(), own.planes, strict=True):
            assert torch.equal(row, units[tuple(unit)])
    assert source.layer_bytes == alone.layer_bytes
    assert case.pool.used_bytes == 2 * alone.layer_bytes
    source.close()
    alone.close()
    assert case.pool.used_bytes == 0
    assert source.stats.ssd_bytes == alone.stats.ssd_bytes


def test_a_load_brings_all_its_parts_whoever_comes_first(coded: Coded) -> None:
    """What was read does not last until the next request wants it."""
    case = coded(PREFIXES["several"])
    loader, alone = CodedLoader(), uses_of(case.parts[-1:])
    for layer in range(SHAPE.num_layers):
        slots, stats = case.layer_slots(layer), [LoadStats(), LoadStats()]
        loader.load(layer, alone, 0, slots, stats[0])
        assert [part.layers_loaded for part in case.parts] == [layer + 1] * len(case.parts)
        case.check(layer)
        loader.load(layer, case.uses, 0, slots, stats[1])
        assert stats[0].base_bytes > 0 == stats[1].base_bytes


@pytest.mark.parametrize("how", ["given up", "broken"])
def test_slots_that_a_part_has_lost_are_not_written(how: str, coded: Coded) -> None:
    case = coded(PREFIXES["several"])
    gone, *others = case.parts
    if how == "given up":
        gone.load = None
    else:
        gone.broken = True
    slots = case.layer_slots(0)
    CodedLoader().load(0, uses_of(others), 0, slots, LoadStats())
    assert [part.layers_loaded for part in case.parts] == [0, 1, 1]
    for pool in (slots.keys.pool, slots.values.pool):
        assert (pool[gone.slots] == -77.0).all()
        assert not (pool[others[0].slots] == -77.0).any()


def test_buffers_are_given_back_when_the_last_request_is_done_with_a_layer(coded: Coded) -> None:
    case = coded(PREFIXES["one"])
    held, _ = case.parts[0].load or pytest.fail()
    held.pending = 3
    for layer in range(SHAPE.num_layers):
        load(case, layer, 1)
        held.end_layer(layer)
        assert case.pool.used_bytes == case.source.layer_bytes
        if layer == 0:
            assert not held.leave(), "one of them ended early"
        else:
            held.end_layer(layer)
    assert case.pool.used_bytes == 0
    assert case.source.layer == SHAPE.num_layers - 1


def test_requests_that_take_each_others_buffers_get_the_same_bits(coded: Coded) -> None:
    """With room for one layer of one of them."""
    cases = [coded(PREFIXES["several"]) for _ in range(2)]
    pool = cases[0].pool
    pool.limit_bytes = cases[0].source.layer_bytes
    for case in cases:
        case.source.close()
        case.pool = pool
        case.request(1)
    for layer in range(SHAPE.num_layers):
        for case in cases:
            assert (load(case, layer, 1) == 1).all()
            assert pool.held_bytes <= pool.limit_bytes
    for case in cases:
        case.close()
    assert pool.used_bytes == 0
