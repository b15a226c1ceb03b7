"""Which blocks of a layer are read, and by which read: loops over chunks and layer buffers.

A layer buffer (`transfer.buffers`) has a place for every block of a part of a layer. `owners`
int16 [blocks] is the number of the read that brings each, -1 for none. Wanted blocks are listed,
ascending: to test every block whether it is wanted would take longer than everything else.
"""

from __future__ import annotations

import numpy as np

from impress_sglang.loops.jit import compiled
from impress_sglang.loops.types import Flags, Indices, Int16s, Int32s, Uint8s

_SSD, _HOST, _DEVICE = 0, 1, 2
_NO_READ = -1


@compiled(
    "(int64[::1], int64[::1], int64[::1], uint8[::1], boolean[::1], int32[:, ::1], boolean[::1])"
)
def find_blocks(
    chunks: Indices,
    first: Indices,
    count: Indices,
    tiers: Uint8s,
    kept: Flags,
    pages: Int32s,
    spared: Flags,
) -> tuple[Uint8s, Indices, Indices]:
    """Where the blocks of chunks are, and which of them must come from SSD.

    Args:
        chunks: int64 [n].
        first: int64 [chunks of the layer], the first block of each.
        count: int64 [chunks of the layer], the number of blocks of each.
        tiers: uint8 [n], the tiers of the chunks.
        kept: bool [n], whether they will be cached: then all of their blocks are wanted.
        pages: int32 [n, width], pages of those that are cached; may be empty if none is.
        spared: bool [blocks of the layer], not wanted unless their chunk is kept.

    Returns:
        For all blocks of the chunks, one after another, the tier, uint8, and the page there or the
        block of the layer, int64; blocks that are wanted from SSD, int64, ascending if the chunks
        are.
    """
    total = 0
    for place in range(len(chunks)):
        total += count[chunks[place]]
    sources, frames = np.empty(total, np.uint8), np.empty(total, np.int64)
    wanted = np.empty(total, np.int64)
    at, asked = 0, 0
    for place in range(len(chunks)):
        chunk, tier = chunks[place], tiers[place]
        blocks, begin = count[chunk], first[chunk]
        for inside in range(blocks):
            sources[at + inside] = tier
            frames[at + inside] = begin + inside if tier == _SSD else pages[place, inside]
        if tier == _SSD:
            for block in range(begin, begin + blocks):
                wanted[asked] = block
                asked += kept[place] or not spared[block]
        at += blocks
    return sources, frames, wanted[:asked].copy()


@compiled("(uint8[::1], int64[::1], int64[::1], int64, int64, int64[::1])")
def block_copies(
    tiers: Uint8s, frames: Indices, begins: Indices, target: int, block_bytes: int, table: Indices
) -> None:
    """Addresses of blocks, and after these where they go, one after another from `target` on.

    `tiers` uint8 [n] and `frames` int64 [n] are those of `find_blocks`, `begins` int64 [tiers] is
    where the frames of each tier begin; `table` int64 [2 * n] receives the addresses.
    """
    count = len(frames)
    for place in range(count):
        table[place] = begins[tiers[place]] + frames[place] * block_bytes
        table[count + place] = target + place * block_bytes


@compiled("(int64[::1], int64[::1], int64[::1], uint8[::1], boolean[::1])")
def uncached_blocks(
    chunks: Indices, first: Indices, count: Indices, tiers: Uint8s, spared: Flags
) -> Indices:
    """Blocks of those chunks that are on SSD alone, int64, ascending if the chunks are.

    `tiers` uint8 [chunks of the layer]; for the rest see `find_blocks`.
    """
    found, asked = np.empty(len(spared), np.int64), 0
    for place in range(len(chunks)):
        chunk = chunks[place]
        if tiers[chunk] == _SSD:
            for block in range(first[chunk], first[chunk] + count[chunk]):
                found[asked] = block
                asked += not spared[block]
    return found[:asked].copy()


@compiled("(int64[::1], int16[::1], int64, int64)")
def claim_blocks(
    wanted: Indices, owners: Int16s, number: int, gap_blocks: int
) -> tuple[Indices, Indices]:
    """Assign the wanted blocks that no read brings to the read `number`, in place.

    Returns:
        Starts and stops, int64 in blocks, of runs that cover them. Runs that are at most
        `gap_blocks` apart are joined: the gap costs less to read than to skip.
    """
    starts, stops = np.empty(len(wanted) + 1, np.int64), np.empty(len(wanted), np.int64)
    runs, reached = 0, -gap_blocks - 1
    for place in range(len(wanted)):
        block = wanted[place]
        if owners[block] == _NO_READ:
            owners[block] = number
            # Without a branch, which would be unpredictable.
            starts[runs] = block
            runs += block - reached > gap_blocks
            reached = block + 1
            stops[runs - 1] = reached
    return starts[:runs].copy(), stops[:runs].copy()


@compiled("(int64[::1], int16[::1], boolean[::1], int64)")
def count_new(wanted: Indices, owners: Int16s, seen: Flags, reads: int) -> Indices:
    """How many of the blocks that were not wanted before each read brings, int64 [1 + reads].

    The first number counts blocks that no read brings. `seen` bool [blocks], changed in place:
    blocks that were wanted at any time.
    """
    found = np.zeros(1 + reads, np.int64)
    for place in range(len(wanted)):
        block = wanted[place]
        found[1 + owners[block]] += not seen[block]
        seen[block] = True
    return found


@compiled("(int64[::1], int16[::1], int64)")
def bringing(wanted: Indices, owners: Int16s, reads: int) -> Flags:
    """Whether each read brings any of the wanted blocks, bool [1 + reads].

    The first flag tells whether there are wanted blocks that no read brings.
    """
    found = np.zeros(1 + reads, np.bool_)
    for place in range(len(wanted)):
        found[1 + owners[wanted[place]]] = True
    return found
