"""A prefix in codes: the bits that its slots get, what is read for that, and from where."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from impress_sglang.codes.planes.codec import NUM_PLANES
from impress_sglang.codes.planes.floors import Floors
from impress_sglang.errors import PrefixUnreadable
from impress_sglang.paper.loader import LayerInputs
from impress_sglang.tiers.placement import Tier
from tests.unit.coded_factory import BLOCK, SHAPE, CodedCase, CodedPart
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


def load(case: CodedCase, layer: int) -> Tensor:
    """Load a layer as the request under way does; checks slots, and gives the levels."""
    case.load(layer)
    case.check(layer)
    return case.levels(layer)


def load_all(case: CodedCase, planes: int) -> list[Tensor]:
    """The levels of all layers."""
    if planes != case.source.planes:
        case.request(planes)
    return [load(case, layer) for layer in range(case.shape.num_layers)]


@with_and_without_floors
@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("name", PREFIXES)
def test_slots_get_the_bits_that_were_asked_for(
    name: str, planes: int, floors: Floors | None, coded: Coded
) -> None:
    """On top of what belongs to the base, as far as there is room."""
    case = coded(PREFIXES[name], floors=floors)
    for layer, levels in enumerate(load_all(case, planes)):
        wanted = (least_planes(floors, layer) + planes).clamp_max(NUM_PLANES)
        assert torch.equal(levels, wanted.expand_as(levels))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pools_of_few_bits(dtype: torch.dtype, coded: Coded) -> None:
    shape = make_shape(layers=1, key_dim=64, value_dim=64, dtype=dtype, probe=(), coded=True)
    case = coded(PREFIXES["several"], shape=shape)
    case.request(1)
    load(case, 0)


@with_and_without_floors
def test_what_is_read_is_the_base_and_the_planes(floors: Floors | None, coded: Coded) -> None:
    case = coded(PREFIXES["one"], floors=floors)
    levels = load_all(case, 1)
    case.source.close()
    (span,) = case.spans
    count = sum(int(own.sum()) for own in levels)
    read = case.source.stats
    assert read.ssd_needed_bytes == span.layout.base_bytes * SHAPE.num_layers + count * BLOCK
    assert read.ssd_bytes >= read.ssd_needed_bytes
    assert read.selected_chunks == count


@pytest.mark.parametrize(("device_pages", "host_pages"), [(400, 0), (0, 400), (9, 13), (40, 60)])
def test_caches_give_what_the_drive_gave(device_pages: int, host_pages: int, coded: Coded) -> None:
    case = coded(PREFIXES["several"], device_pages=device_pages, host_pages=host_pages)
    assert case.cache is not None
    case.request(1)
    for _ in range(3):
        for layer in range(SHAPE.num_layers):
            load(case, layer)
            case.cache.check_integrity()
        case.source.close()
        stats = case.source.stats
        case.request(1)
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
        span.layout.base_bytes - int(span.spared_blocks(0).sum()) * BLOCK for span in case.spans
    )
    units = sum(int(own.sum()) for own in levels)
    assert stats.ahead_used_bytes == stats.ahead_bytes == SHAPE.num_layers * base + units * BLOCK
    assert stats.ahead_bytes == stats.ssd_bytes


@pytest.mark.parametrize("planes", PLANES)
def test_what_enters_a_cache_is_read_ahead_as_a_whole(planes: int, coded: Coded) -> None:
    """Else each layer would wait for the rest of its pages."""
    case = coded(PREFIXES["several"], host_pages=4000)
    assert any(span.spared_blocks(0).any() for span in case.spans)
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
    case.request(1)
    load(case, 0)
    with pytest.raises(PrefixUnreadable, match="checksum"):
        load(case, 1)


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
    assert base.planes is not None
    units = {tuple(unit): row for unit, row in zip(base.raised.tolist(), base.planes, strict=True)}
    for (start, stop), own in zip(places, found, strict=True):
        assert own.planes is not None
        assert torch.equal(own.groups, base.groups[start // 64 : -(-stop // 64)])
        for unit, row in zip(own.raised.tolist(), own.planes, strict=True):
            assert torch.equal(row, units[tuple(unit)])
    assert source.layer_bytes == alone.layer_bytes
    assert case.pool.used_bytes == 2 * alone.layer_bytes
    source.close()
    alone.close()
    assert case.pool.used_bytes == 0
    assert source.stats.ssd_bytes == alone.stats.ssd_bytes


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
            assert (load(case, layer) == 1).all()
            assert pool.held_bytes <= pool.limit_bytes
    for case in cases:
        case.close()
    assert pool.used_bytes == 0
