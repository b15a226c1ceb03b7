"""The KV format of SGLang's pools, and the allocation of their slots.

Keys and values are views [slots, heads, dimensions] of a pool, in the dtype of its bytes. Storage
treats them as opaque; for some pools (MLA) they are not keys and values. Other content of a pool
(index keys of sparse attention, SWA KVs, drafts) is packed into further layers:
`filling.PackedLayers`.

Layers without KVs (linear attention, Mamba) keep a state at the end of a prefix, which cannot be
used without it. The store keeps a state as KVs of reserved tokens after its prefix, so that it is
found and removed together with it.
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
# Attributes for states that SGLang keeps in a form that cannot be moved.
_OTHER_STATES = ("mamba_ckpt_pool", "mamba_v2p_table")


class PoolLayers(StoredLayers):
    """Keys and values of the layers of SGLang's pool, without waiting for layer transfers."""

    def __init__(self, pool: Any) -> None:
        super().__init__(self._of_pool)
        self._pool = full_pool(pool)
        self._whole = None if window_pool(pool) is None else pool
        self.draft_offset = 0
        """Number of tokens after its own that a slot depends on: drafts see the next one."""

    def add(
        self, shape: KVShape, pools: Sequence[Any], window: int = 0, *, raw: bool = True
    ) -> KVShape:
        """Add other pools as further layers; returns the extended shape.

        `window`: they are the pool of layers with sliding windows of this many tokens. `raw`: they
        are stored exactly, even if other layers are coded.
        """

        def parts() -> list[Tensor]:
            layers = (map(PoolLayers(pool), range(pool.layer_num)) for pool in pools)
            kvs = itertools.chain.from_iterable(itertools.chain.from_iterable(layers))
            rows = [kv.flatten(1).view(torch.uint8) for kv in kvs]
            return [*rows, *(keys for pool in (self._pool, *pools) for keys in index_keys(pool))]

        self.packed = PackedLayers(shape, shape.num_layers, parts, window)
        self.draft_offset = int(len(pools) > 0 and not window)
        count = len(self.packed)
        return dataclasses.replace(
            shape, num_layers=shape.num_layers + count, raw_layers=count if raw else 0
        )

    def _of_pool(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, counted from the first of the pool."""
        pool, number = self._pool, layer + self._pool.start_layer
        if is_latent(pool):
            whole = pool.kv_buffer[layer]
            both = whole[..., : pool.kv_lora_rank], whole[..., pool.kv_lora_rank :]
        else:
            both = pool._get_key_buffer(number), pool._get_value_buffer(number)
        # Rows of eight bits cannot be copied as floats.
        keys, values = (kv.view(torch.uint8) if kv.itemsize == 1 else kv for kv in both)
        return keys, values

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Read slots, int64 [t], of a layer of the store: [t, heads, dimensions] each."""
        if self.packed is not None and layer >= self.packed.first:
            return self.packed.read(layer, self.rows(slots))
        keys, values = (kv[slots] for kv in self(layer))
        return keys, values

    def number(self, layer_id: int) -> int:
        """Return the layer of the store for a layer of the model."""
        if self._whole is None or self.packed is None:
            return layer_id - int(self._pool.start_layer)
        number, windowed = self._whole.layers_mapping[layer_id]
        return int(number) + self.packed.first * windowed

    def rows(self, slots: Tensor) -> Tensor:
        """Translate slots to rows of the other pools; 0 for none."""
        pool = self._whole
        return slots if pool is None else pool.translate_loc_from_full_to_swa(slots).long()


@dataclasses.dataclass(frozen=True, slots=True)
class KVFormat:
    """Format of a pool's KVs: heads, dimensions of keys and of values, and their dtype.

    `no_codes` says why KVs are not coded; empty if they may be.
    """

    heads: int
    dims: tuple[int, int]
    dtype: torch.dtype
    no_codes: str = ""


def kv_format_of(pool: Any, model_dtype: torch.dtype) -> KVFormat:
    """Return the format of SGLang's pool; `UnsupportedError` if it is unknown, or the pool has
    more."""
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
    """Return the pool of the layers that keep all tokens."""
    return getattr(pool, "full_kv_pool", pool)


def window_pool(pool: Any) -> Any:
    """Return the pool of the layers with sliding windows, which has rows of its own, or None.

    Raises `UnsupportedError` if its layout is unknown.
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
    """Return the pool that has a layer of a model."""
    swa_pool = window_pool(pool)
    return (full_pool(pool), swa_pool)[swa_pool is not None and pool.layers_mapping[layer_id][1]]


def index_keys(pool: Any) -> list[Tensor]:
    """Return the index keys of sparse attention (DSA), and their scales, of each layer: uint8
    [pages, slots of a page, bytes].

    SGLang stores those of a page in one piece, keys before scales. Raises `UnsupportedError` if
    tokens share some.
    """
    buffers = getattr(pool, "index_k_with_scale_buffer", ())
    if buffers and (pool.index_kpool != 1 or pool.index_kpool_compress):
        raise UnsupportedError("IMPRESS does not store index keys of several tokens (kpool)")
    pages = [buffer for buffer in buffers if len(buffer)]
    parts = [page.tensor_split([pool.page_size * pool.index_head_dim], 1) for page in pages]
    flat = itertools.chain.from_iterable(parts)
    return [part.view(len(part), pool.page_size, -1) for part in flat]


def is_latent(pool: Any) -> bool:
    """Whether a pool has one vector per token and layer, from which models make keys and values.

    Its "keys" are the latent part, its "values" the rotary part.
    """
    return hasattr(pool, "kv_lora_rank")


def _kv_format(pool: Any, model_dtype: torch.dtype) -> KVFormat:
    if is_latent(pool):
        latent = pool.kv_lora_rank, pool.kv_cache_dim - pool.kv_lora_rank
        return KVFormat(1, latent, pool.store_dtype, LATENT)
    dims, no_codes = (pool.head_dim, pool.v_head_dim), ""
    if pool.dtype != model_dtype:
        why = (
            EIGHT_BITS if pool.dtype.itemsize == 1 else f"stay so, for the model has {model_dtype}"
        )
        no_codes = f"KVs in {pool.dtype} {why}"
    elif any(dim % DIM_GRAIN for dim in dims):
        no_codes = f"codes are for vectors of a multiple of {DIM_GRAIN} elements, not for {dims}"
    return KVFormat(pool.head_num, dims, pool.store_dtype, no_codes)


def state_layers(pool: Any, shape: KVShape) -> PackedLayers:
    """Return the states of a `HybridReqToTokenPool`, in segments of a shape.

    Raises `UnsupportedError` if SGLang keeps them in another form.
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
    """Describe the parts of a state, for the identity of a model."""
    return [
        (name, str(state.dtype), tuple(state.shape[1:]), layer)
        for name, state, _, layer in pool.mamba_pool._iter_transfer_state_entries()
    ]


def append_state_tokens(tokens: Tokens, states: PackedLayers) -> Tokens:
    """Append the tokens that stand for a state to its prefix."""
    return np.concatenate([tokens, np.full(states.tokens, STATE_TOKEN, np.int32)])


class SlotAllocator:
    """Allocates and frees slots. Thread: scheduler.

    With sliding windows, the last tokens of a prefix have `rows` of their own beside their slots,
    mapped by SGLang's table. A state is one row at the end of a prefix. Both are int64.
    """

    def __init__(self, cache: Any, window: int, *, states: bool = False) -> None:
        """`window`: trailing tokens that need SWA rows, in whole pages; `states`: the model has
        states."""
        self._cache = cache
        self._allocator = cache.token_to_kv_pool_allocator
        self._states = cache.req_to_token_pool.mamba_allocator if states else None
        self.window = window
        self.has_aux = bool(window) or states

    def protected_aux(self) -> int:
        core = self._cache.tree_core
        return int(core.swa_protected_size() if self.window else core.mamba_protected_size())

    def evict_params(self, slots: int, rows: int) -> EvictParams:
        if self._states is not None:
            return EvictParams(slots, mamba_num=rows)
        return EvictParams(slots, rows)

    def available(self) -> tuple[int, int]:
        """Count the free slots and rows."""
        if self.window:
            allocator = self._allocator
            return int(allocator.full_available_size()), int(allocator.swa_available_size())
        rows = 0 if self._states is None else self._states.available_size()
        return int(self._allocator.available_size()), int(rows)

    def is_empty(self) -> bool:
        all_rows = self._allocator.size_swa if self.window else 0
        if self._states is not None:
            all_rows = self._states.size
        return self.available() == (self._allocator.size_full, all_rows)

    def alloc(self, count: int) -> tuple[Tensor, Tensor] | None:
        """Allocate slots for `count` tokens, and their rows, with eviction; None without room."""
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

    def free(self, slots: Tensor, rows: Tensor) -> None:
        """Free slots that are in no tree."""
        if not self.window:
            self._allocator.free(slots)
            self.free_aux(rows)
            return
        self._allocator.free_swa(slots[-len(rows) :])
        self._allocator.free_full(slots)

    def free_aux(self, rows: Tensor) -> None:
        """Free a state that is in no tree."""
        if self._states is not None:
            self._states.free(rows)
