"""Which blocks of a layer are read, and by which read: loops over chunks and over areas.

An area (`transfer.buffers`) has a place for every block of a part of a layer of a segment. `owners`
int16 [blocks] is the number of the read that brings each, -1 for none.
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
) -> tuple[Uint8s, Indices, Flags, Indices]:
    """Where the blocks of chunks are, and which of them must come from SSD.

    Args:
        chunks: int64 [n].
        first: int64 [chunks of the layer], the first block of each.
        count: int64 [chunks of the layer], how many blocks it has.
        tiers: uint8 [n], where the chunks stand.
        kept: bool [n], whether they will be cached: then all of their blocks are wanted.
        pages: int32 [n, width], pages of those that are cached; may be empty if none is.
        spared: bool [blocks of the layer], not wanted unless their chunk is kept.

    Returns:
        Of all blocks of the chunks, one after another, the tier, uint8, and the page there or the
        block of the layer, int64; which blocks of the layer are wanted from SSD, bool; and int64
        [4]: how many these are, and blocks of chunks that were found on SSD, host and device.
    """
    total = 0
    for place in range(len(chunks)):
        total += count[chunks[place]]
    sources, frames = np.empty(total, np.uint8), np.empty(total, np.int64)
    wanted, sums = np.zeros(len(spared), np.bool_), np.zeros(4, np.int64)
    at = 0
    for place in range(len(chunks)):
        chunk, tier = chunks[place], tiers[place]
        blocks, begin = count[chunk], first[chunk]
        sums[1 + tier] += blocks
        for inside in range(blocks):
            sources[at + inside] = tier
            frames[at + inside] = begin + inside if tier == _SSD else pages[place, inside]
        if tier == _SSD:
            for block in range(begin, begin + blocks):
                if kept[place] or not spared[block]:
                    wanted[block] = True
                    sums[0] += 1
        at += blocks
    return sources, frames, wanted, sums


@compiled("(int64[::1], int64[::1], int64[::1], uint8[::1], boolean[::1])")
def uncached_blocks(
    chunks: Indices, first: Indices, count: Indices, tiers: Uint8s, spared: Flags
) -> Flags:
    """Blocks of those of some chunks that are on SSD alone, bool [blocks of the layer].

    `tiers` uint8 [chunks of the layer]; for the rest see `find_blocks`.
    """
    found = np.zeros(len(spared), np.bool_)
    for place in range(len(chunks)):
        chunk = chunks[place]
        if tiers[chunk] == _SSD:
            for block in range(first[chunk], first[chunk] + count[chunk]):
                found[block] = not spared[block]
    return found


@compiled("(boolean[::1], int16[::1], int64, int64)")
def claim_blocks(
    wanted: Flags, owners: Int16s, number: int, gap_blocks: int
) -> tuple[Indices, Indices]:
    """Give the wanted blocks that no read brings to the read `number`, in place.

    Returns:
        Starts and stops, int64 in blocks, of runs that cover them. Runs that are at most
        `gap_blocks` apart are joined: the gap costs less to read than to skip.
    """
    starts, stops = np.empty(len(wanted), np.int64), np.empty(len(wanted), np.int64)
    runs = 0
    for block in range(len(wanted)):
        if wanted[block] and owners[block] == _NO_READ:
            owners[block] = number
            if not runs or block - stops[runs - 1] > gap_blocks:
                starts[runs] = block
                runs += 1
            stops[runs - 1] = block + 1
    return starts[:runs].copy(), stops[:runs].copy()


@compiled("(boolean[::1], int16[::1], boolean[::1], int64)")
def count_new(wanted: Flags, owners: Int16s, seen: Flags, reads: int) -> Indices:
    """How many blocks that were not wanted before each read brings, int64 [reads].

    `seen` bool [blocks], changed in place: those that were wanted at any time.
    """
    found = np.zeros(reads, np.int64)
    for block in range(len(wanted)):
        if wanted[block] and not seen[block]:
            seen[block] = True
            if owners[block] != _NO_READ:
                found[owners[block]] += 1
    return found


@compiled("(boolean[::1], int16[::1], int64)")
def brought_by(wanted: Flags, owners: Int16s, reads: int) -> tuple[Indices, Flags]:
    """The wanted blocks, int64 [n], and whether each read brings some of them.

    The flags, bool [1 + reads], begin with whether no read brings some.
    """
    blocks, found = np.empty(len(wanted), np.int64), np.zeros(1 + reads, np.bool_)
    count = 0
    for block in range(len(wanted)):
        if wanted[block]:
            blocks[count] = block
            count += 1
            found[1 + owners[block]] = True
    return blocks[:count].copy(), found


@compiled("(uint8[::1], int64, int64)")
def units_below(floors: Uint8s, first: int, stop: int) -> Indices:
    """The units from `first` to before `stop` in the planes below the floor of each head.

    `floors` uint8 [heads]. Returns int64 [n, 3]: plane, head, unit, ascending.
    """
    total, planes = 0, 0
    for head in range(len(floors)):
        total += floors[head]
        planes = max(planes, int(floors[head]))
    found = np.empty((total * (stop - first), 3), np.int64)
    at = 0
    for plane in range(planes):
        for head in range(len(floors)):
            if plane < floors[head]:
                for unit in range(first, stop):
                    found[at, 0], found[at, 1], found[at, 2] = plane, head, unit
                    at += 1
    return found
