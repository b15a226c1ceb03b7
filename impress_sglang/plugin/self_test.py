"""Tests at startup that KVs come back as they were, whatever release of SGLang keeps them.

Random KVs are written to SGLang's pool as a pass would write them. They are stored and loaded
through the normal code path, in a temporary store, into other slots, and read back through SGLang.
No request uses the pool yet. This tests little of codes by a basis: most bases find random KVs
unlike anything that they know, and keep them exactly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import UnsupportedError
from impress_sglang.plugin.eligibility import check_plain
from impress_sglang.plugin.pools import (
    PoolLayers,
    append_state_tokens,
    full_pool,
    index_keys,
    is_latent,
    kv_format_of,
    pool_of,
    window_pool,
)
from impress_sglang.plugin.unsupported import attention_layers
from impress_sglang.serving.pool_reader import PoolLayerReader
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import StoredSpan
from impress_sglang.store.writing import Offer
from impress_sglang.transfer.codecs import Codec
from impress_sglang.transfer.filling import fill, places_in

logger = logging.getLogger(__name__)

# More than the tokens of a group of codes, and of a chunk.
MAX_TOKENS = 72


@dataclasses.dataclass(frozen=True, slots=True)
class _ExpectedRows:
    """Content that a pool was given, `right` [3n, ...], and the index of its rows in SGLang's pool,
    int64 [3n] each.

    The first n rows are stored, the next n filled, and the last n must not change.
    """

    what: str
    find: Callable[[], Tensor]
    rows: tuple[Tensor, ...]
    right: Tensor
    of_model: bool = False
    """Whether these are KVs of the model in layers that attend to all tokens."""

    def difference(self, max_error: float) -> str:
        """Describe what differs, if it is off by more than `max_error` on average; else empty."""
        count, pool, right = -(-len(self.right) // 3), self.find(), self.right.cpu().double()
        # Rows of eight bits cannot be indexed as floats.
        now = pool.view(torch.uint8)[self.rows].view(pool.dtype).cpu().double()
        if not torch.equal(now[2 * count :], right[2 * count :]):
            return f"{self.what} are in slots of others"
        off = float((now[count : 2 * count] - right[:count]).norm() / right[:count].norm())
        return "" if off <= max_error else f"{self.what} are off by {off:.1%}"


def check_kvs(
    runners: Sequence[Any], layers: PoolLayers, policy: str, shape: KVShape, codec: Codec | None
) -> float:
    """Store and load random KVs; returns the seconds that this took.

    `runners` are SGLang's `ModelRunner` of the model, and of draft models with pools of their own,
    after the pools are made and before any request; `layers` and `shape` cover all of these. Raises
    `UnsupportedError` if KVs differ, or requests are made in another way.
    """
    check_plain()
    began = time.perf_counter()
    # Even where only codes are kept: exact KVs show every error.
    shape = dataclasses.replace(shape, exact=True, probe_kv_heads=())
    try:
        with tempfile.TemporaryDirectory(prefix="impress-self-test-") as folder:
            config = ImpressConfig(
                ssd_dir=folder, policy=policy, device_gb=0.0, host_gb=0.0, min_free_gb=0.0
            )
            device = layers(0)[0].device
            store = PrefixStore(config, "self-test", shape, device, FileSystem(), codec=codec)
            with contextlib.closing(store), _rows_for(runners[0].token_to_kv_pool):
                error = _error(runners, layers, store, shape, codec)
    except Exception as caught:
        # Any error here would hit requests as well.
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
    codec: Codec | None,
) -> str:
    """Return the error found; empty if there is none."""
    random, main = torch.Generator().manual_seed(1), runners[0].token_to_kv_pool
    packed, states = layers.packed, layers.states
    count = min(MAX_TOKENS, _size_of(main) // 3)
    used = 1 + torch.randperm(_size_of(main), generator=random)[: 3 * count]
    used = used.to(layers(0)[0].device)
    written, filled, _ = used.split(count)
    rows = layers.rows(filled)
    pool = full_pool(main)
    given = [expected for runner in runners for expected in _give(runner, used, random, pool)]
    stream = runners[0].forward_stream
    spans = _stored(store, np.arange(count, dtype=np.int32), layers.read, written, stream)
    if sum(map(len, spans)) != count:
        return f"only {sum(map(len, spans))} of {count} tokens were stored"
    for exact in (True, False)[: 1 + shape.coded]:
        source = store.readers.open(spans, exact=exact)
        for part in () if packed is None else packed.parts():
            # Clear KVs of the previous load.
            part[places_in(part, rows)] = 0
        for layer in range(shape.num_layers):
            own_rows = packed is not None and layer >= packed.first
            with layers.into(layer, rows if own_rows else filled) as into:
                for kvs in into[:2]:
                    kvs[into.slots] = 0
                fill(layer, source, source.read(layer), into, codec)
        store.close_source(source)
        for expected in given:
            coded = not exact and (expected.of_model or not shape.raw_layers)
            if error := expected.difference(codec.worst_error if codec and coded else 0.0):
                return error
    if states is not None:
        first, second = torch.arange(1, 3, device=used.device).split(1)
        given = [_random("states", part, torch.cat([first, second])) for part in states.parts()]
        tokens = append_state_tokens(np.empty(0, np.int32), states)
        spans = _stored(store, tokens, states.read, first, stream)
        source = store.readers.open(spans, exact=True)
        for layer in range(states.shape.num_layers):
            with states.into(layer, second) as into:
                fill(layer, source, source.read(layer), into, codec)
        store.close_source(source)
        errors = [expected.difference(0.0) for expected in given]
        for part in states.parts():
            part[1:3] = 0
        return max(errors)
    return ""


def _stored(
    store: PrefixStore, tokens: Tokens, read: Any, slots: Tensor, forward_stream: Any
) -> Sequence[StoredSpan]:
    """Store tokens, read from slots, and return their stored spans."""
    abandoned, reading = threading.Event(), threading.Lock()
    store.writes.offer(
        "",
        Offer(
            tokens,
            lambda start: PoolLayerReader(read, slots[start:], forward_stream, abandoned, reading),
            on_done=abandoned.set,
            abandon=abandoned.set,
            min_tokens=1,
        ),
    )
    store.writes.drain()
    return store.match("", tokens).spans


def _size_of(pool: Any) -> int:
    """Return the slots of a pool, or its rows for windows if those are fewer."""
    return int(min(pool.size, getattr(pool, "size_swa", pool.size)))


@contextlib.contextmanager
def _rows_for(pool: Any) -> Iterator[None]:
    """Map each slot of a pool with windows to a row with another number."""
    if window_pool(pool) is None:
        yield
        return
    table, size = pool.full_to_swa_index_mapping, _size_of(pool)
    table[1 : size + 1] = torch.arange(size, 0, -1, device=table.device)
    yield
    table[1 : size + 1] = 0


def _give(
    runner: Any, slots: Tensor, random: torch.Generator, main: Any
) -> Iterator[_ExpectedRows]:
    """Give random KVs to slots, int64 [3n], of a pool as a pass does; `main`: the model's pool."""
    pool = runner.token_to_kv_pool
    full, windows = full_pool(pool), window_pool(pool)
    for part in index_keys(full):
        yield _random("index keys", part, slots)
    if getattr(pool, "dsa_kv_cache_store_fp8", False):
        # Only the attention backend packs these, with their scales.
        for number, kvs in enumerate(pool.kv_buffer):
            yield _random(f"KVs of layer {number}", kvs.flatten(1).view(torch.uint8), slots)
        return
    modules = {module.layer_id: module for module in attention_layers(runner.model)}
    pools = [full] if windows is None else [full, windows]
    assert len(modules) == sum(layer_pool.layer_num for layer_pool in pools)
    rows = slots if windows is None else pool.full_to_swa_index_mapping[slots]
    where = slots if windows is None else KVWriteLoc(slots, rows)
    for layer, module in modules.items():
        layer_pool = pool_of(pool, layer)
        kv_format = kv_format_of(layer_pool, pool.dtype)
        both = [
            torch.randn(len(slots), kv_format.heads, dim, generator=random).to(pool.dtype)
            for dim in kv_format.dims
        ]
        if is_latent(full):
            both = [torch.cat(both, -1), both[0]]
        pool.set_kv_buffer(module, where, *(kv.to(slots.device) for kv in both))
        finds = pool.get_key_buffer, pool.get_value_buffer
        for kind, find, kv in zip(("keys", "values"), finds, both, strict=True):
            find_rows = functools.partial(find, layer)
            pool_slots = slots if layer_pool is full else rows
            yield _ExpectedRows(
                f"{kind} of layer {layer}", find_rows, (pool_slots,), kv, layer_pool is main
            )


def _random(what: str, part: Tensor, rows: Tensor) -> _ExpectedRows:
    """Give random bytes to rows of a part of a pool, uint8 [slots, n]."""
    at = places_in(part, rows)
    right = part[at] = torch.randint_like(part[at], 256)
    return _ExpectedRows(what, lambda: part, at, right)
