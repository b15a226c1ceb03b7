"""Attention over keys in tiles, against attention over all of them at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from impress_sglang.attention.rectangular import rectangular_attention
from impress_sglang.attention.tiled import KEY_TILE, QUERY_TILE, tiled_attention, tiles_of
from tests.unit.test_rectangular import inputs


def cut(keys: Tensor, values: Tensor, sizes: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    assert sum(sizes) == len(keys)
    yield from zip(keys.split(list(sizes)), values.split(list(sizes)), strict=True)


def check(n: int, sizes: Sequence[int], heads: tuple[int, int] = (6, 2)) -> None:
    queries, keys, values = inputs(n, sum(sizes), *heads)
    expected = rectangular_attention(queries, keys, values, scaling=0.4, causal=True)

    places = np.arange(sum(sizes) - n, sum(sizes))
    found = tiled_attention(queries, cut(keys, values, sizes), positions=places, scaling=0.4)

    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert torch.allclose(found, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1), (1, 1)])
@pytest.mark.parametrize(
    ("n", "sizes"),
    [
        (1, [1]),
        (1, [9]),
        (1, [4, 4, 1]),
        (5, [5]),
        (5, [2, 3]),
        (5, [1, 1, 1, 1, 1, 1]),
        (7, [20, 7]),
        (7, [20, 3, 4]),
        (7, [17, 10]),
        (7, [24, 3]),
    ],
)
def test_tiles_of_any_size_and_place(n: int, sizes: list[int], heads: tuple[int, int]) -> None:
    check(n, sizes, heads)


@pytest.mark.parametrize("n", [QUERY_TILE - 1, QUERY_TILE, QUERY_TILE + 1, 2 * QUERY_TILE + 3])
@pytest.mark.parametrize("kv", [600, KEY_TILE, KEY_TILE + 1, 5000])
def test_boundaries_of_its_own_tiles(n: int, kv: int) -> None:
    check(n, [tile.stop - tile.start for tile in tiles_of(max(n, kv))])


@pytest.mark.parametrize("size", [1, 40, 256, 3000])
def test_queries_here_and_there(size: int) -> None:
    """Each sees what it would see among all queries."""
    queries, keys, values = inputs(3000, 3000, 4, 2)
    places = np.sort(np.random.default_rng(size).permutation(3000)[:size])
    expected = rectangular_attention(queries, keys, values, scaling=0.4, causal=True)[places]
    tiles = cut(keys, values, [1000, 700, 1300])

    found = tiled_attention(queries[places], tiles, positions=places, scaling=0.4)

    assert torch.allclose(found, expected, rtol=1e-5, atol=2e-6)


def test_tiles_cover_each_token_once() -> None:
    assert list(tiles_of(0)) == []
    assert list(tiles_of(5, 2)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert list(tiles_of(4, 2)) == [slice(0, 2), slice(2, 4)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_half_precision_is_rounded_once(dtype: torch.dtype, tolerance: float) -> None:
    """To half the last place of an output around 1, and no further from the exact result."""
    queries, keys, values = inputs(300, 3000, 6, 2, dtype)
    exact = rectangular_attention(
        queries.double(), keys.double(), values.double(), scaling=0.4, causal=True
    )

    sizes = [1024, 1024, 952]
    places = np.arange(2700, 3000)
    found = tiled_attention(queries, cut(keys, values, sizes), positions=places, scaling=0.4)

    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() <= tolerance * exact.abs().max()


@pytest.mark.parametrize("order", [1, -1])
def test_logits_of_any_size(order: int) -> None:
    """Growing or falling by hundreds from tile to tile: the running peak keeps them finite."""
    queries, keys, values = inputs(4, 40, 2, 2)
    keys = keys * torch.linspace(0.1, 200.0, 40)[::1, None, None]
    keys = keys.flip(0) if order < 0 else keys
    expected = rectangular_attention(queries, keys, values, scaling=2.0, causal=True)

    tiles, places = cut(keys, values, [7] * 5 + [5]), np.arange(36, 40)
    found = tiled_attention(queries, tiles, positions=places, scaling=2.0)

    assert expected.isfinite().all()
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_tile_is_let_go_before_the_next_is_made() -> None:
    queries, keys, values = inputs(3, 60, 2, 2)
    alive: list[weakref.ref[Tensor]] = []

    def tiles() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, 60, 20):
            assert not [ref for ref in alive if ref() is not None]
            tile = keys[start : start + 20].clone(), values[start : start + 20].clone()
            alive.extend(map(weakref.ref, tile))
            yield tile
            del tile

    tiled_attention(queries, tiles(), positions=np.arange(57, 60), scaling=1.0)
    assert len(alive) == 6


def test_keys_that_are_missing_are_our_bug() -> None:
    queries, keys, values = inputs(4, 10, 2, 2)
    with pytest.raises(AssertionError):
        tiled_attention(queries, [(keys, values)], positions=np.arange(7, 11), scaling=1.0)
