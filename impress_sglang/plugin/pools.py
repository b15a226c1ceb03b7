"""What SGLang's pools keep of a token in a layer, two streams, and who has which of their slots.

A stream is a view [slots, heads, dimensions] of a pool, in the dtype that its bytes are kept in.
Storage cuts, keeps and restores streams without knowing what they are; it calls the first one keys
and the second one values, which they are in most pools. What else a pool keeps (index keys of
sparse attention, rows of windows, drafts) is packed into further layers: `filling.PackedLayers`.

Layers without KVs (linear attention, Mamba) keep a state where a prefix ends, without which it
cannot be used. In the store a state stands behind its prefix, as KVs of tokens that nobody sends:
so it is found, kept, and removed as what was computed behind the prefix.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from torch import Tensor

from impress_sglang.codes.groups.codec import DIM_GRAIN
from impress_sglang.errors import UnsupportedError
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.segment import STATE_TOKEN, Tokens
from impress_sglang.transfer.filling import PackedLayers, StoredLayers

EIGHT_BITS = (
    "are stored as they are, because in few bits they would take four fifths of that or more"
)
LATENT = "latent vectors (MLA) are stored as they are"
STATEFUL = "states of layers without KVs are stored with the others, and only as they are"
# What SGLang keeps beside or instead of states that it can move.
_OTHER_STATES = ("mamba_ckpt_pool", "mamba_v2p_table")


class PoolLayers(StoredLayers):
    """The streams of the layers of SGLang's pool, without waiting for any."""

    def __init__(self, pool: Any) -> None:
        super().__init__(self._of_pool)
        self._pool = full_pool(pool)
        self._whole = None if window_pool(pool) is None else pool
        self.beyond = 0
        """On how many tokens behind its own a slot depends: drafts are given the next one."""

    def add(
        self, shape: KVShape, pools: Sequence[Any], window: int = 0, *, raw: bool = True
    ) -> KVShape:
        """Take other pools for further layers; returns the shape with these.

        `window`: they are the pool of layers with windows of so many tokens. `raw`: they are kept
        as they are, also where others are coded.
        """

        def parts() -> list[Tensor]:
            layers = (
                both for pool in pools for both in map(PoolLayers(pool), range(pool.layer_num))
            )
            rows = [kv.flatten(1).view(torch.uint8) for both in layers for kv in both]
            return [*rows, *(keys for pool in (self._pool, *pools) for keys in index_keys(pool))]

        self.packed = PackedLayers(shape, shape.num_layers, parts, window)
        self.beyond = int(len(pools) > 0 and not window)
        count = len(self.packed)
        return dataclasses.replace(
            shape, num_layers=shape.num_layers + count, raw_layers=count if raw else 0
        )

    def _of_pool(self, layer: int) -> tuple[Tensor, Tensor]:
        """Both streams of a layer, counted from the first of the pool."""
        pool, number = self._pool, layer + self._pool.start_layer
        if is_latent(pool):
            whole = pool.kv_buffer[layer]
            both = whole[..., : pool.kv_lora_rank], whole[..., pool.kv_lora_rank :]
        else:
            both = pool._get_key_buffer(number), pool._get_value_buffer(number)
        # Rows of eight bits cannot be put into a tensor of floats.
        keys, values = (kv.view(torch.uint8) if kv.itemsize == 1 else kv for kv in both)
        return keys, values

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """What slots, int64 [t], have of a layer of the store: [t, heads, dimensions] each."""
        if self.packed is not None and layer >= self.packed.first:
            return self.packed.read(layer, self.rows(slots))
        keys, values = (kv[slots] for kv in self(layer))
        return keys, values

    def number(self, layer_id: int) -> int:
        """Which layer of the store a layer of the model is."""
        if self._whole is None or self.packed is None:
            return layer_id - int(self._pool.start_layer)
        number, windowed = self._whole.layers_mapping[layer_id]
        return int(number) + self.packed.first * windowed

    def rows(self, slots: Tensor) -> Tensor:
        """Where other pools keep the tokens of slots; 0 for nowhere."""
        pool = self._whole
        return slots if pool is None else pool.translate_loc_from_full_to_swa(slots).long()


@dataclasses.dataclass(frozen=True, slots=True)
class Streams:
    """What a pool keeps: the heads of both streams, dimensions of each, and their dtype.

    `no_codes` says why KVs are not coded; empty if they may be.
    """

    heads: int
    dims: tuple[int, int]
    dtype: torch.dtype
    no_codes: str = ""


