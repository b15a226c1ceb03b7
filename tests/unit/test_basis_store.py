"""A store with a basis: what is stored by it, and what loads bring into slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from impress_sglang.codes.coding import Rows
from impress_sglang.codes.groups.energy import QueryMeter
from impress_sglang.codes.rows.coder import encode_layer, kvs_of
from impress_sglang.codes.rows.fit import SINK_TOKENS
from impress_sglang.errors import ConfigError, PrefixUnreadable
from impress_sglang.serving.kv_class import KVClass
from impress_sglang.serving.load_jobs import JobState, LoadJob
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import BLOCK_BYTES, KVShape
from impress_sglang.storage.segment import read_header
from impress_sglang.storage.writer import LayerReader
from impress_sglang.store.writing import StoreOutcome
from impress_sglang.transfer.basis_codec import MAX_MISFIT, BasisCodec, is_misfit, shape_by
from impress_sglang.transfer.sources import Piece
from tests.unit import kv_factory as kv
from tests.unit import store_factory as stores
from tests.unit.codes_factory import codec_for, decode_layer
from tests.unit.load_desk import Desk, Make, desks_in
from tests.unit.store_factory import look_up, prompt

PLAIN = kv.make_shape(
    layers=3, query_heads=4, kv_heads=2, key_dim=16, value_dim=8, probe=(), coded=True
)
CODEC = codec_for(PLAIN)
SHAPE = shape_by(CODEC.basis, PLAIN)
# Of --impress-keep codes.
ALONE = dataclasses.replace(SHAPE, exact=False)
FEW = KVClass(SHAPE.code_bits)
NUM_SLOTS = 4000
FIRST = prompt(1, 90)
SECOND = (*FIRST, *prompt(2, 80))
LONG = prompt(3, 1700)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from desks_in(tmp_path, shape=SHAPE, codec=CODEC, num_slots=NUM_SLOTS)


def load(desk: Desk, tokens: Sequence[int], kv_class: KVClass = FEW, start: int = 0) -> LoadJob:
    """Into pools that are empty."""
    desk.empty()
    return desk.load(tokens, kv_class, start)


def rows_of(desk: Desk, job: LoadJob) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of a job's tokens in each layer; nothing else was touched."""
    assert job.state is JobState.LOADED and job.target_slots is not None
    assert desk.pools.empty(desk.free)
    for layer in range(SHAPE.num_layers):
        keys, values = desk.pools(layer)
        yield keys[job.target_slots], values[job.target_slots]


def offer(desk: Desk, tokens: Sequence[int], **options: Any) -> None:
    """What may not be stored in the end."""
    desk.bench.offer(desk.store, tokens, **options)
    desk.store.writes.drain()


