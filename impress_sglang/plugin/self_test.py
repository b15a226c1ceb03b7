"""Shows at the start that KVs come back as they were, whatever release of SGLang keeps them.

SGLang's pool is given random KVs as a pass gives them to it. They are stored and loaded by the ways
of all KVs, in a store of a moment, into other slots, and SGLang is asked what is there. Nobody uses
a slot yet. Of codes by a basis it shows little: most bases find these KVs unlike all that they
know, so that they come back exactly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import UnsupportedError
from impress_sglang.plugin.capabilities import attention_layers
from impress_sglang.plugin.eligibility import check_plain
from impress_sglang.plugin.pools import (
    PoolLayers,
    full_pool,
    index_keys,
    is_latent,
    pool_of,
    stateful,
    streams_of,
    window_pool,
)
from impress_sglang.plugin.states import behind
from impress_sglang.serving.pool_reader import PoolAccess, PoolLayerReader
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import StoredSpan
from impress_sglang.store.writing import Offer
from impress_sglang.transfer.basis_codec import BasisCodec
from impress_sglang.transfer.filling import FillStats, SlotFiller
from impress_sglang.transfer.packed import PackedLayers

logger = logging.getLogger(__name__)

# More than the tokens of a group of codes, and of a chunk.
MOST_TOKENS = 72
# The most that codes may be off on average, as a share of what is coded.
WORST_ERROR = 0.15


def check_kvs(
    runners: Sequence[Any],
    layers: PoolLayers,
    config: ImpressConfig,
    shape: KVShape,
    codec: BasisCodec | None,
) -> float:
    """Store and load random KVs; returns the seconds that it took.

    `runners` are SGLang's `ModelRunner` of the model, and of draft models with pools of their own,
    after the pools are made and before any request; `layers` and `shape` are of all these.

    Raises:
        UnsupportedError: they are not what they were, or requests are made in another way.
    """
    check_plain()
    began = time.perf_counter()
    # Also where only codes are kept: what is exact shows every error.
    shape = dataclasses.replace(shape, exact=True)
    try:
        with tempfile.TemporaryDirectory(prefix="impress-self-test-") as folder:
            own = ImpressConfig(
                ssd_dir=folder, policy=config.policy, device_gb=0.0, host_gb=0.0, min_free_gb=0.0
            )
            device = layers(0)[0].device
            store = PrefixStore(own, "self-test", shape, device, FileSystem(), codec=codec)
            with contextlib.closing(store), _rows_for(runners[0].token_to_kv_pool):
                error = _error(runners, layers, store, shape, SlotFiller(shape, device, codec))
    except Exception as caught:
        # Whatever it is, requests would meet it as well.
        error = repr(caught)
    if error:
        raise UnsupportedError(
            f"KVs do not come back from a store as they were, with this SGLang on this machine: "
            f"{error}"
        )
    seconds = round(time.perf_counter() - began, 3)
    logger.info("KVs come back as they were, by a self-test of %.2f s", seconds)
    return seconds


def _error(
    runners: Sequence[Any],
    layers: PoolLayers,
    store: PrefixStore,
    shape: KVShape,
    filler: SlotFiller,
) -> str:
    """What goes wrong; empty if nothing does."""
    random = torch.Generator().manual_seed(1)
    size = _size_of(runners[0].token_to_kv_pool)
    count = min(MOST_TOKENS, size // 3)
    used = 1 + torch.randperm(size, generator=random)[: 3 * count].to(layers(0)[0].device)
    # Of the third part nothing may change.
    written, filled, others = used.split(count)
    given, raw = [], list[Tensor]()
    for own in runners:
        pool = own.token_to_kv_pool
        raw += index_keys(full_pool(pool))
        if getattr(pool, "dsa_kv_cache_store_fp8", False):
            # Packed with scales by what attends, and by nothing else.
            raw += [kvs.flatten(1).view(torch.uint8) for kvs in pool.kv_buffer]
        else:
            given.append((pool, _give(own, used, random)))
    for part in raw:
        part[used] = torch.randint_like(part[used], 256)
    right = [part[used] for part in raw]
    forward_stream = runners[0].forward_stream
    spans = _stored(store, np.arange(count, dtype=np.int32), layers.read, written, forward_stream)
    if sum(map(len, spans)) != count:
        return f"only {sum(map(len, spans))} of {count} tokens were stored"
    others_of = [] if layers.packed is None else layers.packed.parts()
    main = full_pool(runners[0].token_to_kv_pool)
    for exact in (True, False)[: 1 + shape.coded]:
        source = store.open_whole(spans, exact=exact)
        for part in others_of:
            # What was loaded before shows nothing.
            part[layers.rows(filled)] = 0
        for layer in range(shape.num_layers):
            stats = FillStats()
            if layers.packed is not None and layer >= layers.packed.first:
                rows = layers.rows(filled)
                layers.packed.fill(filler, layer, source, rows, stats, contextlib.nullcontext)
            else:
                both = layers(layer)
                for own in both:
                    own[filled] = 0
                filler.fill(layer, source, *both, filled, stats, contextlib.nullcontext)
        store.close_source(source)
        for pool, kvs in given:
            for layer, own in enumerate(kvs):
                coded = not shape.raw_layers or pool_of(pool, layer + pool.start_layer) is main
                most = 0.0 if exact or not coded else math.inf if shape.basis else WORST_ERROR
                if error := _difference(pool, layer, own, filled, others, most):
                    return error
    for part, own in zip(raw, right, strict=True):
        now = part[torch.cat([filled, others])]
        if not torch.equal(now, torch.cat([own[:count], own[2 * count :]])):
            return "what sparse attention keeps is other"
    if layers.states is not None and not _comes_back(layers.states, store, filler, forward_stream):
        return "states are others"
    return ""


def _stored(
    store: PrefixStore, tokens: Tokens, read: Any, slots: Tensor, forward_stream: Any
) -> Sequence[StoredSpan]:
    """What is stored of tokens after it was read from slots."""
    access = PoolAccess()
    store.writes.offer(
        "",
        Offer(
            tokens,
            lambda start: PoolLayerReader(read, slots[start:], forward_stream, access),
            on_done=access.revoke,
            abandon=access.revoke,
            min_tokens=1,
        ),
    )
    store.writes.drain()
    return store.match("", tokens).spans


def _comes_back(
    states: PackedLayers, store: PrefixStore, filler: SlotFiller, forward_stream: Any
) -> bool:
    """Whether a state in the first slot is the same after it was stored and loaded to the next."""
    parts = states.parts()
    first, second = torch.arange(1, 3, device=parts[0].device).split(1)
    for part in parts:
        part[first] = torch.randint_like(part[first], 256)
    tokens = behind(np.empty(0, np.int32), states)
    spans = _stored(store, tokens, states.read, first, forward_stream)
    source = store.open_whole(spans, exact=True)
    for layer in range(states.shape.num_layers):
        states.fill(filler, layer, source, second, FillStats(), contextlib.nullcontext)
    store.close_source(source)
    same = all(torch.equal(part[first], part[second]) for part in parts)
    for part in parts:
        part[1:3] = 0
    return same


def _size_of(pool: Any) -> int:
    """How many slots, and rows for windows if there are any, a pool has at least."""
    return int(min(pool.size, getattr(pool, "size_swa", pool.size)))


@contextlib.contextmanager
def _rows_for(pool: Any) -> Iterator[None]:
    """Let each slot of a pool with windows have a row, which is another number."""
    if window_pool(pool) is None:
        yield
        return
    table, size = pool.full_to_swa_index_mapping, _size_of(pool)
    table[1 : size + 1] = torch.arange(size, 0, -1, device=table.device)
    yield
    table[1 : size + 1] = 0


def _rows_in(pool: Any, layer_id: int, slots: Tensor) -> Tensor:
    """Where a layer has slots."""
    whole = pool_of(pool, layer_id) is full_pool(pool)
    return slots if whole else pool.full_to_swa_index_mapping[slots]


def _give(runner: Any, slots: Tensor, random: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Give random KVs [n, G, D] to slots int64 [n] of a pool as a pass does; returns them."""
    pool, given = runner.token_to_kv_pool, []
    where: Any = slots
    if window_pool(pool) is not None:
        where = KVWriteLoc(slots, pool.full_to_swa_index_mapping[slots])
    modules = {own.layer_id: own for own in attention_layers(runner.model)}
    for module in modules.values():
        streams = streams_of(pool_of(pool, module.layer_id), pool.dtype)
        both = [
            torch.randn(len(slots), streams.heads, dim, generator=random).to(pool.dtype)
            for dim in streams.dims
        ]
        if is_latent(full_pool(pool)):
            both = [torch.cat(both, -1), both[0]]
        pool.set_kv_buffer(module, where, *(own.to(slots.device) for own in both))
        given.append((both[0], both[1]))
    assert len(given) == (full_pool(pool).layer_num if stateful(pool) else pool.layer_num)
    return given


def _difference(
    pool: Any, layer: int, own: Sequence[Tensor], filled: Tensor, others: Tensor, most: float
) -> str:
    """What is not in the slots of a layer of a pool as it should be, if errors are `most`."""
    pool = full_pool(pool) if stateful(pool) else pool
    number, count = layer + pool.start_layer, len(filled)
    filled, others = (_rows_in(pool, number, own) for own in (filled, others))
    found = pool.get_key_buffer(number), pool.get_value_buffer(number)
    for kind, kv, now in zip(("keys", "values"), own, found, strict=True):
        if not torch.equal(_rows(now, others), kv[2 * count :].double()):
            return f"{kind} of layer {layer} are in slots of others"
        right = kv[:count].double()
        # The root of the mean square of errors, as a share of that of what is right.
        off = float((_rows(now, filled) - right).norm() / right.norm())
        if not off <= most:
            return f"{kind} of layer {layer} are off by {off:.1%}"
    return ""


def _rows(pool: Tensor, slots: Tensor) -> Tensor:
    """Rows of a pool on the CPU, as float64; those of eight bits cannot be indexed as floats."""
    return pool.view(torch.uint8)[slots].view(pool.dtype).cpu().double()
