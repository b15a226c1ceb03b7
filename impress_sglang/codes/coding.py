"""Types of both codecs: a layer in codes, the function that codes it, and pools."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class EncodedLayer(NamedTuple):
    """A layer in codes: `groups`, uint8 [groups, group_bytes].

    With a basis, `groups` are rows of tokens, and `fit` is their `codes.rows.coder.misfit_of`.
    """

    groups: Tensor
    fit: float = 0.0


# Codes a layer, given its number, keys [t, G, Dk] and values [t, G, Dv]. It may raise `NotCodable`.
LayerEncoder = Callable[[int, Tensor, Tensor], EncodedLayer]


class Rows(NamedTuple):
    """Target of the KVs of tokens: rows `slots`, int64 [t], distinct, of pools of keys [n, G, Dk]
    and of values [n, G, Dv]."""

    keys: Tensor
    values: Tensor
    slots: Tensor


# Dtypes of pools that loops fill in place, and of the words that they write.
_WORDS = {torch.bfloat16: torch.uint16, torch.float32: torch.uint32}


@contextlib.contextmanager
def words_of(rows: Rows) -> Iterator[tuple[list[Any], Any]]:
    """Yield pools as arrays of words, and their slots to fill.

    Pools with other dtypes or with gaps are filled through temporary memory.
    """
    *pools, slots = rows
    dtype = pools[0].dtype
    if dtype in _WORDS and all(pool.dtype == dtype and pool.is_contiguous() for pool in pools):
        yield [pool.view(_WORDS[dtype]).numpy() for pool in pools], slots.numpy()
        return
    buffers = [torch.empty(len(slots), *pool.shape[1:]) for pool in pools]
    yield (
        [buffer.view(torch.uint32).numpy() for buffer in buffers],
        torch.arange(len(slots)).numpy(),
    )
    for pool, buffer in zip(pools, buffers, strict=True):
        pool[slots] = buffer.to(pool.dtype)
