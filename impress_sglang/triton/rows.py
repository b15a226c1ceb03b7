"""Restores rows of coded keys and values into slots of a pool, as loops do on a CPU.

One kernel takes codes apart and scales their levels; the other multiplies them by the basis, adds
what is predicted from the layer below, turns keys, and fills slots.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from impress_sglang.triton import power_of_two

# Tokens and factors that one program multiplies at a time; fewer columns cannot be multiplied.
TILE_TOKENS, TILE_FACTORS, LEAST_COLUMNS = 64, 64, 16
# Tokens and components that one program takes apart.
UNPACK_TOKENS, UNPACK_COMPONENTS = 16, 128
# Rows of components begin where vectors of memory do.
ALIGNED = 16
# Of a component: byte and lowest bit of each of its four parts, first level, and where its gain is.
_FIELDS = tl.constexpr(10)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerTables:
    """What kernels know of a layer, on the device.

    Attributes:
        places: int32 [C, 10]; see `places_of`.
        levels: float32 [511], of 0 to 8 bits; those of b bits begin at 2**b - 1.
        gains: float32 [32].
        matrix: bfloat16 [C + X, X], or [C, X] in layer 0.
        mean: float32 [X].
    """

    places: Tensor
    levels: Tensor
    gains: Tensor
    matrix: Tensor
    mean: Tensor


def places_of(layout: Any) -> Tensor:
    """The places of components in a `codes.rows.row.RowLayout`, on the CPU; see `LayerTables`."""
    places = np.empty((len(layout.bits), _FIELDS.value), np.int32)
    places[:, :8] = layout.parts().reshape(len(places), 8)
    places[:, 8] = [2**width - 1 for width in layout.bits]
    bounds = layout.tables().bounds.astype(np.int64)
    places[:, 9] = 5 * np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    return torch.from_numpy(places)


def unpack(rows: Tensor, tables: LayerTables) -> Tensor:
    """Restore components of rows, uint8 [t, row_bytes], in one launch that is not waited for.

    The last stride is 1. Returns bfloat16 [t, C and zeros], a multiple of `ALIGNED` numbers a
    token.
    """
    assert rows.dtype == torch.uint8 and rows.stride(1) == 1
    count, components = len(rows), len(tables.places)
    width = -(-components // ALIGNED) * ALIGNED
    found = torch.empty(count, width, dtype=torch.bfloat16, device=rows.device)
    if count and components:
        tiles = -(-count // UNPACK_TOKENS), -(-components // UNPACK_COMPONENTS)
        given = rows, rows.stride(0), count, components, tables.places, tables.levels, tables.gains
        sizes = {"TOKENS": UNPACK_TOKENS, "COMPONENTS": UNPACK_COMPONENTS}
        _unpack_kernel[tiles](*given, found, width, **sizes, num_warps=4)
    return found


def restore(
    components: Tensor,
    below: Tensor | None,
    tables: LayerTables,
    turns: tuple[Tensor, Tensor],
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    halves: bool,
) -> Tensor:
    """Put a layer into slots, in one launch that is not waited for.

    Args:
        components: what `unpack` returned.
        below: what this returned for the layer below, which is not changed; None in layer 0.
        tables: of the layer.
        turns: of keys, cosines and sines: float32 [t, rotated dimensions / 2].
        slots: int64 [t] on the device, distinct.
        keys: pool [slots, G, Dk]; the last stride is 1.
        values: pool [slots, G, Dv] of the same dtype.
        halves: see `codes.rotation.KeyRotation`.

    Returns bfloat16 [t, X]: what the layer was restored to, less the mean.
    """
    assert keys.stride(2) == values.stride(2) == 1 and keys.dtype == values.dtype
    assert keys.shape[1] == values.shape[1] and slots.is_contiguous()
    cos, sin = turns
    assert cos.is_contiguous() and sin.is_contiguous()
    heads, key_dim, value_dim = keys.shape[1], keys.shape[2], values.shape[2]
    features = len(tables.mean)
    assert features == heads * (key_dim + value_dim)
    count = len(components)
    restored = torch.empty(count, features, dtype=torch.bfloat16, device=components.device)
    if not count:
        return restored
    assert below is None or below.is_contiguous()
    pairs = (max(key_dim, value_dim) + 1) // 2
    constants: dict[str, Any] = {
        "FEATURES": features,
        "HEADS": heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "PREDICTED": below is not None,
        "TURNED": cos.shape[1],
        "HALVES": halves,
        "PAIRS": max(power_of_two(pairs), LEAST_COLUMNS),
        "TOKENS": TILE_TOKENS,
        "FACTORS": TILE_FACTORS,
        # The interpreter takes the bits of bfloat16 numbers for integers when it multiplies.
        "WIDEN": not isinstance(_restore_kernel, triton.JITFunction),
        "num_warps": 4,
    }
    factors = components, components.shape[1], len(tables.places)
    known = restored if below is None else below, tables.matrix, tables.mean
    pools = keys, values, *keys.stride()[:2], *values.stride()[:2]
    _restore_kernel[(-(-count // TILE_TOKENS), heads, 2)](
        *factors, *known, cos, sin, slots, count, restored, *pools, **constants
    )
    return restored


# Numbers of tokens differ between launches, those of components between layers.
@triton.jit(
    do_not_specialize=["row_stride", "count", "components"], do_not_specialize_on_alignment=["rows"]
)
def _unpack_kernel(
    rows: tl.tensor, row_stride: tl.tensor, count: tl.tensor, components: tl.tensor,
    places: tl.tensor, levels: tl.tensor, gains: tl.tensor, found: tl.tensor, width: tl.tensor,
    TOKENS: tl.constexpr, COMPONENTS: tl.constexpr,
) -> None:  # fmt: skip
    """One program per tile of tokens and of components."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    component = tl.program_id(1) * COMPONENTS + tl.arange(0, COMPONENTS)
    is_token, is_component = token < count, component < components
    mask = is_token[:, None] & is_component[None, :]
    packed = rows + token * row_stride
    fields = places + component * _FIELDS
    code = tl.zeros([TOKENS, COMPONENTS], tl.int32)
    for kind in tl.static_range(4):
        # Of two nibbles, a crumb and a bit.
        bits = 4 if kind < 2 else 4 - kind
        byte = tl.load(fields + 2 * kind, mask=is_component, other=-1)
        shift = tl.load(fields + 2 * kind + 1, mask=is_component, other=0)
        has = mask & (byte >= 0)[None, :]
        part = tl.load(packed[:, None] + byte[None, :], mask=has, other=0).to(tl.int32)
        part = (part >> tl.maximum(shift, 0)[None, :]) & ((1 << bits) - 1)
        code = tl.where(has, (code << bits) | part, code)
    first = tl.load(fields + 8, mask=is_component, other=0)
    place = tl.load(fields + 9, mask=is_component, other=0)
    word = tl.zeros([TOKENS], tl.int32)
    for byte in tl.static_range(4):
        word |= tl.load(packed + byte, mask=is_token, other=0).to(tl.int32) << (8 * byte)
    gain = tl.load(gains + ((word[:, None] >> place[None, :]) & 31), mask=mask, other=0.0)
    level = tl.load(levels + first[None, :] + code, mask=mask, other=0.0)
    target = found + token[:, None] * width + component[None, :]
    scaled = (level * gain).to(tl.bfloat16)
    tl.store(target, scaled, mask=is_token[:, None] & (component < width)[None, :])


