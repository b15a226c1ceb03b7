"""Compiles kernels before the first request needs them; a GPU takes seconds for each variant.

Stages: probe, select, load. Triton compiles a kernel for the constants and the kinds of arguments
of a launch. Nearly all of these follow from the shape of the KVs, the identification rule and the
device; lengths of requests choose among a few tiles of scores and two blocks of selection. So the
stages themselves are run here on made-up requests, once for each of these: then everything that
real requests launch is compiled. tests/unit/triton/test_warm_up.py compares the two.

Heads whose dimension is not a multiple of 16 may be an exception: where their vectors begin, and
how far apart they are, differs between requests and models. Such variants are compiled on demand.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from impress_sglang.codes.planes.codec import NUM_PLANES
from impress_sglang.errors import UnsupportedError
from impress_sglang.importance.history import TokenHistory
from impress_sglang.importance.selection import own_tokens
from impress_sglang.importance.selectors import H2OSelector, PaperSelector, TokenSelector
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
from impress_sglang.tiers.slab import PageShape
from impress_sglang.transfer.buffers import BufferPool
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.coded_slots import KernelCodeWriter, put_codes
from impress_sglang.transfer.coded_span import CodedSpan, cached_pages, most_pages
from impress_sglang.transfer.expectation import BlockHistory
from impress_sglang.transfer.frames import CODE_PAGE
from impress_sglang.transfer.geometry import SourceSpan
from impress_sglang.transfer.kv_codec import KernelRestorer, KVCodec, RowRestorer
from impress_sglang.transfer.loader import LayerInputs, LoadStats, PrefixLoader
from impress_sglang.transfer.scoring import kernel_scorer
from impress_sglang.transfer.slots import LayerSlots
from impress_sglang.transfer.source import ReadNeeds, SegmentSource

logger = logging.getLogger(__name__)

# Length of a made-up segment.
SEGMENT_TOKENS = 20
# Tiles are enumerated up to these lengths.
LONGEST_PREFIX = 1 << 20
MOST_NEW_TOKENS = 1 << 12
# Size of each made-up cache.
CACHE_PAGES = 2


def warm_up(
    shape: KVShape,
    rule: TokenSelector | None,
    chunk_tokens: int,
    device: torch.device,
    *,
    in_slots: bool = True,
    codec: KVCodec | None = None,
) -> float:
    """Compile all kernels with which requests load their prefixes; on a CPU there are none.

    Args:
        shape: shape of the KVs.
        rule: selects the tokens that a layer uses; None if prefixes are always loaded whole.
        chunk_tokens: tokens per chunk of the store.
        device: where attention runs.
        in_slots: whether layers are loaded into given rows of a pool, not into its first rows.
        codec: codes KVs, if the shape names a basis.

    Returns:
        Seconds that it took.

    Raises:
        UnsupportedError: a kernel of this shape does not fit into the device.
    """
    if device.type != "cuda":
        return 0.0
    began = time.perf_counter()
    run_stages(shape, rule, chunk_tokens, device, in_slots=in_slots, codec=codec)
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    logger.info("kernels that load prefixes are compiled (%.1f s)", seconds)
    return seconds


def run_stages(
    shape: KVShape,
    rule: TokenSelector | None,
    chunk_tokens: int,
    device: torch.device,
    *,
    in_slots: bool = True,
    codec: KVCodec | None = None,
) -> None:
    """Launch all kernels in all their variants, also in Triton's interpreter; see `warm_up`."""
    if rule is not None:
        _score(shape, device)
        with _fitting(shape, "choosing tokens", "--impress-policy as, which loads whole prefixes"):
            _choose(shape, device)
    if shape.exact:
        with _fitting(shape, "loading KVs", "--impress-policy recompute, which loads none"):
            # Without a basis, of which all layers are needed.
            plain = replace(shape, num_layers=1, basis="", row_bytes_of_layers=())
            _load(plain, rule, chunk_tokens, device, in_slots=in_slots)
    if codec is not None:
        with _fitting(shape, "loading codes", "no --impress-basis"):
            _load_codes(shape, chunk_tokens, device, codec)
    elif shape.coded:
        with _fitting(shape, "loading codes", "--impress-policy paper, which has none"):
            _load_codes(replace(shape, num_layers=1), chunk_tokens, device)


