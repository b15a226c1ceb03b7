"""Sketches: keys in few bits, packed and restored, and how well they rank tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from impress_sglang.importance.scores import column_sums
from impress_sglang.storage.layout import SKETCH_BITS
from impress_sglang.storage.sketch import restore_keys, sketch_keys
from tests.unit.kv_factory import sketch_of

COUNTS = [1, 2, 3, 4, 5, 7, 8, 9, 33, 64]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_keys(num_tokens: int, heads: int = 2, dim: int = 5, seed: int = 1) -> Tensor:
    """Keys with an offset and a range of their own in each channel."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(num_tokens, heads, dim, generator=generator)
    scale = 10 ** (2 * torch.rand(heads, dim, generator=generator) - 1)
    return keys * scale + 5 * torch.randn(heads, dim, generator=generator)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", SKETCH_BITS)
@pytest.mark.parametrize("count", COUNTS)
def test_no_element_is_off_by_more_than_half_a_step_of_its_channel(
    count: int, bits: int, dtype: torch.dtype
) -> None:
    keys = random_keys(count).to(dtype)
    exact = keys.float()
    step = (exact.amax(0) - exact.amin(0)) / (2**bits - 1)

    packed, table = sketch_keys(keys, bits)
    restored = restore_keys(packed, table, bits, 0, count)

    assert restored.dtype == torch.float32
    assert restored.shape == keys.shape
    rounding = 1e-5 * (exact.abs().amax(0) + step)
    assert ((restored - exact).abs() <= step / 2 + rounding).all()
    assert torch.equal(restored, sketch_of(keys, bits))


@pytest.mark.parametrize("bits", SKETCH_BITS)
@pytest.mark.parametrize("count", COUNTS)
def test_a_sketch_is_as_long_as_its_bits(count: int, bits: int) -> None:
    packed, table = sketch_keys(random_keys(count), bits)

    assert packed.dtype == torch.uint8
    assert packed.shape == (-(-count * bits // 8), 2, 5)
    assert table.dtype == torch.float32
    assert table.shape == (2, 2, 5)


@pytest.mark.parametrize("bits", SKETCH_BITS)
def test_the_ends_of_each_channel_are_kept(bits: int) -> None:
    """The largest keys are those that attention looks for."""
    keys = random_keys(40)
    restored = restore_keys(*sketch_keys(keys, bits), bits, 0, 40)

    torch.testing.assert_close(restored.amin(0), keys.amin(0))
    torch.testing.assert_close(restored.amax(0), keys.amax(0))


@pytest.mark.parametrize("bits", SKETCH_BITS)
@pytest.mark.parametrize("value", [0.0, -0.0, 3.75, -1e30, 1e-40])
def test_a_constant_channel_is_exact(bits: int, value: float) -> None:
    """Also beside channels that are not."""
    keys = random_keys(9)
    keys[:, 1, 2] = value

    restored = restore_keys(*sketch_keys(keys, bits), bits, 0, 9)

    assert (restored[:, 1, 2] == keys[:, 1, 2]).all()
    assert torch.isfinite(restored).all()


@pytest.mark.parametrize("bits", SKETCH_BITS)
def test_a_single_token_is_exact(bits: int) -> None:
    keys = random_keys(1)

    assert torch.equal(restore_keys(*sketch_keys(keys, bits), bits, 0, 1), keys)


@pytest.mark.parametrize("bits", SKETCH_BITS)
def test_evenly_spaced_keys_are_exact(bits: int) -> None:
    """As many values as there are codes."""
    keys = torch.arange(2.0**bits)[:, None, None] * 0.5 - 3.0

    assert torch.equal(restore_keys(*sketch_keys(keys, bits), bits, 0, len(keys)), keys)


def test_bytes_by_hand() -> None:
    """Token 2p is in the low half of byte p, token 2p + 1 in the high half."""
    keys = torch.tensor([0.0, 15.0, 3.0, 4.0, 9.0])[:, None, None]

    packed, table = sketch_keys(keys, 4)

    assert packed.flatten().tolist() == [0xF0, 0x43, 0x09]
    assert table.flatten().tolist() == [0.0, 1.0]
    two = sketch_keys(torch.tensor([0.0, 3.0, 1.0, 2.0, 3.0])[:, None, None], 2)[0]
    assert two.flatten().tolist() == [0b10_01_11_00, 0b11]
    eight = sketch_keys(torch.tensor([0.0, 255.0, 7.0])[:, None, None], 8)[0]
    assert eight.flatten().tolist() == [0, 255, 7]


@given(
    bits=st.sampled_from(SKETCH_BITS),
    count=st.integers(1, 40),
    data=st.data(),
)
def test_a_restored_slice_is_the_slice_of_what_is_restored(
    bits: int, count: int, data: st.DataObject
) -> None:
    """Of the whole sketch, and of the bytes that hold the slice alone."""
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    packed, table = sketch_keys(random_keys(count), bits)
    whole = restore_keys(packed, table, bits, 0, count)
    per_byte = 8 // bits
    first = start // per_byte

    part = restore_keys(packed, table, bits, start, stop)
    alone = restore_keys(
        packed[first : -(-stop // per_byte)],
        table,
        bits,
        start - first * per_byte,
        stop - first * per_byte,
    )

    assert torch.equal(part, whole[start:stop])
    assert torch.equal(alone, whole[start:stop])


@pytest.mark.parametrize("bits", SKETCH_BITS)
def test_the_input_stays_as_it_is(bits: int) -> None:
    """It may be a view of the pool, in float32 or not."""
    for dtype in DTYPES:
        pool = random_keys(30).to(dtype)
        before = pool.clone()
        packed, table = sketch_keys(pool[3:20], bits)
        kept = packed.clone(), table.clone()
        restore_keys(packed, table, bits, 2, 9)

        assert torch.equal(pool, before)
        assert torch.equal(packed, kept[0]) and torch.equal(table, kept[1])


def recall(bits: int, share: float, seed: int) -> float:
    """Share of the exact top tokens of each head that the sketch finds as well."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens, new, heads, group, dim = 600, 12, 2, 3, 32
    keys = torch.randn(num_tokens, heads, dim, generator=generator)
    # A few channels of keys are far larger than the others.
    keys[:, :, [3, 17, 21]] = keys[:, :, [3, 17, 21]] * 2 + torch.tensor([12.0, -20.0, 8.0])
    queries = torch.randn(new, heads * group, dim, generator=generator)
    new_keys = torch.randn(new, heads, dim, generator=generator)
    nothing = torch.empty(0, heads, dim)
    restored = restore_keys(*sketch_keys(keys.bfloat16(), bits), bits, 0, num_tokens)
    tops = []
    for own in (keys, restored):
        sums = column_sums(queries, own, nothing, new_keys, dim**-0.5)
        by_head = sums.view(heads, group, -1).sum(1)
        tops.append(by_head.topk(int(share * num_tokens)).indices.tolist())
    return sum(
        len(set(exact) & set(found)) / len(exact) for exact, found in zip(*tops, strict=True)
    ) / len(tops[0])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sketched_scores_pick_nearly_the_same_tokens(seed: int) -> None:
    recalls = {bits: recall(bits, 0.25, seed) for bits in SKETCH_BITS}

    assert recalls[4] >= 0.9
    assert recalls[8] >= 0.98
    assert recalls[8] >= recalls[4] >= recalls[2] > 0.5
