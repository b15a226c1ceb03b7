"""A prefix in host memory: it is given in tiles, and let go layer by layer."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from impress_sglang.transfer.memory import TILE_TOKENS, MemorySource
from impress_sglang.transfer.slots import Slots
from tests.unit.kv_factory import head_groups_of, make_shape, random_kvs
from tests.unit.reading import read_rows
from tests.unit.source_factory import SHAPES
from tests.unit.spying import calls_of


@pytest.mark.parametrize("name", ["gqa-float32", "no-probe-bfloat16"])
@pytest.mark.parametrize("m", [TILE_TOKENS - 1, TILE_TOKENS, 2 * TILE_TOKENS + 3])
def test_prefixes_of_several_tiles(name: str, m: int) -> None:
    shape = SHAPES[name]
    keys, values = random_kvs(shape, m, seed=1)
    others = list(shape.other_kv_heads)
    found = read_rows(MemorySource(shape, list(keys), list(values)), 1, None)
    assert found.keys is not None and torch.equal(found.keys, keys[1][:, others])
    assert found.values is not None and torch.equal(found.values, values[1])
    tokens = torch.arange(0, m, 1).expand(head_groups_of(shape), -1)[:, : m - 1]
    part = read_rows(MemorySource(shape, list(keys), list(values)), 1, tokens)
    assert part.values is not None and torch.equal(part.values, values[1][: m - 1])


def test_only_tiles_are_on_their_way_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = make_shape(probe=())
    keys, values = random_kvs(shape, 3 * TILE_TOKENS + 5, seed=1)
    puts = calls_of(monkeypatch, Slots, "put")
    read_rows(MemorySource(shape, list(keys), list(values)), 0, None)
    sizes = [len(rows) for (_, rows), _ in puts]
    assert sorted(set(sizes)) == [5, TILE_TOKENS] and sum(sizes) == 2 * keys.shape[1]


def test_a_layer_is_let_go_when_the_next_one_is_read() -> None:
    shape = make_shape(layers=3)
    keys, values = ([own.clone() for own in kvs] for kvs in random_kvs(shape, 9, seed=1))
    alive: list[Any] = [weakref.ref(own) for own in (*keys, *values)]
    source = MemorySource(shape, keys, values)
    del keys, values
    for layer in range(3):
        source.read_probe(layer)
        read_rows(source, layer, None)
        living = [ref() is not None for ref in alive]
        assert living == 2 * ([False] * layer + [True] * (3 - layer))
    with pytest.raises(AssertionError):
        source.read_probe(1)


def test_first_layers_may_be_missing() -> None:
    shape = make_shape(layers=3)
    keys, values = random_kvs(shape, 9, seed=1)
    source = MemorySource(shape, [None, *keys[1:]], [None, *values[1:]])
    assert source.num_tokens == 9
    found = read_rows(source, 1, None).values
    assert found is not None and torch.equal(found, values[1])
    with pytest.raises(AssertionError):
        source.read_probe(0)


@pytest.mark.parametrize("rows", [None, torch.tensor([5, 2, 7])])
def test_slots_are_cleared_and_no_others(rows: Tensor | None) -> None:
    pool = torch.full((9, 2, 3), float("nan"))
    Slots.of(pool, rows).clear()
    cleared = set(range(9)) if rows is None else {2, 5, 7}
    assert {i for i in range(9) if bool((pool[i] == 0).all())} == cleared
