"""States of layers without KVs (linear attention, Mamba), which SGLang keeps where a prefix ends.

A prefix can be used only where it has one. In the store a state stands behind its prefix, as KVs of
tokens that nobody sends: so it is found, kept, and removed as what was computed behind the prefix.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from torch import Tensor

from impress_sglang.errors import UnsupportedError
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.segment import STATE_TOKEN, Tokens
from impress_sglang.transfer.packed import PackedLayers

STATEFUL = "states of layers without KVs are stored with the others, and only as they are"
# What SGLang keeps beside or instead of states that it can move.
_OTHERS = ("mamba_ckpt_pool", "mamba_v2p_table")


def state_layers(pool: Any, shape: KVShape) -> PackedLayers:
    """The states of a pool of requests, `HybridReqToTokenPool`, in segments of a shape.

    Raises:
        UnsupportedError: SGLang keeps them otherwise.
    """
    own = pool.mamba_pool
    strange = [name for name in _OTHERS if getattr(pool, name, None) is not None]
    strange += [name for name in ("replayssm_write_pos",) if getattr(own, name, None) is not None]
    if strange:
        raise UnsupportedError(f"IMPRESS does not know how states are kept with {strange[0]}")
    whole = [entry[1] for entry in own._iter_transfer_state_entries()]
    if not all(one.is_contiguous() for one in whole):
        raise UnsupportedError("IMPRESS needs the states of each layer in one piece")
    parts = [one.flatten(1).view(torch.uint8) for one in whole]
    size = sum(part.shape[1] for part in parts)
    tokens = -(-size // (shape.num_layers * shape.token_bytes))
    return PackedLayers(shape, 0, lambda: parts, tokens=tokens)


def kinds_of(pool: Any) -> list[tuple[str, str, tuple[int, ...], int]]:
    """What a state consists of, for the identity of a model."""
    return [
        (name, str(one.dtype), tuple(one.shape[1:]), layer)
        for name, one, _, layer in pool.mamba_pool._iter_transfer_state_entries()
    ]


def behind(tokens: Tokens, states: PackedLayers) -> Tokens:
    """A prefix, and the tokens that stand for its state."""
    return np.concatenate([tokens, np.full(states.tokens, STATE_TOKEN, np.int32)])


def last_state(cache: Any, last: Any, most: int) -> tuple[Any, int, Tensor | None]:
    """The last state up to a node of SGLang's tree, behind at most so many tokens.

    Returns its node, how many tokens lead to it, and int64 [1], where it is in the pool.
    """
    count, node = len(cache.path_device_indices(last)), cache.tree_core.node_by_id(last)
    while count:
        slot = node.component_data[ComponentType.MAMBA].value
        if count <= most and slot is not None:
            return node.id, count, slot.long()
        count -= len(node.key)
        node = node.parent
    return last, 0, None