def streams_of(pool: Any, model_dtype: torch.dtype) -> Streams:
    """What SGLang's pool keeps; `UnsupportedError` if it is not known how, or it keeps more."""
    try:
        layers, kv_format = PoolLayers(pool), _kv_format(pool, model_dtype)
        kvs = [layers(layer) for layer in range(pool.layer_num)]
        bytes_kept = pool.get_kv_size_bytes()
    except (AttributeError, TypeError) as error:
        raise UnsupportedError(
            f"IMPRESS does not know how {type(pool).__name__} keeps KVs: {error}"
        ) from error
    shapes = {(*kv.shape[1:], kv.dtype) for both in kvs for kv in both}
    if shapes != {(kv_format.heads, dim, kv_format.dtype) for dim in kv_format.dims}:
        raise UnsupportedError(
            f"IMPRESS writes KVs token by token, which {type(pool).__name__} does not hold so: "
            f"layout {getattr(pool, 'kv_cache_layout', shapes)}"
        )
    if getattr(pool, "post_capture_active", False):
        raise UnsupportedError("IMPRESS needs a pool that does not grow")
    total = sum(bytes_kept) if isinstance(bytes_kept, tuple) else bytes_kept
    if total != sum(tensor.nbytes for tensor in itertools.chain(*kvs, index_keys(pool))):
        raise UnsupportedError(
            f"{type(pool).__name__} keeps more than keys and values, which IMPRESS would not store"
        )
    return kv_format


def full_pool(pool: Any) -> Any:
    """The pool of the layers that keep all tokens."""
    return getattr(pool, "full_kv_pool", pool)


def window_pool(pool: Any) -> Any:
    """The pool of the layers with sliding windows, in which tokens have other rows; None: without.

    Raises `UnsupportedError` if it is not known how these are kept.
    """
    swa_pool = getattr(pool, "swa_kv_pool", None)
    if swa_pool is not None and not (
        getattr(pool, "full_layer_nums", 0)
        and pool.swa_req_ring_size is getattr(pool, "request_window", None) is None
        and not pool.swa_uses_full_indices
        and not any(map(is_latent, (pool.full_kv_pool, swa_pool)))
    ):
        raise UnsupportedError(
            f"IMPRESS does not know how {type(pool).__name__} keeps layers with sliding windows"
        )
    return swa_pool


def pool_of(pool: Any, layer_id: int) -> Any:
    """The pool that keeps a layer of a model."""
    swa_pool = window_pool(pool)
    return (full_pool(pool), swa_pool)[swa_pool is not None and pool.layers_mapping[layer_id][1]]


