"""Places chunks one after another: two heaps and the free pages of two tiers, as flat arrays.

`tiers.placement` says by which rule. Tiers are numbered as in `tiers.placement.Tier`: 0 is SSD, 1
the host and 2 the device; of what only caches have, tier t has row t - 1.

    tiers uint8 [chunks]          where each chunk stands
    num_pages uint16 [chunks]     how many pages it takes
    first int32 [chunks]          the first of them, if the chunk is in a cache
    following int32 [2, pages]    the page of the same chunk that comes after each
    heaps, sizes, places, noted   of the chunks in a cache, see `loops.heaps`
    stacks int32 [2, pages]       free pages, the next one last
    free int64 [2]                how many these are

Tables of chunks are not larger than they need be: there may be a billion of them, few of which are
in a cache.
"""

from __future__ import annotations

import numpy as np

from impress_sglang.loops.heaps import HEAP, enter, leave, lowest
from impress_sglang.loops.jit import compiled
from impress_sglang.loops.types import Indices, Int32s, Uint8s, Uint16s

_SSD, _DEVICE = 0, 2
_CHUNKS = "uint8[::1], uint16[::1], int32[::1], int32[:, ::1]"
_STATE = f"{_CHUNKS}, {HEAP}, int32[:, ::1], int64[::1]"


@compiled(f"(int64, {_STATE})")
def release(
    chunk: int,
    tiers: Uint8s,
    num_pages: Uint16s,
    first: Int32s,
    following: Int32s,
    heaps: Indices,
    sizes: Indices,
    places: Int32s,
    noted: Indices,
    stacks: Int32s,
    free: Indices,
) -> None:
    """A chunk leaves its cache."""
    row = tiers[chunk] - 1
    # Who is chosen to be displaced has left the heap before.
    if places[chunk]:
        leave(heaps, sizes, places, noted, row, chunk)
    free[row] += num_pages[chunk]
    page = first[chunk]
    for number in range(num_pages[chunk]):
        stacks[row, free[row] - 1 - number] = page
        page = following[row, page]
    tiers[chunk] = _SSD


@compiled(f"(int64[::1], {_STATE})")
def drop(
    ids: Indices,
    tiers: Uint8s,
    num_pages: Uint16s,
    first: Int32s,
    following: Int32s,
    heaps: Indices,
    sizes: Indices,
    places: Int32s,
    noted: Indices,
    stacks: Int32s,
    free: Indices,
) -> None:
    """Chunks leave the caches that they are in, if any."""
    for number in range(len(ids)):
        if tiers[ids[number]] != _SSD:
            release(
                ids[number],
                tiers,
                num_pages,
                first,
                following,
                heaps,
                sizes,
                places,
                noted,
                stacks,
                free,
            )


@compiled(f"(int64[::1], int64, {_CHUNKS})")
def pages_of(
    ids: Indices,
    width: int,
    tiers: Uint8s,
    num_pages: Uint16s,
    first: Int32s,
    following: Int32s,
) -> Int32s:
    """Pages of chunks, int32 [n, width], with zeros where there are none."""
    found = np.zeros((len(ids), width), np.int32)
    for number in range(len(ids)):
        chunk = ids[number]
        if tiers[chunk] != _SSD:
            page = first[chunk]
            for place in range(num_pages[chunk]):
                if place:
                    page = following[tiers[chunk] - 1, page]
                found[number, place] = page
    return found


@compiled(f"(int64, int64, int64, {_STATE})")
def _occupy(
    chunk: int,
    tier: int,
    priority: int,
    tiers: Uint8s,
    num_pages: Uint16s,
    first: Int32s,
    following: Int32s,
    heaps: Indices,
    sizes: Indices,
    places: Int32s,
    noted: Indices,
    stacks: Int32s,
    free: Indices,
) -> None:
    """A chunk enters a cache, whose free pages do."""
    row = tier - 1
    free[row] -= num_pages[chunk]
    # From the last one to the first, which is on top.
    after = stacks[row, free[row]]
    for place in range(free[row] + 1, free[row] + num_pages[chunk]):
        following[row, stacks[row, place]] = after
        after = stacks[row, place]
    first[chunk] = after
    tiers[chunk] = tier
    enter(heaps, sizes, places, noted, row, chunk, priority)


@compiled(
    f"(int64, int64, int64, int64[::1], int64[::1], uint16[::1], {HEAP}, int64[::1], int64[::1])"
)
def _victims(
    row: int,
    wanted: int,
    priority: int,
    priorities: Indices,
    capacity: Indices,
    num_pages: Uint16s,
    heaps: Indices,
    sizes: Indices,
    places: Int32s,
    noted: Indices,
    free: Indices,
    found: Indices,
) -> int:
    """Members to displace so that `wanted` pages are free, lowest first, which leave their heap.

    They are put into `found`, which has room for as many as pages are wanted. Returns how many; -1,
    and nothing has changed, if one of them is not lower than `priority`.
    """
    if free[row] >= wanted:
        return 0
    if capacity[row] < wanted:
        return -1
    room, count = free[row], 0
    while room < wanted:
        chunk = lowest(heaps, sizes, places, noted, row, priorities)
        if chunk < 0 or priorities[chunk] >= priority:
            for number in range(count):
                own = found[number]
                enter(heaps, sizes, places, noted, row, own, priorities[own])
            return -1
        leave(heaps, sizes, places, noted, row, chunk)
        found[count] = chunk
        count += 1
        room += num_pages[chunk]
    return count


