"""Arithmetic of the segment layout: chunks tile the file, and nothing overlaps."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.storage.layout import Column, KVShape, SegmentLayout
from impress_sglang.transfer.wanted import chunk_pages
from tests.unit import kv_factory as kv

BLOCK = 4096


@st.composite
def shapes(draw: st.DrawFn) -> KVShape:
    kv_heads = draw(st.integers(1, 8))
    probe = draw(st.sets(st.integers(0, kv_heads - 1)))
    key_dim = draw(st.sampled_from([1, 8, 64, 96, 128]))
    value_dim = draw(st.sampled_from([1, 8, 64, 128]))
    layers = draw(st.integers(1, 4))
    return KVShape(
        num_layers=layers,
        num_query_heads=kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        probe_kv_heads=tuple(sorted(probe)),
        code_bits=(
            bits := draw(st.sampled_from([0.0, 5.0, 6.0])) if key_dim > 1 and value_dim > 1 else 0.0
        ),
        exact=not bits or bool(probe) or draw(st.booleans()),
        raw_layers=0 if probe else draw(st.integers(0, layers - 1)),
    )


@st.composite
def layouts(draw: st.DrawFn) -> SegmentLayout:
    return SegmentLayout(
        shape=draw(shapes()),
        chunk_tokens=8 * draw(st.integers(1, 32)),
        num_tokens=draw(st.integers(1, 1000)),
        header_bytes=BLOCK * draw(st.integers(1, 5)),
    )


def chunks_of(layout: SegmentLayout, column: Column) -> list[int]:
    count = -(-layout.num_tokens // layout.chunk_tokens)
    own = layout.shape, column, layout.chunk_tokens, layout.num_tokens
    return [kv.chunk_disk_bytes(*own, chunk) for chunk in range(count)]


def chunk_extents(layout: SegmentLayout) -> list[tuple[int, int]]:
    """(offset, bytes with padding) of every chunk that has bytes, and of codes, in file order."""
    extents = []
    for layer in range(layout.shape.first_raw):
        start = layout.layer_offset(layer)
        extents += [
            (start + layout.column_starts[column] + layout.columns[column].page_offset(chunk), size)
            for column in layout.shape.columns
            if layout.columns[column].group_bytes
            for chunk, size in enumerate(chunks_of(layout, column))
        ]
        if layout.codes:
            extents.append(layout.place(layer, codes=True))
    raw = range(layout.shape.first_raw, layout.shape.num_layers)
    return [*extents, *(layout.place(layer, codes=False) for layer in raw)]


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
def test_raw_layers_are_the_same_beside_codes(layout: SegmentLayout) -> None:
    """All keys and values of a token are one row; chunks are counted through all layers."""
    shape = layout.shape
    for codes in (False, True)[: 1 + shape.coded]:
        numbers = [layout.first_chunk(layer, codes=codes) for layer in range(shape.num_layers)]
        parts = [layout.parts(layer, codes=codes) for layer in range(shape.num_layers)]
        counts = [sum(own.num_pages for own in both) for both in parts]
        assert numbers == [sum(counts[:layer]) for layer in range(shape.num_layers)]
        assert len(chunk_pages(layout, codes=codes)) == sum(counts)
        sizes = [sum(own.num_bytes for own in both) for both in parts]
        assert layout.num_bytes(slice(None), codes=codes) == sum(sizes)
        assert layout.most_bytes(codes=codes) == max(sizes)
        for layer in range(shape.first_raw, shape.num_layers):
            (rows,) = parts[layer]
            assert rows.group_bytes == shape.num_kv_heads * shape.dtype.itemsize * (
                shape.key_dim + shape.value_dim
            )
            assert (rows.num_tokens, rows.page_tokens) == (layout.num_tokens, layout.chunk_tokens)
            place = layout.layer_offset(layer), layout.layer_bytes(layer)
            assert layout.place(layer, codes=codes) == place


def test_sizes_of_a_known_model_with_codes() -> None:
    """The same model."""
    shape = KVShape(32, 32, 8, 128, 128, torch.bfloat16, (), 6.0)
    layout = SegmentLayout(shape, chunk_tokens=64, num_tokens=1000, header_bytes=BLOCK)
    (codes, *_) = layout.codes

    # Two halves for each channel of keys and for each value, and a byte for each channel of keys;
    # then 6 bits of each element.
    assert codes.group_bytes == 2 * 2 * 8 * (128 + 64) + 8 * 128 + 64 * 8 * 256 * 6 // 8
    # 16 groups of 105,472 bytes; a page has 4 of them, which are 103 blocks.
    assert (codes.num_groups, codes.page_groups, codes.page_bytes) == (16, 4, 103 * BLOCK)
    assert codes.num_bytes == 4 * 103 * BLOCK
    assert layout.columns_bytes == 1008 * BLOCK
    assert layout.place(1, codes=True)[0] == BLOCK * (1 + 2 * 1008 + 412)
    assert layout.num_blocks == 32 * (1008 + 412)


@pytest.mark.parametrize(
    "change",
    [
        {"num_query_heads": 5},
        {"exact": False},
        {"exact": False, "code_bits": 6.0},
        {"raw_layers": 1},
        {"raw_layers": 2, "probe_kv_heads": ()},
        {"probe_kv_heads": (2,)},
        {"probe_kv_heads": (-1,)},
        {"probe_kv_heads": (1, 0)},
        {"probe_kv_heads": (0, 0)},
    ],
)
def test_impossible_shape_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(AssertionError):
        dataclasses.replace(kv.make_shape(), **change)