def index_keys(pool: Any) -> list[Tensor]:
    """By which sparse attention (DSA) chooses among tokens: uint8 [slots, bytes] of each layer.

    SGLang keeps those of a page in one piece, keys before scales. Prefixes consist of whole pages,
    so each slot may stand for any part of its page. Raises `UnsupportedError` if tokens share some.
    """
    buffers = getattr(pool, "index_k_with_scale_buffer", ())
    if buffers and (pool.index_kpool != 1 or pool.index_kpool_compress):
        raise UnsupportedError("IMPRESS does not store index keys of several tokens (kpool)")
    return [buffer.view(-1, buffer.shape[1] // pool.page_size) for buffer in buffers if len(buffer)]


def is_latent(pool: Any) -> bool:
    """Whether a pool has one vector of a token in a layer, from which models make keys and values.

    Its streams are the latent part and the rotary part.
    """
    return hasattr(pool, "kv_lora_rank")


def _kv_format(pool: Any, model_dtype: torch.dtype) -> Streams:
    if is_latent(pool):
        latent = pool.kv_lora_rank, pool.kv_cache_dim - pool.kv_lora_rank
        return Streams(1, latent, pool.store_dtype, LATENT)
    dims, no_codes = (pool.head_dim, pool.v_head_dim), ""
    if pool.dtype != model_dtype:
        why = (
            EIGHT_BITS if pool.dtype.itemsize == 1 else f"stay so, for the model has {model_dtype}"
        )
        no_codes = f"KVs in {pool.dtype} {why}"
    elif any(dim % DIM_GRAIN for dim in dims):
        no_codes = f"codes are for vectors of a multiple of {DIM_GRAIN} elements, not for {dims}"
    return Streams(pool.head_num, dims, pool.store_dtype, no_codes)


def state_layers(pool: Any, shape: KVShape) -> PackedLayers:
    """The states of a pool of requests, `HybridReqToTokenPool`, in segments of a shape.

    Raises `UnsupportedError` if SGLang keeps them otherwise.
    """
    mamba_pool = pool.mamba_pool
    strange = [name for name in _OTHER_STATES if getattr(pool, name, None) is not None]
    strange += [
        name for name in ("replayssm_write_pos",) if getattr(mamba_pool, name, None) is not None
    ]
    if strange:
        raise UnsupportedError(f"IMPRESS does not know how states are kept with {strange[0]}")
    whole = [entry[1] for entry in mamba_pool._iter_transfer_state_entries()]
    if not all(state.is_contiguous() for state in whole):
        raise UnsupportedError("IMPRESS needs the states of each layer in one piece")
    parts = [state.flatten(1).view(torch.uint8) for state in whole]
    size = sum(part.shape[1] for part in parts)
    tokens = -(-size // (shape.num_layers * shape.token_bytes))
    return PackedLayers(shape, 0, lambda: parts, tokens=tokens)


def kinds_of_states(pool: Any) -> list[tuple[str, str, tuple[int, ...], int]]:
    """What a state consists of, for the identity of a model."""
    return [
        (name, str(state.dtype), tuple(state.shape[1:]), layer)
        for name, state, _, layer in pool.mamba_pool._iter_transfer_state_entries()
    ]


def behind(tokens: Tokens, states: PackedLayers) -> Tokens:
    """A prefix, and the tokens that stand for its state."""
    return np.concatenate([tokens, np.full(states.tokens, STATE_TOKEN, np.int32)])


class Allocation:
    """Takes slots and gives them back; the scheduler's thread owns it.

    With sliding windows the last tokens of a prefix have `rows` of their own beside their slots,
    and SGLang's table says which. A state is one row at the end of a prefix. Both are int64.
    """

    def __init__(self, cache: Any, window: int, *, states: bool = False) -> None:
        """Of the last `window` tokens, in whole pages, rows are needed; `states`: there are any."""
        self._cache = cache
        self._allocator = cache.token_to_kv_pool_allocator
        self._states = cache.req_to_token_pool.mamba_allocator if states else None
        self.window = window
        self.has_rows = bool(window) or states

    def protected_rows(self) -> int:
        """Rows that are locked in SGLang's tree."""
        core = self._cache.tree_core
        return int(core.swa_protected_size() if self.window else core.mamba_protected_size())

    def evict_params(self, slots: int, rows: int) -> EvictParams:
        """What SGLang is to evict."""
        if self._states is not None:
            return EvictParams(slots, mamba_num=rows)
        return EvictParams(slots, rows)

    def available(self) -> tuple[int, int]:
        """Slots and rows that nobody has."""
        if self.window:
            return int(self._allocator.full_available_size()), int(
                self._allocator.swa_available_size()
            )
        rows = 0 if self._states is None else self._states.available_size()
        return int(self._allocator.available_size()), int(rows)

    def is_empty(self) -> bool:
        """Whether nobody has any."""
        all_rows = self._allocator.size_swa if self.window else 0
        if self._states is not None:
            all_rows = self._states.size
        return self.available() == (self._allocator.size_full, all_rows)

    def take(self, count: int) -> tuple[Tensor, Tensor] | None:
        """Slots for so many tokens, and rows, evicting others if need be; None without room."""
        needed = count, min(self.window, count) if self._states is None else 1
        missing = [max(need - free, 0) for need, free in zip(needed, self.available(), strict=True)]
        if any(missing):
            self._cache.evict(self.evict_params(*missing))
        if any(need > free for need, free in zip(needed, self.available(), strict=True)):
            return None
        if self.window:
            slots = self._allocator.full_attn_allocator.alloc(count).to(torch.int64)
            rows = self._allocator.swa_attn_allocator.alloc(needed[1]).to(torch.int64)
            self._allocator.set_full_to_swa_mapping(slots[-len(rows) :], rows)
            return slots, rows
        slots = self._allocator.alloc(count)
        if slots is None:
            return None
        rows = slots[:0] if self._states is None else self._states.alloc(1)
        return slots.to(torch.int64), rows.to(torch.int64)

    def give_back(self, slots: Tensor, rows: Tensor) -> None:
        """Free slots that are in nobody's tree."""
        if not self.window:
            self._allocator.free(slots)
            self.give_rows_back(rows)
            return
        self._allocator.free_swa(slots[-len(rows) :])
        self._allocator.free_full(slots)

    def give_rows_back(self, rows: Tensor) -> None:
        """Free a state that is in nobody's tree."""
        if self._states is not None:
            self._states.free(rows)