_TOUCHED = "int64[::1], uint8[::1], int32[:, ::1], uint8[::1]"


@compiled(f"(int64, int64, {_CHUNKS}, {_TOUCHED})")
def _remember(
    chunk: int,
    count: int,
    tiers: Uint8s,
    num_pages: Uint16s,
    first: Int32s,
    following: Int32s,
    touched: Indices,
    sources: Uint8s,
    source_pages: Int32s,
    marks: Uint8s,
) -> int:
    """Keep where a chunk stood before anything moved; returns how many are kept."""
    if marks[chunk]:
        return count
    marks[chunk] = 1
    touched[count] = chunk
    sources[count] = tiers[chunk]
    if tiers[chunk] != _SSD:
        page = first[chunk]
        for number in range(num_pages[chunk]):
            source_pages[count, number] = page
            page = following[tiers[chunk] - 1, page]
    return count + 1


@compiled(f"(int64, int64, int64, int64[::1], int64[::1], {_STATE}, {_TOUCHED}, int64[::1])")
def _move(
    chunk: int,
    tier: int,
    count: int,
    priorities: Indices,
    capacity: Indices,
    tiers: Uint8s,
    num_pages: Uint16s,
    first: Int32s,
    following: Int32s,
    heaps: Indices,
    sizes: Indices,
    places: Int32s,
    noted: Indices,
    stacks: Int32s,
    free: Indices,
    touched: Indices,
    sources: Uint8s,
    source_pages: Int32s,
    marks: Uint8s,
    victims: Indices,
) -> tuple[int, int]:
    """Bring a chunk to a tier if it beats who must make room for it.

    Returns:
        How many were displaced, who are in `victims` and in no cache now, -1 if it did not move;
        and how many chunks were touched so far.
    """
    displaced = _victims(
        tier - 1,
        int(num_pages[chunk]),
        priorities[chunk],
        priorities,
        capacity,
        num_pages,
        heaps,
        sizes,
        places,
        noted,
        free,
        victims,
    )
    if displaced < 0:
        return -1, count
    for number in range(displaced + 1):
        own = victims[number] if number < displaced else chunk
        count = _remember(
            own, count, tiers, num_pages, first, following, touched, sources, source_pages, marks
        )
        if tiers[own] != _SSD:
            release(
                own, tiers, num_pages, first, following, heaps, sizes, places, noted, stacks, free
            )
    _occupy(
        chunk,
        tier,
        priorities[chunk],
        tiers,
        num_pages,
        first,
        following,
        heaps,
        sizes,
        places,
        noted,
        stacks,
        free,
    )
    return displaced, count


@compiled(
    f"(int64[::1], int64, int64, int64, int64[::1], int64[::1], {_STATE}, {_TOUCHED}, "
    "int64[::1], int64[::1])"
)
def place(
    order: Indices,
    begin: int,
    refused: int,
    count: int,
    priorities: Indices,
    capacity: Indices,
    tiers: Uint8s,
    num_pages: Uint16s,
    first: Int32s,
    following: Int32s,
    heaps: Indices,
    sizes: Indices,
    places: Int32s,
    noted: Indices,
    stacks: Int32s,
    free: Indices,
    touched: Indices,
    sources: Uint8s,
    source_pages: Int32s,
    marks: Uint8s,
    displaced: Indices,
    dropped: Indices,
) -> tuple[int, int, int]:
    """Place chunks, best first; returns `begin`, `refused` and `count` to go on with.

    Args:
        order: the chunks; none has more pages than `displaced` has room for.
        begin: the first one that was not considered yet.
        refused: chunks of so many pages find no place until something moves.
        count: chunks that were touched so far; their ids, and where they stood before, are in
            `touched`, `sources` and `source_pages`. It ends early when there is no room for more.
        priorities: int64 [chunks].
        capacity: int64 [2], pages of each tier.
        tiers, ..., free: the state.
        touched, sources, source_pages: see there.
        marks: uint8 [chunks], 1 for those that were touched.
        displaced, dropped: int64 [most pages of a chunk], for victims on the device and the host.
    """
    width = len(displaced)
    # Who enters, who makes room for it, and who makes room for them.
    most = 1 + width + width * width
    while begin < len(order) and count + most <= len(touched):
        chunk = order[begin]
        begin += 1
        wanted = int(num_pages[chunk])
        if wanted >= refused and tiers[chunk] == _SSD:
            continue
        moved = False
        # The device first; there stays what does not come from SSD.
        for tier in range(_DEVICE, _SSD, -1):
            if tier < _DEVICE and tiers[chunk] != _SSD:
                break
            victims, count = _move(
                chunk,
                tier,
                count,
                priorities,
                capacity,
                tiers,
                num_pages,
                first,
                following,
                heaps,
                sizes,
                places,
                noted,
                stacks,
                free,
                touched,
                sources,
                source_pages,
                marks,
                displaced,
            )
            if victims < 0:
                continue
            moved = True
            # Who was displaced from the device contends for the host, the best one first.
            for number in range(victims - 1 if tier == _DEVICE else -1, -1, -1):
                _, count = _move(
                    displaced[number],
                    1,
                    count,
                    priorities,
                    capacity,
                    tiers,
                    num_pages,
                    first,
                    following,
                    heaps,
                    sizes,
                    places,
                    noted,
                    stacks,
                    free,
                    touched,
                    sources,
                    source_pages,
                    marks,
                    dropped,
                )
            break
        if moved:
            refused = width + 1
        elif tiers[chunk] == _SSD:
            refused = wanted
    return begin, refused, count
