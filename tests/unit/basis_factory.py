"""Bases for made-up KVs, and of random numbers; their codecs, and rows of codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from impress_sglang.codes.coding import Rows
from impress_sglang.codes.rotation import KeyRotation, RotationFactors
from impress_sglang.codes.rows.basis import RATES, Basis, LayerBasis
from impress_sglang.codes.rows.coder import GAIN_TABLE, kvs_of, product_matrix, product_of
from impress_sglang.codes.rows.fit import Fit, Metric, Moments
from impress_sglang.codes.rows.row import GAINS, LEVEL_TABLE, RowLayout, gains_of, group_bounds
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.basis_codec import BasisCodec
from impress_sglang.transfer.sources import Piece
from tests.unit import kv_factory as kv

# Tokens of the text that bases are fitted to.
FITTED = tuple(range(7000, 8700))


def rotation(dim: int) -> KeyRotation:
    """Of keys whose first half of dimensions is rotated."""

    def table(positions: int) -> Tensor:
        angles = torch.arange(positions)[:, None] / 100.0 ** torch.linspace(0, 1, dim // 4)
        return torch.cat([angles.cos(), angles.sin()], 1)

    return KeyRotation(table, halves=True)


def fit(
    moments: Moments,
    metric: Metric | None,
    rate: float,
    fewer: Mapping[float, float] | None = None,
    notes: Mapping[str, Any] | None = None,
    **told: Any,
) -> Basis:
    """A basis of at most `rate` bits per feature, and at lower rates by what these keep."""
    solved = Fit(moments, metric)
    basis = solved.basis(solved.thresholds({max(RATES): rate, **(fewer or {})}), **told)
    return dataclasses.replace(basis, notes=notes or {})


def codec_for(shape: KVShape) -> BasisCodec:
    """With a basis for KVs as `kv.SequenceKVs` makes them."""
    turning = rotation(shape.key_dim)
    kvs, moments = kv.SequenceKVs(shape, "", FITTED), Moments()
    places, none = torch.arange(len(FITTED)), torch.zeros(len(FITTED), dtype=torch.int64)
    turns = turning.turns(places, none)
    keys, values = (map(of, range(shape.num_layers)) for of in (kvs.keys, kvs.values))
    turned = (turning.move(key.float(), turns) for key in keys)
    moments.add(list(zip(turned, values, strict=True)))
    return BasisCodec(fit(moments, None, 4.0, fewer={5.0: 3.0}, model="made up"), turning)


# Bits of the components of each layer.
ALL_BITS = tuple(bits for bits in range(8, 0, -1) for _ in range(5))
LAYERS = (ALL_BITS, (), (8, 8, 8, 1), (7,) * 20 + (6,) * 33 + (3,) * 18 + (2,) * 17 + (1,) * 9)


def random_basis(
    keys: tuple[int, int], values: tuple[int, int], layers: Sequence[tuple[int, ...]] = LAYERS
) -> Basis:
    size = keys[0] * keys[1] + values[0] * values[1]
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    layer_bases = []
    for layer, bits in enumerate(layers):
        predict = (drawn(size, size) / 2 / size**0.5).bfloat16() if layer else None
        count = len(bits)
        forward, inverse = drawn(size, count), drawn(count, size).bfloat16()
        layer_bases.append(LayerBasis(bits, 5 * drawn(size), predict, forward, inverse))
    return Basis("random", (keys, values), tuple(layer_bases))


def random_rows(basis: Basis, layer: int, tokens: int, seed: int = 0) -> Tensor:
    """Rows of any codes; gains are from a quarter to 4."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.tensor(basis.layers[layer].bits, dtype=torch.int64)
    codes = torch.randint(0, 256, (tokens, len(bits)), generator=generator) % 2**bits
    gains = torch.randint(4, 21, (tokens, GAINS), generator=generator)
    return basis.layouts[layer].pack(codes.byte(), gains.byte())


def components_of(basis: Basis, layer: int, rows: Tensor) -> Tensor:
    """Float32 [t, C], of the coder's parts."""
    codes, gains = unpacked(basis.layouts[layer], rows)
    bits = torch.tensor(basis.layers[layer].bits, dtype=torch.int64)
    sizes = torch.tensor(group_bounds(len(bits))).diff()
    factors = torch.from_numpy(GAIN_TABLE)[gains.int()].repeat_interleave(sizes, 1)
    return torch.from_numpy(LEVEL_TABLE)[codes + 2**bits - 1] * factors


