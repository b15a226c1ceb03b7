"""Compiles the kernels that load prefixes, before the first request needs them.

A kernel is compiled for the dtypes and sizes of a model, and for how its arguments are aligned. A
made-up segment is loaded in all ways that there are: then everything that real requests launch is
compiled. tests/unit/triton/test_warm_up.py compares the two.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from impress_sglang.errors import UnsupportedError
from impress_sglang.storage.direct_io import AlignedMemory
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.open_segment import Integers, OpenSegment
from impress_sglang.storage.reader import BlockReader
from impress_sglang.storage.segment import SegmentInfo
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.moves import LoadedChunks
from impress_sglang.tiers.placement import Access, Moves, Tier
from impress_sglang.tiers.rules import LeastRecentlyUsed
from impress_sglang.transfer.buffers import BufferPool
from impress_sglang.transfer.filling import FillStats, SlotFiller
from impress_sglang.transfer.kv_codec import KVCodec
from impress_sglang.transfer.sources import CodedSource, ExactSource
from impress_sglang.transfer.stored_source import BLOCK_PAGE
from impress_sglang.transfer.wanted import chunk_pages, most_pages

logger = logging.getLogger(__name__)

# Length of a made-up segment.
SEGMENT_TOKENS = 20
# Size of each made-up cache.
CACHE_PAGES = 2


def warm_up(
    shape: KVShape, chunk_tokens: int, device: torch.device, *, codec: KVCodec | None = None
) -> float:
    """Compile all kernels with which prefixes are loaded; on a CPU there are none.

    Args:
        shape: shape of the KVs.
        chunk_tokens: tokens per chunk of the store.
        device: where attention runs.
        codec: codes KVs, if the shape names a basis.

    Returns:
        Seconds that it took.

    Raises:
        UnsupportedError: a kernel of this shape does not fit into the device.
    """
    if device.type != "cuda":
        return 0.0
    began = time.perf_counter()
    run_stages(shape, chunk_tokens, device, codec=codec)
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    logger.info("kernels that load prefixes are compiled (%.1f s)", seconds)
    return seconds


def run_stages(
    shape: KVShape, chunk_tokens: int, device: torch.device, *, codec: KVCodec | None = None
) -> None:
    """Launch all kernels in all their variants, also in Triton's interpreter; see `warm_up`."""
    # With a basis all layers are needed.
    plain = replace(shape, num_layers=1, basis="", row_bytes_of_layers=())
    if shape.exact:
        with fitting(shape, "loading KVs", "--impress-policy recompute, which loads none"):
            _load(replace(plain, code_bits=0.0), chunk_tokens, device, None)
    if shape.coded:
        instead = "no --impress-basis" if codec else "--impress-policy paper, which has none"
        with fitting(shape, "loading codes", instead):
            _load(plain if codec is None else shape, chunk_tokens, device, codec)


@contextlib.contextmanager
def fitting(shape: KVShape, what: str, instead: str) -> Iterator[None]:
    """Raise an error that says what to do if a kernel does not fit into the device."""
    from triton.runtime.errors import OutOfResources

    try:
        yield
    except OutOfResources as error:
        raise UnsupportedError(
            f"the kernel for {what} does not fit into this GPU: for {shape.group_size} query heads "
            f"per KV head and {shape.key_dim} elements per key ({shape.dtype}) it takes "
            f"{error.required} of {error.name}, and there is {error.limit}; use {instead}"
        ) from error


def _load(shape: KVShape, chunk_tokens: int, device: torch.device, codec: KVCodec | None) -> None:
    """Move chunks, and load all layers."""
    with contextlib.ExitStack() as at_end:
        segment, codes = _Zeros(shape, chunk_tokens), shape.coded
        at_end.callback(segment.close)
        cache = _cache(most_pages(segment.layout, codes=codes), device, at_end)
        first_id = cache.attach(chunk_pages(segment.layout, codes=codes))
        reading = *_reading(cache, at_end), cache
        span = segment, range(SEGMENT_TOKENS), first_id
        source = CodedSource([span], *reading) if codes else ExactSource([span], *reading)
        at_end.callback(source.close)
        filler = SlotFiller(shape, device, codec, kernels=True)
        for layer in range(shape.num_layers):
            slots = _slots(shape, device)
            filler.fill(layer, source, *slots, FillStats(), contextlib.nullcontext)


def _cache(max_chunk_pages: int, device: torch.device, at_end: contextlib.ExitStack) -> ChunkCache:
    """Make a small cache in which chunks have moved."""
    size = CACHE_PAGES * BLOCK_PAGE.page_bytes
    cache = ChunkCache(
        BLOCK_PAGE,
        max_chunk_pages,
        LeastRecentlyUsed(),
        device=device,
        device_bytes=size,
        host_bytes=size,
    )
    at_end.callback(cache.close)
    _move_chunks(cache)
    return cache


def _reading(cache: ChunkCache, at_end: contextlib.ExitStack) -> tuple[BlockReader, BufferPool]:
    """Make a reader and a pool of layer buffers for sources."""
    # The made-up segment is not a file, so nothing can be read from it asynchronously.
    reader = BlockReader(1, FileSystem(), engine="threads")
    at_end.callback(reader.close)
    pin = cache.device.type == "cuda"
    pool = BufferPool(1 << 62, pin=pin)
    at_end.callback(pool.close)
    return reader, pool


def _slots(shape: KVShape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Pools of keys and of values, and rows of them."""
    keys, values = (
        torch.zeros(SEGMENT_TOKENS, shape.num_kv_heads, dim, dtype=shape.dtype, device=device)
        for dim in (shape.key_dim, shape.value_dim)
    )
    return keys, values, torch.arange(SEGMENT_TOKENS, device=device)


def _move_chunks(cache: ChunkCache) -> None:
    """Move a chunk from SSD to the device, and another one from there to the host."""
    loaded = torch.zeros(
        cache.page.page_bytes, dtype=torch.uint8, pin_memory=cache.device.type == "cuda"
    )
    pages = np.zeros((2, 1), np.int32)
    moves = Moves(
        np.arange(2),
        np.ones(2, np.uint16),
        np.array([Tier.SSD, Tier.DEVICE], np.uint8),
        pages,
        np.array([Tier.DEVICE, Tier.HOST], np.uint8),
        pages,
    )
    nothing = np.empty(0, np.uint8), np.empty((0, 0), np.int32), np.empty(0, np.bool_)
    kept = LoadedChunks(loaded, np.zeros(1, np.int64), np.zeros(1, np.int64))
    fence = cache.settle(Access(*nothing, moves), [kept])
    assert fence is not None
    fence.wait()


class _Zeros(OpenSegment):
    """A segment without a file: all its bytes are 0, and none is verified."""

    def __init__(self, shape: KVShape, chunk_tokens: int) -> None:
        tokens = np.zeros(SEGMENT_TOKENS, np.int32)
        self.info = SegmentInfo("warm-up", "", "", "", 0, tokens, shape, chunk_tokens)
        self.layout = self.info.layout()
        self.checksums = np.empty(0, np.uint64)
        self.mapping = None
        self.sinks = np.zeros(self.info.sinks_shape, np.uint8)
        self.fits = np.zeros(self.info.fits_shape, np.float32)
        self.files = FileSystem()
        self.descriptor = os.open("/dev/zero", os.O_RDONLY)

    def check_blocks(self, memory: AlignedMemory, offset: int, blocks: Integers) -> None:
        """See `OpenSegment`."""