@contextlib.contextmanager
def _fitting(shape: KVShape, what: str, instead: str) -> Iterator[None]:
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


def _score(shape: KVShape, device: torch.device) -> None:
    """Score the keys of probe heads, if there are any, and of all other heads."""
    with _fitting(shape, "scoring keys", "--impress-policy as, which loads whole prefixes"):
        for heads in (shape.probe_kv_heads, shape.other_kv_heads):
            if heads:
                _score_all_tiles(shape, heads, device)


def _score_all_tiles(shape: KVShape, heads: tuple[int, ...], device: torch.device) -> None:
    """Score keys of some heads, with and without resident keys."""

    def zeros(tokens: int, num_heads: int) -> Tensor:
        return torch.zeros(tokens, num_heads, shape.key_dim, dtype=shape.dtype, device=device)

    for new, tokens in _lengths_of_tiles(shape, len(heads), device):
        prefix = zeros(tokens, len(heads))
        queries = zeros(new, len(heads) * shape.group_size)
        new_keys = zeros(new, shape.num_kv_heads)
        resident_keys = zeros(1, shape.num_kv_heads)
        for resident in (0, 1):
            kernel_scorer().column_sums(
                queries,
                prefix,
                resident_keys,
                new_keys,
                heads,
                1.0,
                resident_rows=torch.zeros(resident, dtype=torch.int64, device=device),
            )


def _lengths_of_tiles(
    shape: KVShape, num_heads: int, device: torch.device
) -> list[tuple[int, int]]:
    """Numbers of new and of prefix tokens, one pair for each tile shape that occurs."""
    from impress_sglang.triton import scores

    processors = scores.INTERPRETED_PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    found: dict[scores.Tile, tuple[int, int]] = {}
    # Short lengths first: long ones take memory.
    for tokens in _powers_of_two(LONGEST_PREFIX):
        for new in _powers_of_two(MOST_NEW_TOKENS):
            tile = scores.tile_shape(
                new, tokens, num_heads, shape.group_size, shape.key_dim, shape.dtype, processors
            )
            found.setdefault(tile, (new, tokens))
    return list(found.values())


def _powers_of_two(most: int) -> list[int]:
    return [1 << bit for bit in range(most.bit_length())]


def _choose(shape: KVShape, device: torch.device) -> None:
    """Choose tokens of a short and of a long prefix."""
    from impress_sglang.triton.selection import SMALL_BLOCK

    for tokens in (2, SMALL_BLOCK + 1):
        scores = torch.zeros(shape.num_query_heads, tokens, dtype=torch.float32, device=device)
        own_tokens(scores, shape.group_size, 1)