def unpacked(layout: RowLayout, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [t, C] and gains [t, GAINS] of rows."""
    places, left = layout.parts(), np.array(layout.bits, np.int64)
    codes = np.zeros((len(rows), len(left)), np.int64)
    for kind, width in enumerate((4, 4, 2, 1)):
        byte, shift = places[:, kind].T
        has = byte >= 0
        left -= width * has
        parts = rows.cpu().numpy()[:, byte[has]] >> shift[has] & (1 << width) - 1
        codes[:, has] |= parts << left[has]
    return torch.from_numpy(codes), gains_of(rows)


def decode_layer(basis: Basis, layer: int, below: Tensor | None, rows: Tensor) -> Tensor:
    """What a layer is restored to, less its mean: bfloat16 [t, X]."""
    factors = [components_of(basis, layer, rows).bfloat16(), *([] if below is None else [below])]
    return product_of(torch.cat(factors, 1), product_matrix(basis.layers[layer]))


@dataclasses.dataclass(frozen=True)
class Rotated:
    """A rotation, and how it turns keys of some tokens from position 0."""

    rotation: KeyRotation
    turns: RotationFactors


def random_turns(rotated: int, tokens: int, *, halves: bool = True) -> Rotated:
    """Of so many dimensions."""
    angles = torch.rand(tokens + 9, rotated // 2, generator=torch.Generator().manual_seed(2)) * 6
    table = torch.cat([angles.cos(), angles.sin()], 1)
    rotation = KeyRotation(lambda _: table, halves=halves)
    places = torch.arange(tokens) + 9
    return Rotated(rotation, rotation.turns(torch.zeros_like(places), places))


def check_restored(
    basis: Basis,
    rotated: Rotated,
    tokens: int,
    dtype: torch.dtype,
    *,
    gap: int,
    kernels: bool,
    device: str = "cpu",
) -> None:
    """All layers are restored into slots here and there, and everything else stays as it was.

    There is a gap in the memory behind each row, head and slot.
    """
    codec = BasisCodec(basis, rotated.rotation, kernels=kernels)
    turns, slots = rotated.turns.to(torch.device(device)), torch.randperm(tokens + 5)[:tokens]
    below = None
    for layer in range(basis.num_layers):
        rows = random_rows(basis, layer, tokens)
        memory = torch.nn.functional.pad(rows, (gap, gap)).to(device)[:, gap : gap + rows.shape[1]]
        expected = [
            torch.randn(tokens + 5, heads + gap, dim + gap).to(dtype) for heads, dim in basis.shapes
        ]
        found = [pool.to(device, copy=True) for pool in expected]
        into, wanted = (
            [pool[:, :heads, :dim] for pool, (heads, dim) in zip(pools, basis.shapes, strict=True)]
            for pools in (found, expected)
        )
        right = decode_layer(basis, layer, None if below is None else below.cpu(), rows)
        piece, rows_of = Piece([memory], 0, 0, tokens), Rows(into[0], into[1], slots.to(device))
        below, _ = codec.restore(layer, [piece], rows_of, (below, turns))
        assert below.dtype == torch.bfloat16
        # The interpreter of kernels cuts off, and rounds not.
        near = {"rtol": 0, "atol": 2**-6 * float(right.abs().max())} if kernels else {}
        torch.testing.assert_close(below.cpu(), right, **near)
        keys, values = kvs_of(basis, layer, below.cpu())
        wanted[0][slots] = rotated.rotation.move(keys, rotated.turns).to(dtype)
        wanted[1][slots] = values.to(dtype)
        for pool, whole in zip(found, expected, strict=True):
            step = 2 * torch.finfo(dtype).eps
            near = {"rtol": 0, "atol": step * float(whole.abs().max())}
            # A product and a sum may be rounded once.
            near = near if kernels else {"rtol": step, "atol": 1e-4}
            torch.testing.assert_close(pool.cpu(), whole, **near)
