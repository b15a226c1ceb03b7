"""What SGLang's pools keep of a token in a layer: two streams, found by one adapter for each kind.

A stream is a view [slots, heads, dimensions] of a pool, in the dtype that its bytes are kept in.
Storage cuts, keeps and restores streams without knowing what they are; it calls the first one keys
and the second one values, which they are in most pools. What else a pool keeps (index keys of
sparse attention, rows of windows, drafts) is packed into further layers: `transfer.packed`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from impress_sglang.codes.groups.codec import DIM_GRAIN
from impress_sglang.errors import UnsupportedError
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.packed import PackedLayers

EIGHT_BITS = (
    "are stored as they are, because in few bits they would take four fifths of that or more"
)

LATENT = "latent vectors (MLA) are stored as they are"


class PoolLayers:
    """The streams of the layers of SGLang's pool, without waiting for any."""

    def __init__(self, pool: Any) -> None:
        """`pool`: SGLang's KV pool."""
        self._pool = full_pool(pool)
        self._whole = None if window_pool(pool) is None else pool
        self.packed: PackedLayers | None = None
        """What other pools keep of the same tokens."""
        self.beyond = 0
        """On how many tokens behind its own a slot depends: drafts are given the next one."""
        self.states: PackedLayers | None = None
        """What layers without KVs keep where a prefix ends."""

    def add(
        self, shape: KVShape, pools: Sequence[Any], window: int = 0, *, raw: bool = True
    ) -> KVShape:
        """Take other pools for further layers; returns the shape with these.

        `window`: they are the pool of layers with windows of so many tokens. `raw`: they are kept
        as they are, also where others are coded.
        """

        def parts() -> list[Tensor]:
            layers = (both for own in pools for both in map(PoolLayers(own), range(own.layer_num)))
            rows = [own.flatten(1).view(torch.uint8) for both in layers for own in both]
            return [*rows, *(keys for own in (self._pool, *pools) for keys in index_keys(own))]

        self.packed = PackedLayers(shape, shape.num_layers, parts, window)
        self.beyond = int(len(pools) > 0 and not window)
        count = len(self.packed)
        return dataclasses.replace(
            shape, num_layers=shape.num_layers + count, raw_layers=count if raw else 0
        )

    def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
        """Both streams of a layer, counted from the first of the pool."""
        pool, number = self._pool, layer + self._pool.start_layer
        if is_latent(pool):
            whole = pool.kv_buffer[layer]
            both = whole[..., : pool.kv_lora_rank], whole[..., pool.kv_lora_rank :]
        else:
            both = pool._get_key_buffer(number), pool._get_value_buffer(number)
        # Rows of eight bits cannot be put into a tensor of floats.
        keys, values = (own.view(torch.uint8) if own.itemsize == 1 else own for own in both)
        return keys, values

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """What slots, int64 [t], have of a layer of the store: [t, heads, dimensions] each."""
        if self.packed is not None and layer >= self.packed.first:
            return self.packed.read(layer, self.rows(slots))
        keys, values = (own[slots] for own in self(layer))
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
    """What SGLang's pool keeps.

    Raises:
        UnsupportedError: it is not known how, or the pool keeps more than that.
    """
    try:
        layers = PoolLayers(pool)
        streams = (_latents if is_latent(pool) else _heads)(pool, model_dtype)
        found = [layers(layer) for layer in range(pool.layer_num)]
        bytes_kept = pool.get_kv_size_bytes()
    except (AttributeError, TypeError) as error:
        raise UnsupportedError(
            f"IMPRESS does not know how {type(pool).__name__} keeps KVs: {error}"
        ) from error
    shapes = {(*own.shape[1:], own.dtype) for both in found for own in both}
    if shapes != {(streams.heads, dim, streams.dtype) for dim in streams.dims}:
        raise UnsupportedError(
            f"IMPRESS writes KVs token by token, which {type(pool).__name__} does not hold so: "
            f"layout {getattr(pool, 'kv_cache_layout', shapes)}"
        )
    if getattr(pool, "post_capture_active", False):
        raise UnsupportedError("IMPRESS needs a pool that does not grow")
    total = sum(bytes_kept) if isinstance(bytes_kept, tuple) else bytes_kept
    if total != sum(own.nbytes for own in itertools.chain(*found, index_keys(pool))):
        raise UnsupportedError(
            f"{type(pool).__name__} keeps more than keys and values, which IMPRESS would not store"
        )
    return streams


def full_pool(pool: Any) -> Any:
    """The pool of the layers that keep all tokens."""
    return getattr(pool, "full_kv_pool", pool)


def window_pool(pool: Any) -> Any:
    """The pool of the layers with sliding windows, in which tokens have other rows; None: without.

    Raises:
        UnsupportedError: it is not known how these are kept.
    """
    own = getattr(pool, "swa_kv_pool", None)
    if own is not None and not (
        getattr(pool, "full_layer_nums", 0)
        and pool.swa_req_ring_size is getattr(pool, "request_window", None) is None
        and not pool.swa_uses_full_indices
        and not any(map(is_latent, (pool.full_kv_pool, own)))
    ):
        raise UnsupportedError(
            f"IMPRESS does not know how {type(pool).__name__} keeps layers with sliding windows"
        )
    return own


def stateful(pool: Any) -> bool:
    """Whether layers without KVs have states beside a pool, which has those of others."""
    return hasattr(pool, "full_attention_layer_id_mapping")


def pool_of(pool: Any, layer_id: int) -> Any:
    """The pool that keeps a layer of a model."""
    own = window_pool(pool)
    return (full_pool(pool), own)[own is not None and pool.layers_mapping[layer_id][1]]


def index_keys(pool: Any) -> list[Tensor]:
    """By which sparse attention (DSA) chooses among tokens: uint8 [slots, bytes] of each layer.

    SGLang keeps those of a page in one piece, keys before scales. Prefixes consist of whole pages,
    so each slot may stand for any part of its page.

    Raises:
        UnsupportedError: several tokens share some.
    """
    found = getattr(pool, "index_k_with_scale_buffer", ())
    if found and (pool.index_kpool != 1 or pool.index_kpool_compress):
        raise UnsupportedError("IMPRESS does not store index keys of several tokens (kpool)")
    return [own.view(-1, own.shape[1] // pool.page_size) for own in found if len(own)]


def is_latent(pool: Any) -> bool:
    """Whether a pool has one vector of a token in a layer, from which models make keys and values.

    Its streams are the latent part and the rotary part.
    """
    return hasattr(pool, "kv_lora_rank")


def _latents(pool: Any, _: torch.dtype) -> Streams:
    """Of a pool of latent vectors (MLA)."""
    dims = pool.kv_lora_rank, pool.kv_cache_dim - pool.kv_lora_rank
    return Streams(1, dims, pool.store_dtype, LATENT)


def _heads(pool: Any, model_dtype: torch.dtype) -> Streams:
    """Of a pool of keys and values."""
    dims, no_codes = (pool.head_dim, pool.v_head_dim), ""
    if pool.dtype != model_dtype:
        why = (
            EIGHT_BITS if pool.dtype.itemsize == 1 else f"stay so, for the model has {model_dtype}"
        )
        no_codes = f"KVs in {pool.dtype} {why}"
    elif any(dim % DIM_GRAIN for dim in dims):
        no_codes = f"codes are for vectors of a multiple of {DIM_GRAIN} elements, not for {dims}"
    return Streams(pool.head_num, dims, pool.store_dtype, no_codes)
