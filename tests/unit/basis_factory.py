"""Codecs with a basis for made-up KVs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from impress_sglang.codes.rotation import KeyRotation
from impress_sglang.codes.rows.basis import RATES, Basis
from impress_sglang.codes.rows.fit import Fit, Metric, Moments
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.basis_codec import BasisCodec
from tests.unit import kv_factory as kv

# Tokens of the text that bases are fitted to.
FITTED = tuple(range(7000, 8700))


def rotation(dim: int, *, halves: bool = True) -> KeyRotation:
    """Of keys whose first half of dimensions is rotated."""

    def table(positions: int) -> Tensor:
        angles = torch.arange(positions)[:, None] / 100.0 ** torch.linspace(0, 1, dim // 4)
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


def fitted(shape: KVShape, rate: float, turning: KeyRotation, model: str = "made up") -> Basis:
    """A basis for KVs as `kv.SequenceKVs` makes them."""
    kvs, moments = kv.SequenceKVs(shape, "", FITTED), Moments()
    places, none = torch.arange(len(FITTED)), torch.zeros(len(FITTED), dtype=torch.int64)
    turns = turning.turns(places, none)
    layers = range(shape.num_layers)
    moments.add([(turning.move(kvs.keys(own).float(), turns), kvs.values(own)) for own in layers])
    return fit(moments, None, rate, fewer={5.0: rate - 1}, model=model)


def codec_for(shape: KVShape, rate: float = 4.0, *, halves: bool = True) -> BasisCodec:
    """A codec for KVs of a shape."""
    turning = rotation(shape.key_dim, halves=halves)
    return BasisCodec(fitted(shape, rate, turning), turning)