def _load(
    shape: KVShape,
    rule: TokenSelector | None,
    chunk_tokens: int,
    device: torch.device,
    *,
    in_slots: bool,
) -> None:
    """Move chunks, and load a layer of requests with one segment and with two."""
    page = PageShape.of(shape, chunk_tokens)
    with contextlib.ExitStack() as at_end:
        cache = _cache(page, page.max_chunk_pages(shape), device, at_end)
        # A store may have segments that were written with another size of chunks.
        spans = [_span(shape, own, cache, at_end) for own in (chunk_tokens, 2 * chunk_tokens)]
        reader, pool = _reading(cache, at_end)
        # Rows of the second one are never found in chunks by kernels.
        for prefix in (spans[:1], spans[1:], spans):
            num_tokens = sum(map(len, prefix))
            branches = [] if rule is None else _branches(rule)
            wanted = [(branch, num_tokens // 2 + 1) for branch in branches]
            # For a whole prefix no rule is asked.
            for used, k in (*wanted, (H2OSelector(), num_tokens)):
                source = SegmentSource(shape, prefix, reader, pool, cache, ReadNeeds())
                at_end.callback(source.close)
                slots = _slots(shape, k, device, in_slots=in_slots)
                loader = PrefixLoader(shape, used, kernel_scorer())
                loader.load(0, source, _inputs(shape, device), slots, LoadStats())


def _load_codes(
    shape: KVShape, chunk_tokens: int, device: torch.device, codec: KVCodec | None = None
) -> None:
    """Move blocks, and load a layer in all bits that there are; with a basis, all layers."""
    with contextlib.ExitStack() as at_end:
        segment = _Zeros(shape, chunk_tokens)
        at_end.callback(segment.close)
        layouts = segment.layout.codes
        cache = _cache(CODE_PAGE, max(map(most_pages, layouts)), device, at_end)
        reader, pool = _reading(cache, at_end)
        base = cache.attach(cached_pages(layouts))
        span = CodedSpan(segment, 0, SEGMENT_TOKENS, base)
        source = CodedSource([span], reader, pool, cache, NUM_PLANES)
        at_end.callback(source.close)
        slots = _slots(shape, SEGMENT_TOKENS, device, in_slots=True)
        assert slots.keys.rows is not None
        pools, rows = (slots.keys.pool, slots.values.pool), slots.keys.rows
        if codec is None:
            put_codes(KernelCodeWriter(device), source, source.read(0), *pools, rows)
            return
        restorer = RowRestorer(codec, device, KernelRestorer(codec, device))
        for layer in range(shape.num_layers):
            restorer.put(layer, source, source.read(layer), *pools, rows)


def _cache(
    page: PageShape, max_chunk_pages: int, device: torch.device, at_end: contextlib.ExitStack
) -> ChunkCache:
    """Make a small cache in which chunks have moved."""
    size = CACHE_PAGES * page.page_bytes
    cache = ChunkCache(
        page,
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
    pool = BufferPool(1 << 62, pin=pin, spare_bytes=cache.page.page_bytes)
    at_end.callback(pool.close)
    return reader, pool


def _branches(rule: TokenSelector) -> list[TokenSelector]:
    """Rules that together request everything that a rule may, if k is more than half of m.

    Then the sets of heads overlap, and with the exponents 0 and infinity they are never and always
    alike enough.
    """
    if isinstance(rule, PaperSelector):
        return [replace(rule, alpha=alpha) for alpha in (0.0, math.inf)]
    return [rule]


def _inputs(shape: KVShape, device: torch.device) -> LayerInputs:
    queries, keys, resident = (
        torch.zeros(tokens, heads, shape.key_dim, dtype=shape.dtype, device=device)
        for tokens, heads in (
            (1, shape.num_query_heads),
            (1, shape.num_kv_heads),
            (1, shape.num_kv_heads),
        )
    )
    rows = torch.zeros(0, dtype=torch.int64, device=device)
    return LayerInputs(queries, keys, resident, 1.0, rows)


def _slots(shape: KVShape, k: int, device: torch.device, *, in_slots: bool) -> LayerSlots:
    slots = LayerSlots.fresh(k, shape, device)
    if not in_slots:
        return slots
    return LayerSlots.of(slots.keys.pool, slots.values.pool, torch.arange(k, device=device))


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
        self.floors = np.zeros(self.info.floors_shape, np.uint8)
        self.sinks = np.zeros(self.info.sinks_shape, np.uint8)
        self.fits = np.zeros(self.info.fits_shape, np.float32)
        self.files = FileSystem()
        self.descriptor = os.open("/dev/zero", os.O_RDONLY)

    def check_blocks(self, memory: AlignedMemory, offset: int, blocks: Integers) -> None:
        """See `OpenSegment`."""


def _span(
    shape: KVShape, chunk_tokens: int, cache: ChunkCache, at_end: contextlib.ExitStack
) -> SourceSpan:
    """A span of all tokens of a made-up segment."""
    segment = _Zeros(shape, chunk_tokens)
    at_end.callback(segment.close)
    layout = segment.layout
    history = TokenHistory(shape.num_layers, shape.num_head_groups, SEGMENT_TOKENS)
    blocks = BlockHistory(layout, np.zeros(layout.total_chunks))
    base = cache.attach(cache.page.chunk_pages(layout))
    return SourceSpan(segment, 0, SEGMENT_TOKENS, base, history, blocks)
