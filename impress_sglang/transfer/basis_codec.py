"""Codes KVs by a basis when they are stored, and restores them into slots of a pool.

Keys are coded as at position 0, because rotation would mix features that the basis separates; they
are rotated to their positions before they enter slots.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from impress_sglang.codes.coding import EncodedLayer, LayerEncoder, Rows, words_of
from impress_sglang.codes.rotation import KeyRotation, RotationFactors
from impress_sglang.codes.rows.basis import Basis
from impress_sglang.codes.rows.coder import (
    GAIN_TABLE,
    encode_layer,
    misfit_of,
    product_matrix,
    product_of,
)
from impress_sglang.codes.rows.fit import SINK_TOKENS
from impress_sglang.codes.rows.row import CURVES, LEVEL_TABLE
from impress_sglang.errors import ConfigError, NotCodable
from impress_sglang.loops.types import Float32s
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.codecs import Energy
from impress_sglang.transfer.sources import Piece

# Tokens that a CPU restores per step: data between its loops stay in a cache.
TILE_TOKENS = 512
# Segments do not fit their basis if `codes.rows.coder.misfit_of` is larger than this on average
# over layers, or in one of them. New text of known kinds has 1.4 to 2.5 on average, and up to 4 in
# some layer; languages missing from the calibration, 2.7 to 5 (docs/results.md).
MAX_MEAN_MISFIT, MAX_MISFIT = 3.0, 16.0


def is_misfit(fits: Float32s) -> bool:
    """Whether codes of a segment are too inexact, by the fits of its layers, if it has any."""
    return len(fits) > 0 and bool(fits.mean() > MAX_MEAN_MISFIT or fits.max() > MAX_MISFIT)


def shape_by(basis: Basis, shape: KVShape) -> KVShape:
    """Return the shape of a model's KVs if they are coded by a basis.

    It raises `ConfigError` if the basis is for KVs of another shape.
    """
    heads = shape.num_kv_heads
    expected = shape.num_layers, ((heads, shape.key_dim), (heads, shape.value_dim))
    if expected != (basis.num_layers, basis.shapes):
        raise ConfigError(
            f"the basis is for {basis.num_layers} layers with (heads, dimensions) {basis.shapes} "
            f"of keys and values, and the model has {expected[0]} with {expected[1]}: make one "
            "for this model with `impress calibrate`"
        )
    rows = tuple(layout.row_bytes for layout in basis.layouts)
    return dataclasses.replace(
        shape, code_bits=round(basis.rate, 2), basis=basis.digest, row_bytes_of_layers=rows
    )


class BasisCodec:
    """A `codecs.Codec` with a basis and the key rotation of its model.

    It restores with compiled loops and products of torch, or with two kernels per layer, without
    waiting.
    """

    # Most bases do not fit random KVs at all.
    by_energy, worst_error = False, math.inf
    instead = "no --impress-basis"

    def __init__(
        self,
        basis: Basis,
        rotation: KeyRotation,
        draft_offset: int = 0,
        *,
        kernels: bool | None = None,
    ) -> None:
        """`basis` is on the CPU. KVs are stored as those of the token `draft_offset` later.

        `kernels`: whether kernels restore; None means on a GPU.
        """
        self.basis = basis
        self.rotation = rotation
        self.draft_offset = draft_offset
        self._kernels = kernels
        # Tables to restore each layer, on the device of the pools.
        self._tables: list[Any] = []

    def positions(self, first: int, count: int) -> Tensor:
        """Positions of the tokens whose KVs are stored as those from token `first` on."""
        start = first - self.draft_offset
        return torch.arange(start, start + count).clamp_min(0)

    def layer_encoder(self, first: int, energy: Energy, *, alone: bool = False) -> LayerEncoder:
        """See `Codec.layer_encoder`; codes of KVs that do not fit the basis are too inexact."""
        basis, rotation, total = self.basis, self.rotation, 0.0
        below: Tensor | None = None
        turns: RotationFactors | None = None

        def code(layer: int, keys: Tensor, values: Tensor) -> EncodedLayer:
            nonlocal below, turns, total
            if turns is None:
                # Same for all layers.
                places = self.positions(first, len(keys))
                turns = rotation.factors(places, torch.zeros_like(places)).to(keys.device)
            kvs = rotation.move(keys.float(), turns), values
            rows, below = encode_layer(basis, layer, below, kvs)
            # Sinks never fit, but are loaded exactly.
            fit = misfit_of(basis, layer, rows[max(SINK_TOKENS - first, 0) :])
            total += fit
            # Later layers cannot lower the sum.
            if alone and (fit > MAX_MISFIT or total > MAX_MEAN_MISFIT * basis.num_layers):
                raise NotCodable(
                    "it is unlike what the basis knows, and its exact KVs are not kept"
                )
            return EncodedLayer(rows, fit)

        return code

    def restore(
        self, layer: int, pieces: Sequence[Piece], rows: Rows, state: Any = None
    ) -> tuple[Tensor, RotationFactors]:
        """See `Codec.restore`; all tensors are on the device of the pools.

        The state is the restored layer, less its mean, bfloat16 [t, X], which the next call may
        overwrite; and the turns of keys to their positions when they were stored.
        """
        device = rows.slots.device
        if not self._tables:
            self._kernels = rows.slots.is_cuda if self._kernels is None else self._kernels
            self._tables = self._tables_of_layers(device)
        if state is None:
            places = torch.cat([self.positions(piece.position, piece.length) for piece in pieces])
            state = None, self.rotation.factors(torch.zeros_like(places), places).to(device)
        below, turns = state
        groups = [piece.parts[0] for piece in pieces]
        joined = torch.cat(groups) if len(groups) > 1 else groups[0]
        put = self._put_by_kernels if self._kernels else self._put_by_loops
        return put(layer, joined, below, turns, rows), turns

    def _tables_of_layers(self, device: torch.device) -> list[Any]:
        # Imported only where they are used: Triton is not needed on a CPU, Numba not on a GPU.
        if not self._kernels:
            from impress_sglang.loops import rows as by_loops

            self._module: Any = by_loops
            each = zip(self.basis.layouts, self.basis.layers, strict=True)
            return [(layout.tables(), product_matrix(basis), basis.mean) for layout, basis in each]
        from impress_sglang.triton import rows as by_kernels

        self._module, layer_tables = by_kernels, []
        levels, gains = (torch.from_numpy(table).to(device) for table in (LEVEL_TABLE, GAIN_TABLE))
        for layout, of_layer in zip(self.basis.layouts, self.basis.layers, strict=True):
            places = by_kernels.places_of(layout).to(device)
            matrix = product_matrix(of_layer).to(device, torch.bfloat16)
            tables = places, levels, gains, matrix, of_layer.mean.to(device)
            layer_tables.append(by_kernels.LayerTables(*tables))
        return layer_tables

    def _put_by_kernels(
        self, layer: int, groups: Tensor, below: Tensor | None, turns: RotationFactors, rows: Rows
    ) -> Tensor:
        tables, angles = self._tables[layer], (turns.cos.flatten(1), turns.sin.flatten(1))
        components, halves = self._module.unpack(groups, tables), self.rotation.halves
        into = rows.slots, rows.keys, rows.values
        return self._module.restore(components, below, tables, angles, *into, halves=halves)

    def _put_by_loops(
        self, layer: int, groups: Tensor, below: Tensor | None, turns: RotationFactors, rows: Rows
    ) -> Tensor:
        tables, matrix, mean = self._tables[layer]
        restored = torch.empty(len(groups), len(mean), dtype=torch.bfloat16)
        angles = turns.cos.flatten(1).numpy(), turns.sin.flatten(1).numpy()
        for at in range(0, len(groups), TILE_TOKENS):
            tile = slice(at, at + TILE_TOKENS)
            factors = self._factors(tables, groups[tile], None if below is None else below[tile])
            product = product_of(factors, matrix, restored[tile]).view(torch.uint16).numpy()
            arguments: list[Any] = [product, mean.numpy(), *(part[tile] for part in angles)]
            with words_of(rows._replace(slots=rows.slots[tile])) as (words, into):
                arguments += [self.rotation.halves, into, *self.basis.shapes[0]]
                self._module.fill(*arguments, *(part.reshape(len(part), -1) for part in words))
        return restored

    def _factors(self, tables: Any, groups: Tensor, below: Tensor | None) -> Tensor:
        """Factors whose product restores rows: components, `below`; bfloat16 [t, C + X]."""
        # Zeros at the end are not changed by loops.
        parts = torch.zeros(len(groups), tables.parts, dtype=torch.uint8)
        components = torch.empty(len(groups), int(tables.bounds[-1]))
        arrays = tables.areas, tables.runs, tables.bounds, CURVES, GAIN_TABLE
        self._module.unpack(groups.contiguous().numpy(), *arrays, parts.numpy(), components.numpy())
        factors = components.bfloat16()
        return factors if below is None else torch.cat([factors, below], 1)