def exact(tokens: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    kvs = kv.SequenceKVs(SHAPE, "", tuple(tokens))
    return [(kvs.keys(layer), kvs.values(layer)) for layer in range(SHAPE.num_layers)]


def expected(tokens: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """What the tokens are restored to, by the oracle, however they are cut into segments."""
    places, none = torch.arange(len(tokens)), torch.zeros(len(tokens), dtype=torch.int64)
    basis, rotation, below = CODEC.basis, CODEC.rotation, None
    for layer, kvs in enumerate(exact(tokens)):
        unturned = rotation.move(kvs[0], rotation.factors(places, none)), kvs[1]
        below = decode_layer(basis, layer, below, encode_layer(basis, layer, below, unturned)[0])
        keys, values = kvs_of(basis, layer, below)
        restored = rotation.move(keys, rotation.factors(none, places)), values
        for rounded, whole in zip(restored, kvs, strict=True):
            rounded[:SINK_TOKENS] = whole[:SINK_TOKENS]
        yield restored


def check(desk: Desk, tokens: Sequence[int], start: int = 0) -> LoadJob:
    """A load gives this, but for few codes that rounding has moved to a neighbour."""
    job = load(desk, tokens, start=start)
    for of_layer, other in zip(rows_of(desk, job), expected(tokens), strict=True):
        for rows, right in zip(of_layer, other, strict=True):
            scale = right.abs().max()
            assert ((rows - right[start:]).abs() > 0.02 * scale).float().mean() < 0.01
    return job


@pytest.mark.parametrize("shape", [SHAPE, ALONE])
@pytest.mark.parametrize("caches", [{}, {"host_gb": 2e-5}, {"host_gb": 2e-3, "device_gb": 2e-5}])
def test_slots_get_what_the_basis_says(
    make: Make, caches: dict[str, float], shape: KVShape
) -> None:
    """Of one or more segments, from any token on, again and again."""
    desk = make(shape=shape, **caches)
    desk.put(FIRST, SECOND, LONG)
    for _ in range(2):
        for tokens, start in ((FIRST, 0), (SECOND, 0), (SECOND, 3), (SECOND, 95), (LONG, 1201)):
            assert check(desk, tokens, start).bits == 4.0


@pytest.mark.parametrize(
    ("bits", "kv_class"), [(5.0, FEW), (6.0, FEW), ("auto", FEW), ("exact", KVClass())]
)
def test_caches_hold_exact_kvs_and_codes(make: Make, bits: float | str, kv_class: KVClass) -> None:
    desk = make(bits=bits, host_gb=2e-2)
    desk.put(SECOND)
    assert load(desk, SECOND, kv_class).read_stats.ssd_bytes
    assert not load(desk, SECOND, kv_class).read_stats.ssd_bytes


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_damaged_row_is_found(make: Make, place: str) -> None:
    desk = make()
    desk.put(LONG)
    (path,) = desk.bench.root.rglob("*.kv")
    layout = read_header(path, FileSystem()).info.layout()
    page = layout.codes[-1].page_bytes if place == "last" else 0
    kv.flip_byte(path, layout.place(SHAPE.num_layers - 1, codes=True)[0] + page + 7)
    job = load(desk, LONG)
    assert job.state is JobState.FAILED and isinstance(job.error, PrefixUnreadable)
    stores.look_again(desk.store)


def louder(
    factor: float, layer: int, tokens: Sequence[int] = FIRST
) -> Callable[[int], LayerReader]:
    """KVs as usual but for one layer."""

    def read_from(start: int) -> LayerReader:
        usual = kv.SequenceKVs(SHAPE, "", tuple(tokens)).read_from(start)

        def read(number: int) -> tuple[Tensor, Tensor]:
            keys, values = usual(number)
            return (keys * factor, values * factor) if number == layer else (keys, values)

        return read

    return read_from


@pytest.mark.parametrize(
    ("fits", "misfit"),
    [
        ([], False),
        ([1.0, 5.0, 3.0], False),
        ([4.0, 4.0, 2.0], True),
        ([16.0, *[1.0] * 9], False),
        ([17.0, *[1.0] * 9], True),
    ],
    ids=["no codes", "near", "all of a foreign language", "near in each layer", "far in one"],
)
def test_layers_misfit_on_average_or_in_one(fits: list[float], misfit: bool) -> None:
    assert is_misfit(np.array(fits, np.float32)) == misfit


@pytest.mark.parametrize("layer", range(SHAPE.num_layers))
def test_what_is_unlike_the_calibration_is_loaded_exactly(make: Make, layer: int) -> None:
    desk = make()
    offer(desk, FIRST, read_layers=louder(6.0, layer))
    (path,) = desk.bench.root.rglob("*.kv")
    fits = read_header(path, FileSystem()).fits
    assert fits.argmax() == layer and fits[layer] > MAX_MISFIT
    assert (np.delete(fits, [layer, min(layer + 1, 2)]) < 1.5).all()
    job = load(desk, FIRST)
    for kvs, right in zip([*rows_of(desk, job)][layer], exact(FIRST)[layer], strict=True):
        assert torch.equal(kvs, right * 6.0)
    assert job.bits == 16.0


@pytest.mark.parametrize("layer", range(SHAPE.num_layers))
def test_what_is_unlike_the_calibration_is_not_stored_as_codes_alone(
    make: Make, layer: int
) -> None:
    """Nor is it tried again, but what only begins like it is."""
    desk = make(shape=ALONE)
    unlike = louder(6.0, layer, LONG)
    offer(desk, LONG, read_layers=unlike)
    assert not look_up(desk.store, LONG).num_tokens and desk.store.stats.segments_failed == 1
    assert desk.bench.offer(desk.store, LONG, read_layers=unlike) is StoreOutcome.NOT_CODABLE
    for other in (LONG[:1400], (*LONG[:1400], *prompt(4, 100))):
        desk.put(other)
        check(desk, other)


def test_codes_alone_take_the_bytes_of_rows(make: Make) -> None:
    desk = make(shape=ALONE)
    desk.put(LONG)
    (path,) = desk.bench.root.rglob("*.kv")
    sizes = read_header(path, FileSystem()).info.layout()
    assert sizes.columns.num_bytes == 0
    assert path.stat().st_size < 1.1 * sum(part.num_bytes for part in sizes.codes) + 3 * BLOCK_BYTES


def test_a_basis_for_another_shape_is_refused() -> None:
    for other in (
        dataclasses.replace(PLAIN, num_layers=2),
        dataclasses.replace(PLAIN, num_kv_heads=4),
        dataclasses.replace(PLAIN, value_dim=16),
    ):
        with pytest.raises(ConfigError, match="impress calibrate"):
            shape_by(CODEC.basis, other)


def test_kvs_that_are_stored_behind_their_positions_are_turned_from_these() -> None:
    """Where drafts stand beside, what is stored of a token are the KVs of the one before."""
    tokens, beside = prompt(7, 200), BasisCodec(CODEC.basis, CODEC.rotation, draft_offset=1)
    rules = (
        CODEC.layer_encoder(0, QueryMeter().energy),
        beside.layer_encoder(0, QueryMeter().energy),
    )
    states: list[Any] = [None, None]
    for layer, kvs in enumerate(exact(tokens)):
        twice = [torch.cat([part[:1], part]) for part in kvs]
        rows = rules[0](layer, *kvs).groups, rules[1](layer, *twice).groups[1:]
        assert torch.equal(*rows)
        pools = [[torch.zeros_like(part) for part in kvs] for _ in rows]
        for number, codec in enumerate((CODEC, beside)):
            pieces = [Piece([rows[number]], number, number, len(tokens))]
            into = Rows(pools[number][0], pools[number][1], torch.arange(len(tokens)))
            states[number] = codec.restore(layer, pieces, into, states[number])
        assert all(torch.equal(*both) and both[0].any() for both in zip(*pools, strict=True))
