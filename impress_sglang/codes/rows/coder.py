"""Codes the KVs of a layer as rows, in torch and float32.

The encoder also returns the restored KVs, because the layer above is predicted from them. Each row
depends only on rows of the same token in lower layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from impress_sglang.codes.rows.basis import Basis, LayerBasis
from impress_sglang.codes.rows.row import (
    BOUNDS,
    GAIN_BITS,
    GAINS,
    LEVEL_TABLE,
    gains_of,
    group_bounds,
)
from impress_sglang.errors import NotCodable
from impress_sglang.loops.rows import BINS, GAIN_STEPS, GAIN_UNIT, quantise

# float32 [32]: factors of all gains.
GAIN_TABLE = np.exp2((np.arange(1 << GAIN_BITS) - GAIN_UNIT) / GAIN_STEPS).astype(np.float32)
# For `quantise`: ends of cells, and the codes of the lower ends of bins from -6 to 6.
_ENDS = np.concatenate([np.append(bounds, np.float32(np.inf)) for bounds in BOUNDS])
_BINS = (np.arange(12 * BINS) - 6 * BINS) / BINS
_GUESSES = np.stack([np.searchsorted(bounds, _BINS) for bounds in BOUNDS]).astype(np.uint8)
# Errors of larger components may overflow float32, and `quantise` would find no best gain.
_MAX_COMPONENT = 1e15


def encode_layer(
    basis: Basis, layer: int, below: Tensor | None, kvs: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Code one layer; all tensors are on the CPU.

    Args:
        basis: of the model.
        layer: its index.
        below: the restored layer below, as this function or a decoder returns it; None in layer 0.
        kvs: keys [t, G, Dk], rotated back to position 0, and values [t, G, Dv], in any dtype.

    Returns:
        Rows, uint8 [t, row_bytes], and the restored layer minus its mean, bfloat16 [t, X].

    Raises:
        NotCodable: a number is not finite, or too large.
    """
    layer_basis = basis.layers[layer]
    x = torch.cat([part.flatten(1).float() for part in kvs], 1)
    residual = x - layer_basis.mean
    if layer_basis.predict is not None:
        assert below is not None
        residual -= below.float() @ layer_basis.predict.float()
    components = residual @ layer_basis.forward
    if not (x.isfinite().all() and (components.abs() < _MAX_COMPONENT).all()):
        raise NotCodable(f"KVs of layer {layer} are infinite, not a number, or too large")
    codes = torch.empty_like(components, dtype=torch.uint8)
    gains = torch.empty(len(x), GAINS, dtype=torch.uint8)
    bits = np.array(layer_basis.bits, np.uint8)
    quantise(
        components.numpy(),
        bits,
        basis.layouts[layer].tables().bounds,
        LEVEL_TABLE,
        _ENDS,
        GAIN_TABLE,
        _GUESSES,
        # Weights of errors: components got bits in proportion to what their errors cost.
        np.float32(4.0) ** bits,
        codes.numpy(),
        gains.numpy(),
    )
    factors = components.bfloat16()
    if below is not None:
        factors = torch.cat([factors, below], 1)
    return basis.layouts[layer].pack(codes, gains), product_of(factors, product_matrix(layer_basis))


def product_matrix(layer: LayerBasis) -> Tensor:
    """Return the matrix by which `product_of` multiplies components and then `below`, [C + X, X].

    It is float32 on CPUs that cannot multiply bfloat16 numbers, which would be much slower.
    """
    joined = layer.inverse if layer.predict is None else torch.cat([layer.inverse, layer.predict])
    slow = joined.device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return joined.float() if slow else joined


def product_of(factors: Tensor, matrix: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply bfloat16 factors [t, C + X]; sums are in float32, the result in bfloat16.

    All decoders must round in this way: one that rounds differently from the encoder would deviate
    by a quarter of the error of the codes, because each layer is predicted from the one below.
    """
    if matrix.dtype == torch.bfloat16:
        return torch.mm(factors, matrix, out=out)
    product = factors.float() @ matrix
    return product.bfloat16() if out is None else out.copy_(product)


def kvs_of(basis: Basis, layer: int, restored: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys [t, G, Dk], as at position 0, and values [t, G, Dv] of a restored layer."""
    (heads, key_dim), (value_heads, value_dim) = basis.shapes
    x = restored + basis.layers[layer].mean
    keys, values = x.split([heads * key_dim, value_heads * value_dim], 1)
    return keys.unflatten(1, (heads, key_dim)), values.unflatten(1, (value_heads, value_dim))


def misfit_of(basis: Basis, layer: int, rows: Tensor) -> float:
    """Return how much rows of a layer differ from the text of the calibration.

    This is the mean square of their gains: 1 for text like that of the calibration, and 0 without
    rows or components.
    """
    components = len(basis.layers[layer].bits)
    if not len(rows) or not components:
        return 0.0
    sizes = torch.tensor(group_bounds(components), dtype=torch.float32, device=rows.device).diff()
    factors = torch.from_numpy(GAIN_TABLE).to(rows.device)[gains_of(rows).int()]
    return float((factors.square() @ sizes).mean()) / components
