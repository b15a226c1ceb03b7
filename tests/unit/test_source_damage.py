"""Damaged, short and missing segments: never wrong rows, and nothing of them in a cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from impress_sglang.errors import SegmentUnreadable
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.reader import BlockReader
from impress_sglang.tiers.placement import Tier
from impress_sglang.transfer.buffers import BufferPool
from impress_sglang.transfer.source import ReadNeeds, SegmentSource
from tests.unit import kv_factory as kv
from tests.unit import source_factory as sources
from tests.unit.reading import read_rows


@pytest.fixture(scope="module", params=["auto", "threads"])
def any_reader(request: pytest.FixtureRequest) -> Iterator[BlockReader]:
    with sources.reading(3, request.param) as reader:
        yield reader


@pytest.fixture(
    params=[
        f"{name}, reordered: {shape}"
        for name in sources.CACHES
        if name.startswith("room")
        for shape in ("cut-rows-float32", "no-probe-cut-rows")
    ]
)
def roomy(
    request: pytest.FixtureRequest, reader: BlockReader, tmp_path: Path
) -> Iterator[sources.Case]:
    """Nothing cached yet, and room for all."""
    case = sources.opened(f"several-segments, {request.param}", tmp_path, reader)
    yield case
    case.close()


def kind_of(case: sources.Case, column: int) -> str:
    if column == kv.PROBE:
        return "probe"
    return "values" if kv.holds_values(case.shape, column) else "keys"


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_flipped_byte_in_any_chunk_is_found_and_only_there(
    several: sources.Case, place: str
) -> None:
    """The first or the last byte of each chunk of a segment, one after the other."""
    case, found = several, 0
    part, path, head_groups = case.parts[1], case.paths[1], kv.head_groups_of(case.shape)
    every = sources.same_tokens(case, range(case.num_tokens))
    for layer, column, chunk, offset in list(sources.all_chunks(case.shape, part, path)):
        total = part.num_tokens
        length = min(part.chunk_tokens, total - chunk * part.chunk_tokens)
        length *= kv.row_size(case.shape, column)
        bad = offset if place == "first" else offset + length - 1
        rows = case.rows(layer, column, every)
        # Each chunk is one block here.
        inside = [t for t, (n, row) in enumerate(rows) if n == 1 and row // 8 == chunk]
        outside = [t for t in range(case.num_tokens) if t not in inside]

        kv.flip_byte(path, bad)
        if not inside:
            case.check(layer)
            kv.flip_byte(path, bad)
            continue
        found += 1
        kind = kind_of(case, column)

        # The other head groups of such a read want good rows.
        head_group = 0 if column == kv.PROBE else kv.head_group_of(case.shape, column)
        one = torch.tensor([[inside[0] if n == head_group else 0] for n in range(head_groups)])
        for tokens in (None, one):
            case.request()
            with pytest.raises(SegmentUnreadable) as caught:
                case.read(layer, [kind], tokens)
            assert caught.value.segment_id == "segment1"
            assert f"block at {offset} " in str(caught.value)
        for other in ("probe", "keys", "values"):
            if other != kind and place == "first":
                case.check(layer, [other])
        if kind != "probe":
            others = every[:, : len(outside)].clone()
            others[head_group] = torch.tensor(outside)
            case.check(layer, [kind], others)
        if chunk == 0:
            case.check(1 - layer)
        kv.flip_byte(path, bad)
    assert found > 20, "nearly every chunk of the segment has tokens of the request"
    sources.check_everything(case)


@pytest.fixture(
    params=[
        "in order: cut-rows-float32",
        "reordered: cut-rows-float32",
        "reordered: no-probe-cut-rows",
    ]
)
def blocks_of_rows(
    request: pytest.FixtureRequest, reader: BlockReader, tmp_path: Path, no_gaps: None
) -> Iterator[sources.Case]:
    """Chunks of several blocks, whose ends cut through rows."""
    order, shape = request.param.split(": ")
    parts = [sources.Part(16, 8, 0, 16), sources.Part(30, 8, 3, 30)]
    case = sources.open_case(
        tmp_path, sources.SHAPES[shape], parts, reader, reordered=order == "reordered"
    )
    yield case
    case.close()


def test_a_flipped_byte_hurts_the_rows_of_its_block_alone(blocks_of_rows: sources.Case) -> None:
    case, head_groups = blocks_of_rows, kv.head_groups_of(blocks_of_rows.shape)
    places = [p for p in sources.all_chunks(case.shape, case.parts[1], case.paths[1]) if p[0] == 1]
    for layer, column, chunk, offset in places:
        if column == kv.PROBE:
            continue  # it is always read whole
        kind, head_group = kind_of(case, column), kv.head_group_of(case.shape, column)
        touched_by = [
            case.blocks(layer, column, sources.same_tokens(case, [token]))
            for token in range(case.num_tokens)
        ]
        for block in range(kv.row_size(case.shape, column) * 8 // sources.BLOCK):
            bad = (1, chunk, block)
            touching = [token for token, blocks in enumerate(touched_by) if bad in blocks]
            others = [t for t in range(case.num_tokens) if t not in touching]
            kv.flip_byte(case.paths[1], offset + block * sources.BLOCK + 1000)

            tokens = sources.same_tokens(case, range(len(others))).clone()
            tokens[head_group] = torch.tensor(others)
            case.check(layer, [kind], tokens)
            for token in touching:
                case.request()
                one = torch.tensor([[token if n == head_group else 0] for n in range(head_groups)])
                with pytest.raises(
                    SegmentUnreadable, match=f"block at {offset + block * sources.BLOCK} "
                ):
                    case.read(layer, [kind], one)

            kv.flip_byte(case.paths[1], offset + block * sources.BLOCK + 1000)
    sources.check_everything(case)


def test_nothing_is_cached_of_an_access_that_failed(roomy: sources.Case) -> None:
    """Not even its good chunks, and not the good blocks of the bad one."""
    assert roomy.cache is not None
    placement = roomy.cache.placement
    path = roomy.paths[1]
    offset = next(
        offset
        for layer, column, _, offset in sources.all_chunks(roomy.shape, roomy.parts[1], path)
        if layer == 0 and column == roomy.columns[-1]
    )
    roomy.check(1)
    before = {tier: placement.cached_chunks(tier) for tier in (Tier.HOST, Tier.DEVICE)}
    assert sum(before.values()) > 0

    kv.flip_byte(path, offset)
    for _ in range(2):
        roomy.request()
        with pytest.raises(SegmentUnreadable):
            roomy.read(0, sources.KVS)
        roomy.cache.check_integrity()
        # What made room for the access went with it.
        assert placement.cached_chunks(Tier.HOST) <= before[Tier.HOST]
        assert placement.cached_chunks(Tier.DEVICE) <= before[Tier.DEVICE]
    kv.flip_byte(path, offset)

    chunks = roomy.stats.ssd_chunks
    roomy.check(0)
    assert roomy.stats.ssd_chunks - chunks == sum(
        len(roomy.chunks(0, column)) for column in roomy.columns
    )
    sources.check_everything(roomy)


def test_two_blocks_that_changed_places_are_found(several: sources.Case) -> None:
    """Right bytes with a right checksum, but of another place in the same column."""
    path = several.paths[1]
    places = {
        chunk: offset
        for layer, column, chunk, offset in sources.all_chunks(
            several.shape, several.parts[1], path
        )
        if layer == 0 and column == several.columns[-1]
    }
    data = bytearray(path.read_bytes())
    first, second = (slice(places[c], places[c] + 4096) for c in (1, 2))
    data[first], data[second] = data[second], data[first]
    path.write_bytes(data)

    with pytest.raises(SegmentUnreadable, match="segment1"):
        several.read(0, ["values"])


def open_and_read_everything(path: Path, shape: KVShape, reader: BlockReader, direct: bool) -> None:
    cache = kv.make_cache(shape)
    span = kv.open_span(path, cache, direct=direct)
    try:
        source = SegmentSource(shape, [span], reader, BufferPool(1 << 20), cache, ReadNeeds())
        try:
            for layer in range(shape.num_layers):
                if shape.probe_kv_heads:
                    source.read_probe(layer)
                read_rows(source, layer, None)
        finally:
            source.close()
    finally:
        span.segment.close()


def cut(size: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size(path.stat().st_size))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "one byte short": cut(lambda size: size - 1),
    "one block short": cut(lambda size: size - 4096),
    "half": cut(lambda size: size // 2),
    "header only": cut(lambda size: 4096),
    "part of a header": cut(lambda size: 100),
    "empty": cut(lambda size: 0),
    "removed": Path.unlink,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)) and None,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("name", ["full-stride-bfloat16", "no-probe-full-stride"])
def test_a_short_or_missing_file_is_unreadable(
    tmp_path: Path, any_reader: BlockReader, damage: str, direct: bool, name: str
) -> None:
    if direct and not FileSystem().supports_direct_io(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    shape = sources.SHAPES[name]
    info = kv.make_info(shape, range(32), segment_id="c0ffee")
    path = kv.write_kvs(tmp_path, info, *kv.random_kvs(shape, 32, seed=1))
    open_and_read_everything(path, shape, any_reader, direct)

    DAMAGE[damage](path)

    with pytest.raises(SegmentUnreadable) as caught:
        open_and_read_everything(path, shape, any_reader, direct)
    assert caught.value.segment_id == "c0ffee"


@pytest.mark.parametrize("size", [1, 4096, 4097, 20_000])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_file_that_shrinks_while_it_is_open_is_unreadable(
    several: sources.Case, size: int, ahead: bool
) -> None:
    path = several.paths[3]
    os.truncate(path, path.stat().st_size - size)
    several.request(ReadNeeds(whole=True))

    with pytest.raises(SegmentUnreadable) as caught:
        for layer in range(2):
            if ahead and layer == 0:
                several.segment_source.read_ahead(1.0)
                several.segment_source.read_ahead(1.0)
            several.check_more(layer)

    assert caught.value.segment_id == "segment3"
