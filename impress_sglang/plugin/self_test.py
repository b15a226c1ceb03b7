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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from impress_sglang.codes.planes.codec import NUM_PLANES
from impress_sglang.config import ImpressConfig
from impress_sglang.errors import UnsupportedError
from impress_sglang.plugin.capabilities import attention_layers
from impress_sglang.plugin.eligibility import check_plain
from impress_sglang.plugin.pools import PoolLayers
from impress_sglang.serving.pool_reader import PoolAccess, PoolLayerReader
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import KVShape
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.writing import Offer
from impress_sglang.transfer.filling import FillStats, SlotFiller
from impress_sglang.transfer.kv_codec import KVCodec

logger = logging.getLogger(__name__)

# More than the tokens of a group of codes, and of a chunk.
MOST_TOKENS = 72
# The most that codes of all bits may be off on average, as a share of what is coded.
WORST_ERROR = 0.05


def check_kvs(runner: Any, config: ImpressConfig, shape: KVShape, codec: KVCodec | None) -> float:
    """Store and load random KVs; returns the seconds that it took.

    `runner` is SGLang's `ModelRunner` after its pools are made, before any request.

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
            device = PoolLayers(runner.token_to_kv_pool)(0)[0].device
            store = PrefixStore(own, "self-test", shape, device, FileSystem(), codec=codec)
            with contextlib.closing(store):
                error = _error(runner, store, shape, codec, device)
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
    runner: Any, store: PrefixStore, shape: KVShape, codec: KVCodec | None, device: torch.device
) -> str:
    """What goes wrong; empty if nothing does."""
    pool, random = runner.token_to_kv_pool, torch.Generator().manual_seed(1)
    free = 1 + torch.randperm(pool.size, generator=random)
    count = min(MOST_TOKENS, pool.size // 3)
    # Of the third part nothing may change.
    written, filled, others = free.to(device)[: 3 * count].split(count)
    heads, dims = shape.num_kv_heads, (shape.key_dim, shape.value_dim)
    kvs = [
        [torch.randn(3 * count, heads, dim, generator=random).to(pool.dtype) for dim in dims]
        for _ in range(shape.num_layers)
    ]
    for layer, own in zip(attention_layers(runner.model), kvs, strict=True):
        pool.set_kv_buffer(layer, free.to(device)[: 3 * count], *(kv.to(device) for kv in own))
    tokens, access, layers = np.arange(count, dtype=np.int32), PoolAccess(), PoolLayers(pool)
    store.writes.offer(
        "",
        Offer(
            tokens,
            lambda start: PoolLayerReader(layers, written[start:], runner.forward_stream, access),
            on_done=access.revoke,
            abandon=access.revoke,
            min_tokens=1,
        ),
    )
    store.writes.drain()
    spans = store.match("", tokens).spans
    if sum(map(len, spans)) != count:
        return f"only {sum(map(len, spans))} of {count} tokens were stored"
    filler = SlotFiller(shape, device, codec)
    for planes in (None, NUM_PLANES)[: 1 + shape.coded]:
        source = store.open_whole(spans, planes)
        for layer in range(shape.num_layers):
            fill = layer, source, *layers(layer), filled, FillStats(), contextlib.nullcontext
            filler.fill(*fill)
        store.close_source(source)
        worst = WORST_ERROR if codec is None else math.inf
        most = 0.0 if planes is None else worst
        for layer, own in enumerate(kvs):
            number = layer + pool.start_layer
            for kind, kv, now in zip(
                ("keys", "values"),
                own,
                (pool.get_key_buffer(number), pool.get_value_buffer(number)),
                strict=True,
            ):
                if not torch.equal(_rows(now, others), kv[2 * count :].double()):
                    return f"{kind} of layer {layer} are in slots of others"
                off = _relative(_rows(now, filled), kv[:count])
                if not off <= most:
                    return f"{kind} of layer {layer} are off by {off:.1%}"
    return ""


def _relative(found: Tensor, right: Tensor) -> float:
    """The root of the mean square of errors, as a share of that of what is right."""
    return float((found - right.double()).norm() / right.double().norm())


def _rows(pool: Tensor, slots: Tensor) -> Tensor:
    """Rows of a pool on the CPU, as float64; those of eight bits cannot be indexed as floats."""
    return pool.view(torch.uint8)[slots].view(pool.dtype).cpu().double()
