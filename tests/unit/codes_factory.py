"""What codes stand for, by definition; and bases for made-up KVs, and of random numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from impress_sglang.codes.coding import Rows
from impress_sglang.codes.groups import codec as codec_module
from impress_sglang.codes.groups.codec import CODE_BITS, GROUP_TOKENS, Codes, code_keys, code_values
from impress_sglang.codes.rotation import KeyRotation, RotationFactors
from impress_sglang.codes.rows.basis import RATES, Basis, LayerBasis
from impress_sglang.codes.rows.coder import GAIN_TABLE, kvs_of, product_matrix, product_of
from impress_sglang.codes.rows.fit import SINK_TOKENS, Fit, Metric, Moments
from impress_sglang.codes.rows.row import GAINS, LEVEL_TABLE, RowLayout, gains_of, group_bounds
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.basis_codec import BasisCodec
from impress_sglang.transfer.sources import Piece
from tests.unit import kv_factory as kv


def restore(codes: Codes) -> Tensor:
    """The values that codes stand for, float32 [t, G, D]: what all restore."""
    low, step = of_elements(codes, codes.low), of_elements(codes, codes.step)
    cell = torch.exp2(CODE_BITS - of_elements(codes, codes.bits))
    middle = (codes.codes.float() / cell).floor_().add_(0.5).mul_(cell).sub_(0.5)
    return middle * step + low


def of_elements(codes: Codes, numbers: Tensor) -> Tensor:
    """A number of each channel or vector, or of all, for each element, float32."""
    if codes.bits.ndim:
        return numbers.float().repeat_interleave(GROUP_TOKENS, 0)[: len(codes.codes)]
    return numbers.float()[..., None]


def in_codes(kvs: Sequence[Tensor], rate: int, start: int = 0) -> list[Tensor]:
    """Keys and values of a segment that has the tokens from `start` on, float32 [t, G, D]."""
    codes = code_keys(kvs[0], rate), code_values(kvs[1], rate)
    sinks = [exact[: max(SINK_TOKENS - start, 0)].float() for exact in kvs]
    rows = zip(sinks, map(restore, codes), strict=True)
    return [torch.cat([exact, coded[len(exact) :]]) for exact, coded in rows]


def random_kv(num_tokens: int, heads: int = 2, dim: int = 8, seed: int = 1) -> Tensor:
    """Rows with an offset and a scale of their own in each channel, as keys have them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_tokens, heads, dim, generator=generator)
    scale = 10 ** (2 * torch.rand(heads, dim, generator=generator) - 1)
    return rows * scale + 100 * torch.randn(heads, dim, generator=generator)


class GappedPools:
    """Pools of keys and values, full of random numbers, and what they must hold in the end.

    There is a gap in the memory behind each head and slot.
    """

    def __init__(
        self,
        num_slots: int,
        shapes: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        gap: int,
        device: str,
    ) -> None:
        sizes = [(num_slots, heads + gap, dim + gap) for heads, dim in shapes]
        self._wanted = [torch.randn(size).to(dtype) for size in sizes]
        self._found = [pool.to(device, copy=True) for pool in self._wanted]
        self.keys, self.values = (
            pool[:, :heads, :dim] for pool, (heads, dim) in zip(self._found, shapes, strict=True)
        )

    def check(self, slots: Tensor, *expected: Tensor, eps: float, atol: float = 0.0) -> None:
        """Slots hold these rows, and all else is as it was; `eps` is of the largest number."""
        for found, wanted, rows in zip(self._found, self._wanted, expected, strict=True):
            wanted[slots, : rows.shape[1], : rows.shape[2]] = rows.to(wanted.dtype)
            near = max(atol, eps * float(wanted.abs().max()))
            torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=near)