@triton.jit(do_not_specialize=["components", "count"])
def _restore_kernel(
    factors: tl.tensor, width: tl.tensor, components: tl.tensor, below: tl.tensor,
    matrix: tl.tensor, mean: tl.tensor, cos: tl.tensor, sin: tl.tensor, slots: tl.tensor,
    count: tl.tensor, restored: tl.tensor, keys: tl.tensor, values: tl.tensor,
    key_stride: tl.tensor, key_head_stride: tl.tensor, value_stride: tl.tensor,
    value_head_stride: tl.tensor, FEATURES: tl.constexpr, HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PREDICTED: tl.constexpr, TURNED: tl.constexpr,
    HALVES: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr, FACTORS: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """One program per tile of tokens and head; for keys where program id 2 is 0, else values."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token, mask=token < count, other=0)
    if tl.program_id(2) == 0:
        target = keys + slot * key_stride + head * key_head_stride
        SPLIT: tl.constexpr = TURNED if HALVES else 0
        first, second = _restored(
            factors, width, components, below, matrix, mean, restored, token, count,
            head * KEY_DIM, SPLIT, KEY_DIM, PREDICTED, FEATURES, PAIRS, TOKENS, FACTORS, WIDEN,
        )  # fmt: skip
        pair = tl.arange(0, PAIRS)
        turned = (token < count)[:, None] & (pair < TURNED)[None, :]
        place = token[:, None] * TURNED + pair[None, :]
        c = tl.load(cos + place, mask=turned, other=1.0)
        s = tl.load(sin + place, mask=turned, other=0.0)
        one, other = first * c - second * s, second * c + first * s
        _store(target, one, other, token, count, SPLIT, KEY_DIM, PAIRS)
    else:
        target = values + slot * value_stride + head * value_head_stride
        HALF: tl.constexpr = (VALUE_DIM + 1) // 2
        first, second = _restored(
            factors, width, components, below, matrix, mean, restored, token, count,
            HEADS * KEY_DIM + head * VALUE_DIM, HALF, VALUE_DIM, PREDICTED, FEATURES, PAIRS, TOKENS,
            FACTORS, WIDEN,
        )  # fmt: skip
        _store(target, first, second, token, count, HALF, VALUE_DIM, PAIRS)


@triton.jit
def _restored(
    factors: tl.tensor, width: tl.tensor, components: tl.tensor, below: tl.tensor,
    matrix: tl.tensor, mean: tl.tensor, restored: tl.tensor, token: tl.tensor, count: tl.tensor,
    column: tl.tensor, SPLIT: tl.constexpr, DIM: tl.constexpr, PREDICTED: tl.constexpr,
    FEATURES: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr, FACTORS: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Both elements of each pair of a head, whose features begin at `column`; kept without mean."""
    one, other, is_one, is_other = _columns(SPLIT, DIM, PAIRS)
    first = tl.zeros([TOKENS, PAIRS], tl.float32)
    second = tl.zeros([TOKENS, PAIRS], tl.float32)
    head = matrix + column
    first, second = _add_products(
        first, second, factors, width, components, head, token, count, SPLIT, DIM, FEATURES, PAIRS,
        FACTORS, WIDEN,
    )  # fmt: skip
    if PREDICTED:
        head += components.to(tl.int64) * FEATURES
        first, second = _add_products(
            first, second, below, FEATURES, FEATURES, head, token, count, SPLIT, DIM, FEATURES,
            PAIRS, FACTORS, WIDEN,
        )  # fmt: skip
    first, second = first.to(tl.bfloat16), second.to(tl.bfloat16)
    _store(restored + token * FEATURES + column, first, second, token, count, SPLIT, DIM, PAIRS)
    first_mean = tl.load(mean + column + one, mask=is_one, other=0.0)
    second_mean = tl.load(mean + column + other, mask=is_other, other=0.0)
    return first.to(tl.float32) + first_mean[None, :], second.to(tl.float32) + second_mean[None, :]


@triton.jit
def _add_products(
    first: tl.tensor, second: tl.tensor, factors: tl.tensor, width: tl.tensor, size: tl.tensor,
    matrix: tl.tensor, token: tl.tensor, count: tl.tensor, SPLIT: tl.constexpr, DIM: tl.constexpr,
    FEATURES: tl.constexpr, PAIRS: tl.constexpr, FACTORS: tl.constexpr, WIDEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Add products of factors [t, size], in rows of this width, and some columns of a matrix."""
    one, other, is_one, is_other = _columns(SPLIT, DIM, PAIRS)
    for begin in range(0, width, FACTORS):
        place = begin + tl.arange(0, FACTORS)
        mask = (token < count)[:, None] & (place < width)[None, :]
        tile = tl.load(factors + token[:, None] * width + place[None, :], mask=mask, other=0.0)
        row = matrix + place[:, None].to(tl.int64) * FEATURES
        known = (place < size)[:, None]
        values = tl.load(row + one[None, :], mask=known & is_one[None, :], other=0.0)
        first = _add_product(first, tile, values, WIDEN)
        values = tl.load(row + other[None, :], mask=known & is_other[None, :], other=0.0)
        second = _add_product(second, tile, values, WIDEN)
    return first, second


@triton.jit
def _add_product(
    sums: tl.tensor, tile: tl.tensor, columns: tl.tensor, WIDEN: tl.constexpr
) -> tl.tensor:
    if WIDEN:
        wide = columns.to(tl.float32)
        return tl.dot(tile.to(tl.float32), wide, sums, input_precision="ieee")
    else:
        return tl.dot(tile, columns, sums)


@triton.jit
def _columns(
    SPLIT: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Both columns of each pair, and whether the head has them: the first `SPLIT` pair with the
    next ones, others neighbours."""
    pair = tl.arange(0, PAIRS)
    # Of pairs, not of columns: with masks of a column by `where`, masked stores of Triton 3.6 wrote
    # on an H200.
    is_one, is_other = pair < (DIM + 1) // 2, pair < DIM // 2
    if 2 * SPLIT >= DIM:
        # There are no others, and neighbours are loaded at once.
        return pair, pair + SPLIT, is_one, is_other
    else:
        joined = pair < SPLIT
        one = tl.where(joined, pair, 2 * pair)
        return one, tl.where(joined, pair + SPLIT, 2 * pair + 1), is_one, is_other


@triton.jit
def _store(
    target: tl.tensor, first: tl.tensor, second: tl.tensor, token: tl.tensor, count: tl.tensor,
    SPLIT: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
) -> None:  # fmt: skip
    one, other, is_one, is_other = _columns(SPLIT, DIM, PAIRS)
    inside = (token < count)[:, None]
    tl.store(
        target[:, None] + one[None, :],
        first.to(target.dtype.element_ty),
        mask=inside & is_one[None, :],
    )
    tl.store(
        target[:, None] + other[None, :],
        second.to(target.dtype.element_ty),
        mask=inside & is_other[None, :],
    )
