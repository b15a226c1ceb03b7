"""A layer between tensors and its bytes: every row where the layout says, in any order."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.storage.layer_bytes import decode_layer, encode_layer
from impress_sglang.storage.layout import SegmentLayout
from tests.unit import kv_factory as kv

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def layouts(draw: st.DrawFn) -> SegmentLayout:
    """One layer; rows from two bytes to more than a block; with probe heads or without."""
    kv_heads = draw(st.integers(1, 4))
    key_dim = draw(st.sampled_from([1, 8, 96, 128]))
    value_dim = draw(st.sampled_from([1, 8, 500, 1504]))
    shape = kv.make_shape(
        layers=1,
        query_heads=kv_heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=draw(st.sampled_from(DTYPES)),
        probe=sorted(draw(st.sets(st.integers(0, kv_heads - 1)))),
        coded=value_dim % 8 == key_dim % 8 == 0 and draw(st.booleans()),
    )
    chunk_tokens = 8 * draw(st.integers(1, 3))
    return SegmentLayout(shape, chunk_tokens, draw(st.integers(1, 60)), header_bytes=4096)


def dirty(layout: SegmentLayout) -> memoryview:
    """Memory of a layer with bytes of something else."""
    return memoryview(bytearray(b"\xa5" * layout.layer_bytes(0)))


def mapping_lists(layout: SegmentLayout, seed: int | None, dtype: str) -> np.ndarray | None:
    if seed is None:
        return None
    generator = np.random.default_rng(seed)
    head_groups = [
        generator.permutation(layout.num_tokens) for _ in range(kv.head_groups_of(layout.shape))
    ]
    return np.stack(head_groups).astype(dtype)


SEEDS = st.one_of(st.none(), st.integers(0, 100))


@given(layouts(), SEEDS, st.sampled_from(["<u2", "<u4"]))
def test_a_layer_is_read_back_in_logical_order(
    layout: SegmentLayout, seed: int | None, dtype: str
) -> None:
    keys, values = (kvs[0] for kvs in kv.random_kvs(layout.shape, layout.num_tokens, seed=1))
    mapping, memory = mapping_lists(layout, seed, dtype), dirty(layout)
    given = keys.clone(), values.clone(), None if mapping is None else mapping.copy()

    encode_layer(layout, 0, given[0], given[1], given[2], memory)
    clean = memoryview(bytearray(len(memory)))
    encode_layer(layout, 0, given[0], given[1], given[2], clean)
    size = layout.columns_bytes
    assert memory[:size] == clean[:size], "padding is zero"
    found_keys, found_values = decode_layer(layout, memory, mapping)
    memory[:] = bytes(len(memory))

    assert torch.equal(given[0], keys) and torch.equal(given[1], values)
    assert mapping is None or np.array_equal(given[2], mapping)

    assert found_keys.dtype == found_values.dtype == layout.shape.dtype
    assert torch.equal(found_keys, keys)
    assert torch.equal(found_values, values)