def check_groups(
    restore_slots: Callable[..., None],
    layout: codec_module.GroupLayout,
    span: slice,
    dtype: torch.dtype,
    *,
    gap: int,
    eps: float = 0.0,
    device: str = "cpu",
) -> None:
    """Slots get what codes say of a span, with a gap behind groups, heads and slots."""
    shapes = [(layout.num_heads, dim) for dim in (layout.key_dim, layout.value_dim)]
    kvs = [random_kv(150, *shape, seed=shape[1]) for shape in shapes]
    energy, slots = torch.rand(shapes[0]) ** 4, torch.randperm(157)[span]
    groups = torch.nn.functional.pad(
        codec_module.encode_layer(layout, *kvs, energy), (4 * gap, 2 * gap)
    )
    first, start = divmod(span.start, GROUP_TOKENS)
    groups = groups.to(device)[first:, 4 * gap : 4 * gap + layout.group_bytes]
    pools = GappedPools(157, shapes, dtype, gap, device)

    restore_slots(layout, groups, start, slots.to(device), pools.keys, pools.values)

    coded = code_keys(kvs[0], layout.rate, energy), code_values(kvs[1], layout.rate)
    pools.check(slots, *(restore(codes)[span] for codes in coded), eps=eps)


# Tokens of the text that bases are fitted to.
FITTED = tuple(range(7000, 8700))


def rotation(rotated: int, *, halves: bool = True) -> KeyRotation:
    """Of keys of which so many dimensions are rotated, the first ones."""

    def table(positions: int) -> Tensor:
        angles = torch.arange(positions)[:, None] / 100.0 ** torch.linspace(0, 1, rotated // 2)
        return torch.cat([angles.cos(), angles.sin()], 1)

    return KeyRotation(table, halves=halves)


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
    turning = rotation(shape.key_dim // 2)
    kvs, moments = kv.SequenceKVs(shape, "", FITTED), Moments()
    places, none = torch.arange(len(FITTED)), torch.zeros(len(FITTED), dtype=torch.int64)
    turns = turning.factors(places, none)
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


def turned(
    rotated: int, tokens: int, *, halves: bool = True
) -> tuple[KeyRotation, RotationFactors]:
    """A rotation of so many dimensions, and how it turns keys of some tokens from position 0."""
    turning, places = rotation(rotated, halves=halves), torch.arange(tokens) + 9
    return turning, turning.factors(torch.zeros_like(places), places)


def check_rows(
    basis: Basis,
    rotated: tuple[KeyRotation, RotationFactors],
    tokens: int,
    dtype: torch.dtype,
    *,
    gap: int,
    kernels: bool,
    device: str = "cpu",
) -> None:
    """Slots get what rows of all layers say, with a gap behind rows, heads and slots."""
    rotation, turns = rotated
    codec, slots = BasisCodec(basis, rotation, kernels=kernels), torch.randperm(tokens + 5)[:tokens]
    below, of_device = None, turns.to(torch.device(device))
    for layer in range(basis.num_layers):
        rows = random_rows(basis, layer, tokens)
        memory = torch.nn.functional.pad(rows, (gap, gap)).to(device)[:, gap : gap + rows.shape[1]]
        pools = GappedPools(tokens + 5, basis.shapes, dtype, gap, device)
        right = decode_layer(basis, layer, None if below is None else below.cpu(), rows)
        into = Rows(pools.keys, pools.values, slots.to(device))
        below, _ = codec.restore(layer, [Piece([memory], 0, 0, tokens)], into, (below, of_device))
        assert below.dtype == torch.bfloat16
        # The interpreter of kernels cuts off, and rounds not.
        near = {"rtol": 0, "atol": 2**-6 * float(right.abs().max())} if kernels else {}
        torch.testing.assert_close(below.cpu(), right, **near)
        keys, values = kvs_of(basis, layer, below.cpu())
        # A product and a sum may be rounded once.
        eps = 2 * torch.finfo(dtype).eps
        pools.check(slots, rotation.move(keys, turns), values, eps=eps, atol=1e-4)
