"""A part of a prefix from its codes: the tokens that are chosen, and what is read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from impress_sglang.errors import PrefixUnreadable
from impress_sglang.precision.codec import LEVELS, NUM_PLANES
from impress_sglang.precision.floors import Floors
from impress_sglang.precision.layout import CodeLayout
from impress_sglang.serving.paper.loading import SelectiveLoading
from impress_sglang.transfer.loader import LayerInputs, LoadStats
from impress_sglang.transfer.selective import SelectiveLoader
from impress_sglang.transfer.slots import LayerSlots
from tests.unit import dense
from tests.unit.coded_factory import (
    BLOCK,
    EMPTY,
    SHAPE,
    CodedCase,
    CodedPart,
    check_pool,
    levels_of_units,
)
from tests.unit.kv_factory import flip_byte
from tests.unit.test_coded import (
    PLANES,
    PREFIXES,
    Coded,
    inputs,
    with_and_without_floors,
)

CPU = torch.device("cpu")


class Request:
    """A request for k tokens of the prefix of a case: and its slots of a larger pool."""

    def __init__(self, case: CodedCase, k: int, planes: int = 0) -> None:
        assert case.cache is not None
        self.case, self.k = case, k
        case.source.close()
        case.cache.placement.advance()
        # Of which the case closes the latest.
        case.source = self.source = case.open(case.spans, planes)
        self.loader = SelectiveLoader(case.shape)
        self.loader.begin()
        self.stats = LoadStats()
        rows = torch.randperm(k + 7, generator=torch.Generator().manual_seed(k))[:k]
        pool = LayerSlots.fresh(k + 7, case.shape, CPU)
        self.slots = LayerSlots.of(pool.keys.pool, pool.values.pool, rows)

    def load(self, layer: int, given: LayerInputs) -> Tensor:
        """The tokens [G, k] that the layer uses."""
        for own in (self.slots.keys, self.slots.values):
            own.pool.fill_(EMPTY)
        return self.loader.load(layer, self.source, given, self.slots, self.stats)

    def planes(self, layer: int) -> Tensor:
        """Of all units [G, units]."""
        return levels_of_units(self.source, layer)

    def check_slots(self, layer: int, tokens: Tensor) -> None:
        """They hold each head's own tokens in their bits, and no others changed."""
        expected = self.case.expected(layer, self.planes(layer))
        rows = self.slots.keys.rows
        assert rows is not None
        for own, whole in zip((self.slots.keys, self.slots.values), expected, strict=True):
            right = torch.stack([whole[mine, head] for head, mine in enumerate(tokens)], 1)
            check_pool(own.pool, rows, right)


def importance(given: LayerInputs, prefix: Tensor) -> Tensor:
    """Column sums [G, m] of the attention weights, of all queries, in float64."""
    keys = prefix, given.resident_keys, given.new_keys
    found = dense.column_sums(given.queries, *keys, given.scaling)
    return torch.from_numpy(found).unflatten(0, (prefix.shape[1], -1)).sum(1)


def check_choice(tokens: Tensor, scores: Tensor) -> None:
    """Each head has its own best tokens, ascending; nearly equal ones may change places."""
    assert tokens.dtype == torch.int64 and tokens.device == CPU
    assert (tokens.diff() > 0).all()
    for mine, own in zip(tokens, scores, strict=True):
        left = torch.ones(len(own), dtype=torch.bool)
        left[mine] = False
        assert own[mine].min() >= own[left].max() * (1 - 1e-4)


@with_and_without_floors
@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("name", PREFIXES)
def test_each_head_gets_its_own_best_tokens(
    name: str, planes: int, floors: Floors | None, coded: Coded
) -> None:
    """By the keys as they are loaded, and in the bits that are wanted."""
    case = coded(PREFIXES[name], floors=floors)
    request = Request(case, -(-case.num_tokens // 4), planes)
    for layer in range(SHAPE.num_layers):
        given = inputs(case, seed=layer, new=25)
        tokens = request.load(layer, given)
        levels = request.planes(layer)
        assert int(levels.min()) >= planes
        check_choice(tokens, importance(given, case.expected(layer, levels)[0]))
        request.check_slots(layer, tokens)


def test_one_token_all_but_one_and_all(coded: Coded) -> None:
    """All are loaded into the slots at once."""
    for k in (1, 63, 64):
        case = coded([CodedPart(64)])
        request = Request(case, k)
        tokens = request.load(0, inputs(case))
        assert tokens.shape == (2, k)
        request.check_slots(0, tokens)
        assert request.stats.layers_whole == (k == 64)
        assert (request.loader._scratch is None) == (k == 64)


def test_what_is_read_is_counted(coded: Coded) -> None:
    """The base of all tokens, and planes; `mean_bits` is of all tokens that were loaded."""
    case = coded(PREFIXES["one"])
    request = Request(case, 20, 1)
    for layer in range(SHAPE.num_layers):
        request.load(layer, inputs(case))
    planes = torch.stack([request.planes(layer) for layer in range(SHAPE.num_layers)])
    request.source.close()
    (span,), stats, read = case.spans, request.stats, request.source.stats
    assert read.ssd_needed_bytes == span.layout.base_bytes * 3 + int(planes.sum()) * BLOCK
    assert stats.base_bytes == span.layout.num_groups * span.layout.group_bytes * 3
    assert (stats.layers_by_probe, stats.layers_whole, stats.layers_by_fallback) == (3, 0, 0)
    assert sum(stats.planes) == int(planes.sum()) and stats.units == planes.numel()
    assert stats.mean_bits == LEVELS[1]
    assert stats.probe_ms > 0 and stats.load_ms > 0


@pytest.mark.parametrize("what", ["base", "planes"])
def test_a_damaged_block_is_said(what: str, coded: Coded) -> None:
    case = coded(PREFIXES["several"])
    request = Request(case, 100, NUM_PLANES)
    request.load(0, inputs(case))
    segment = case.spans[2].segment
    layout = segment.layout
    (codes, *_) = layout.codes
    assert isinstance(codes, CodeLayout)
    offset = layout.codes_offset(1)
    if what == "planes":
        offset += codes.base_bytes
        for unit in range(codes.total_units):
            flip_byte(case.paths[2], offset + unit * codes.unit_stride)
    else:
        flip_byte(case.paths[2], offset)
    with pytest.raises(PrefixUnreadable) as caught:
        request.load(1, inputs(case))
    assert caught.value.segment_id == segment.segment_id


def test_memory_for_a_layer_is_let_go_with_the_last_request(coded: Coded) -> None:
    """Of two that are loaded layer by layer in turn, and of one that never began."""
    loader = SelectiveLoader(SHAPE)
    store: Any = SimpleNamespace(close_source=lambda source: source.close())
    loadings = []
    for tokens in (300, 500, 64):
        case = coded([CodedPart(tokens)])
        request = Request(case, 20)
        loadings.append((SelectiveLoading(loader, store, request.source), request.slots, case))
    (long, *_), (longer, *_), (unused, *_) = loadings
    for layer in range(SHAPE.num_layers):
        for loading, slots, case in loadings[:2]:
            loading.load(layer, inputs(case), slots, LoadStats())
    unused.close()
    longer.close()
    assert loader._scratch is not None and len(loader._scratch.keys.pool) == 500
    long.close()
    assert loader._scratch is None
