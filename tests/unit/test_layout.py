"""Arithmetic of the segment layout: sizes by hand, and layers that are raw beside codes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.storage.layout import KVShape, SegmentLayout
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
