"""Arithmetic of the segment layout: chunks tile the file, and nothing overlaps."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.storage.layout import KVShape, SegmentLayout, Stream, round_up
from tests.unit.kv_factory import chunk_disk_bytes, heads_of, make_shape, token_bytes

BLOCK = 4096


@st.composite
def shapes(draw: st.DrawFn) -> KVShape:
    kv_heads = draw(st.integers(1, 8))
    probe = draw(st.sets(st.integers(0, kv_heads - 1), min_size=1))
    return KVShape(
        num_layers=draw(st.integers(1, 4)),
        num_query_heads=kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=kv_heads,
        key_dim=draw(st.sampled_from([1, 8, 64, 96, 128])),
        value_dim=draw(st.sampled_from([1, 8, 64, 128])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        probe_kv_heads=tuple(sorted(probe)),
    )


@st.composite
def layouts(draw: st.DrawFn) -> SegmentLayout:
    return SegmentLayout(
        shape=draw(shapes()),
        chunk_tokens=8 * draw(st.integers(1, 32)),
        num_tokens=draw(st.integers(1, 1000)),
        header_bytes=BLOCK * draw(st.integers(1, 5)),
    )


def chunk_extents(layout: SegmentLayout) -> list[tuple[int, int]]:
    """(offset, bytes with padding) of every chunk that has bytes, in file order."""
    return [
        (
            layout.stream_offset(layer, stream) + chunk * layout.chunk_stride(stream),
            layout.run_bytes(stream, chunk, chunk + 1),
        )
        for layer in range(layout.shape.num_layers)
        for stream in Stream
        if layout.stream_bytes(stream)
        for chunk in range(layout.num_chunks)
    ]


@given(layouts())
def test_chunks_tile_the_file_from_header_to_end(layout: SegmentLayout) -> None:
    end = layout.header_bytes
    for offset, size in chunk_extents(layout):
        assert offset == end, "a gap or an overlap"
        assert offset % BLOCK == 0
        assert size > 0 and size % BLOCK == 0
        end = offset + size

    assert end == layout.file_bytes


@given(layouts())
def test_chunk_sizes_are_those_of_their_rows(layout: SegmentLayout) -> None:
    for stream in Stream:
        for chunk in range(layout.num_chunks):
            rows = min(layout.chunk_tokens, layout.num_tokens - chunk * layout.chunk_tokens)
            expected = chunk_disk_bytes(
                layout.shape, stream, layout.chunk_tokens, layout.num_tokens, chunk
            )

            assert layout.chunk_rows(chunk) == rows
            assert layout.chunk_bytes(stream, chunk) == rows * token_bytes(layout.shape, stream)
            assert layout.run_bytes(stream, chunk, chunk + 1) == expected
    assert sum(map(layout.chunk_rows, range(layout.num_chunks))) == layout.num_tokens


@given(layouts(), st.data())
def test_bytes_of_a_run_add_up(layout: SegmentLayout, data: st.DataObject) -> None:
    stream = data.draw(st.sampled_from(list(Stream)))
    first = data.draw(st.integers(0, layout.num_chunks - 1))
    stop = data.draw(st.integers(first + 1, layout.num_chunks))

    single = [layout.run_bytes(stream, chunk, chunk + 1) for chunk in range(first, stop)]

    assert layout.run_bytes(stream, first, stop) == sum(single)
    assert layout.run_bytes(stream, 0, layout.num_chunks) == layout.stream_bytes(stream)


@given(layouts())
def test_chunks_are_numbered_by_layer_then_stream_then_place(layout: SegmentLayout) -> None:
    numbers = [
        layout.chunk_index(layer, stream, chunk)
        for layer in range(layout.shape.num_layers)
        for stream in Stream
        for chunk in range(layout.num_chunks)
    ]

    assert numbers == list(range(layout.total_chunks))


@given(layouts())
def test_blocks_are_all_of_the_file_after_the_header(layout: SegmentLayout) -> None:
    blocks = sum(size for _, size in chunk_extents(layout)) // BLOCK

    assert layout.num_blocks == blocks
    assert layout.file_bytes == layout.header_bytes + BLOCK * blocks


@given(layouts())
def test_layers_follow_each_other_and_begin_with_the_probe_keys(layout: SegmentLayout) -> None:
    own = sum(layout.stream_bytes(stream) for stream in Stream)
    for layer in range(layout.shape.num_layers):
        start = layout.header_bytes + layer * own

        assert layout.layer_offset(layer) == start
        assert layout.stream_offset(layer, Stream.PROBE_KEYS) == start
    assert layout.layer_bytes == own


@given(shapes())
def test_probe_and_other_heads_are_all_heads_once(shape: KVShape) -> None:
    keys = [*shape.heads(Stream.PROBE_KEYS), *shape.heads(Stream.OTHER_KEYS)]

    assert sorted(keys) == list(range(shape.num_kv_heads))
    for stream in Stream:
        assert list(shape.heads(stream)) == heads_of(shape, stream)
        assert shape.row_bytes(stream) == token_bytes(shape, stream)


def test_other_keys_are_empty_when_all_heads_are_probe_heads() -> None:
    shape = make_shape(kv_heads=2, probe=(0, 1))
    layout = SegmentLayout(shape, chunk_tokens=8, num_tokens=20, header_bytes=BLOCK)

    assert shape.other_kv_heads == ()
    assert layout.stream_bytes(Stream.OTHER_KEYS) == 0
    assert layout.chunk_stride(Stream.OTHER_KEYS) == 0
    assert layout.run_bytes(Stream.OTHER_KEYS, 0, layout.num_chunks) == 0
    assert layout.stream_offset(0, Stream.OTHER_KEYS) == layout.stream_offset(0, Stream.VALUES)


def test_sizes_of_a_known_model() -> None:
    """Llama-3-8B in bfloat16, 1,000 tokens: worked out by hand."""
    shape = make_shape(
        layers=32,
        query_heads=32,
        kv_heads=8,
        key_dim=128,
        value_dim=128,
        dtype=torch.bfloat16,
        probe=(0,),
    )
    layout = SegmentLayout(shape, chunk_tokens=64, num_tokens=1000, header_bytes=BLOCK)

    assert shape.group_size == 4
    assert layout.num_chunks == 16
    assert layout.chunk_stride(Stream.PROBE_KEYS) == 64 * 256
    # The last chunk has 40 tokens: 10,240 bytes, padded to 12,288.
    assert layout.stream_bytes(Stream.PROBE_KEYS) == 15 * 64 * 256 + 12_288
    assert layout.stream_bytes(Stream.OTHER_KEYS) == 15 * 64 * 7 * 256 + 73_728
    assert layout.stream_bytes(Stream.VALUES) == 15 * 64 * 8 * 256 + 81_920
    # 63, 438 and 500 blocks of 4,096 bytes.
    assert layout.num_blocks == 32 * (63 + 438 + 500)
    assert layout.total_chunks == 32 * 3 * 16


@pytest.mark.parametrize(
    ("value", "multiple", "expected"),
    [(0, 4, 0), (1, 4, 4), (4, 4, 4), (5, 4, 8), (4097, 4096, 8192)],
)
def test_round_up(value: int, multiple: int, expected: int) -> None:
    assert round_up(value, multiple) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"num_query_heads": 5},
        {"probe_kv_heads": (2,)},
        {"probe_kv_heads": (-1,)},
        {"probe_kv_heads": (1, 0)},
        {"probe_kv_heads": (0, 0)},
    ],
)
def test_impossible_shape_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(AssertionError):
        dataclasses.replace(make_shape(), **change)
