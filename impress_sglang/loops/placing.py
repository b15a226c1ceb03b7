"""Places chunks one after another: two heaps and the free pages of two tiers, as flat arrays.

`tiers.placement` describes the rule. Tiers are numbered as in `Tier`: 0 is SSD, 1 the host and 2
the device; in arrays for the caches only, tier t has row t - 1. Tables have as few bytes per chunk
as possible: there may be a billion chunks, few of which are in a cache.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from impress_sglang.loops.heaps import (
    HEAPS,
    REBUILD_SHARE,
    Heaps,
    enter,
    leave,
    leave_marked,
    lowest,
)
from impress_sglang.loops.jit import compiled, tuple_type
from impress_sglang.loops.types import Indices, Int32s, Uint8s, Uint16s

_SSD, _HOST, _DEVICE = 0, 1, 2


class Caches(NamedTuple):
    """Where chunks are, and which pages are free."""

    tiers: Uint8s  # uint8 [chunks], the tier of each
    num_pages: Uint16s  # uint16 [chunks], how many pages each takes
    first: Int32s  # int32 [chunks], the first of these pages, if the chunk is in a cache
    following: Int32s  # int32 [2, pages], the page that follows each in the same chunk
    stacks: Int32s  # int32 [2, pages], stacks of free pages, the next one to be taken last
    free: Indices  # int64 [2], how many pages are free
    capacity: Indices  # int64 [2], pages of each tier
    heaps: Heaps  # The heaps of the chunks in a cache


class Touched(NamedTuple):
    """The places that chunks had before an access moved them, for those that it touched."""

    chunks: Indices  # int64 [n]
    sources: Uint8s  # uint8 [n], their tiers
    pages: Int32s  # int32 [n, width], their pages: the first few, for those that were in a cache
    marks: Uint8s  # uint8 [chunks], 1 for those in `chunks`
    displaced: Indices  # int64 [width], room for chunks that are displaced from the device
    dropped: Indices  # int64 [width], room for chunks that are displaced from the host


CACHES = tuple_type(
    Caches,
    "uint8[::1], uint16[::1], int32[::1], int32[:, ::1], int32[:, ::1], int64[::1], int64[::1]",
    HEAPS,
)
TOUCHED = tuple_type(
    Touched, "int64[::1], uint8[::1], int32[:, ::1], uint8[::1], int64[::1], int64[::1]"
)


@compiled((CACHES, "int64"), makes_arrays=False)
def _free_pages(caches: Caches, chunk: int) -> None:
    row, count = int(caches.tiers[chunk]) - 1, int(caches.num_pages[chunk])
    page = caches.first[chunk]
    top = caches.free[row] + count
    for number in range(1, count + 1):
        caches.stacks[row, top - number] = page
        page = caches.following[row, page]
    caches.free[row] = top
    caches.tiers[chunk] = _SSD


@compiled((CACHES, "int64[::1]", "int64"), makes_arrays=False)
def _drop_from(caches: Caches, ids: Indices, tier: int) -> None:
    """Remove those of the chunks that are in a tier from it."""
    row, leaving = tier - 1, 0
    for number in range(len(ids)):
        leaving += caches.tiers[ids[number]] == tier
    many = leaving * REBUILD_SHARE > caches.heaps.sizes[row]
    for number in range(len(ids) if leaving else 0):
        chunk = ids[number]
        if caches.tiers[chunk] == tier:
            if many:
                caches.heaps.places[chunk] = 0
            else:
                leave(caches.heaps, row, chunk)
            _free_pages(caches, chunk)
    if many:
        leave_marked(caches.heaps, row)


@compiled((CACHES, "int64[::1]"), makes_arrays=False)
def drop(caches: Caches, ids: Indices) -> None:
    """Remove chunks from the caches that they are in, if any."""
    for tier in range(_HOST, _DEVICE + 1):
        _drop_from(caches, ids, tier)


@compiled((CACHES, "int64", "int32[:, ::1]", "int64"), makes_arrays=False)
def _copy_pages(caches: Caches, chunk: int, pages: Int32s, place: int) -> None:
    """Write the pages of a chunk, if it has any, to a row of `pages`."""
    row = int(caches.tiers[chunk]) - 1
    if row >= 0:
        page = caches.first[chunk]
        for number in range(caches.num_pages[chunk]):
            pages[place, number] = page
            page = caches.following[row, page]


@compiled((CACHES, "int64[::1]", "int64"))
def pages_of(caches: Caches, ids: Indices, width: int) -> Int32s:
    """Pages of chunks, int32 [n, width]; undefined where there are none."""
    found = np.empty((len(ids), width), np.int32)
    for number in range(len(ids)):
        _copy_pages(caches, ids[number], found, number)
    return found


@compiled((CACHES, "int64", "int64"), makes_arrays=False)
def _occupy(caches: Caches, chunk: int, tier: int) -> None:
    """Put a chunk into a cache that has enough free pages."""
    row = tier - 1
    top = caches.free[row]
    rest = top - caches.num_pages[chunk]
    # From the last one to the first, which is on top.
    after = caches.stacks[row, rest]
    for place in range(rest + 1, top):
        page = caches.stacks[row, place]
        caches.following[row, page] = after
        after = page
    caches.free[row] = rest
    caches.first[chunk] = after
    caches.tiers[chunk] = tier
    enter(caches.heaps, row, chunk)


@compiled((CACHES, "int64", "int64", "int64", "int64[::1]"), makes_arrays=False)
def _victims(caches: Caches, row: int, wanted: int, priority: int, found: Indices) -> int:
    """Find members to displace so that `wanted` pages get free; they leave the heap, lowest first.

    They are put into `found`, which has room for `wanted` chunks. Returns how many there are; -1,
    with nothing changed, if one of them is not lower than `priority`.
    """
    heaps = caches.heaps
    if caches.free[row] >= wanted:
        return 0
    if caches.capacity[row] < wanted:
        return -1
    room, count = caches.free[row], 0
    while room < wanted:
        chunk = lowest(heaps, row)
        if chunk < 0 or heaps.priorities[chunk] >= priority:
            for number in range(count):
                enter(heaps, row, found[number])
            return -1
        leave(heaps, row, chunk)
        found[count] = chunk
        count += 1
        room += caches.num_pages[chunk]
    return count


@compiled((CACHES, "int64", "int64", TOUCHED), makes_arrays=False)
def _remember(caches: Caches, chunk: int, count: int, touched: Touched) -> int:
    """Remember where a chunk was before it moved; returns how many are remembered."""
    if touched.marks[chunk]:
        return count
    touched.marks[chunk] = 1
    touched.chunks[count] = chunk
    touched.sources[count] = caches.tiers[chunk]
    _copy_pages(caches, chunk, touched.pages, count)
    return count + 1


@compiled((CACHES, "int64", "int64", "int64", TOUCHED, "int64[::1]"), makes_arrays=False)
def _move(
    caches: Caches, chunk: int, tier: int, count: int, touched: Touched, victims: Indices
) -> tuple[int, int]:
    """Bring a chunk to a tier if it beats those that must make room for it.

    Returns:
        How many chunks were displaced, which are in `victims` and in no cache now, -1 if it did not
        move; and how many chunks were touched so far.
    """
    priority = caches.heaps.priorities[chunk]
    displaced = _victims(caches, tier - 1, int(caches.num_pages[chunk]), priority, victims)
    if displaced < 0:
        return -1, count
    for number in range(displaced):
        count = _remember(caches, victims[number], count, touched)
        _free_pages(caches, victims[number])
    count = _remember(caches, chunk, count, touched)
    if caches.tiers[chunk] != _SSD:
        # Displaced chunks have left their heap already.
        leave(caches.heaps, int(caches.tiers[chunk]) - 1, chunk)
        _free_pages(caches, chunk)
    _occupy(caches, chunk, tier)
    return displaced, count


@compiled((CACHES, "int64[::1]", "int64", "int64", "int64", TOUCHED), makes_arrays=False)
def place(
    caches: Caches, order: Indices, begin: int, refused: int, count: int, touched: Touched
) -> tuple[int, int, int]:
    """Place chunks int64 [n], best first; returns `begin`, `refused` and `count` to go on with.

    `begin` is the first that was not considered yet, `count` how many were touched so far: the loop
    ends early when there is no room for more. Chunks of `refused` pages or more find no place until
    something moves. None has more pages than `touched.displaced` has places.
    """
    width = len(touched.displaced)
    # A chunk that enters, those that make room for it, and those that make room for these.
    most = 1 + width + width * width
    while begin < len(order) and count + most <= len(touched.chunks):
        chunk = order[begin]
        begin += 1
        wanted = int(caches.num_pages[chunk])
        from_ssd = caches.tiers[chunk] == _SSD
        if wanted >= refused and from_ssd:
            continue
        # Try the device first; a chunk that is refused there stays where it is, if in a cache.
        victims, count = _move(caches, chunk, _DEVICE, count, touched, touched.displaced)
        moved = victims >= 0
        # Chunks displaced from the device contend for the host, the best one first.
        for number in range(victims - 1, -1, -1):
            loser = touched.displaced[number]
            _, count = _move(caches, loser, _HOST, count, touched, touched.dropped)
        if not moved and from_ssd:
            victims, count = _move(caches, chunk, _HOST, count, touched, touched.displaced)
            moved = victims >= 0
        if moved:
            refused = width + 1
        elif from_ssd:
            refused = wanted
    return begin, refused, count


@compiled((CACHES, "int64[::1]", "uint8[::1]", "int64", "int64[::1]"), makes_arrays=False)
def find_candidates(
    caches: Caches, ids: Indices, tiers: Uint8s, width: int, found: Indices
) -> tuple[int, bool]:
    """Chunks that might move to a better place; if one has a chance, all that could move at all.

    That is because a chunk may displace a larger one and leave room for others. `tiers` uint8 [n]
    are those of the ids; a chunk of no pages, or of more than `width`, never moves. Heaps may be
    put in order.

    Returns:
        How many there are, now in `found` int64 [n] in the order of `ids`, and whether their
        priorities never rise in this order.
    """
    priorities = caches.heaps.priorities
    descending, before = True, np.iinfo(np.int64).max
    highest, smallest, count = np.int64(0), width + 1, 0
    for place in range(len(ids)):
        chunk = ids[place]
        pages, priority = int(caches.num_pages[chunk]), priorities[chunk]
        if tiers[place] == _DEVICE or not 0 < pages <= width:
            continue
        if tiers[place] == _HOST and pages > caches.capacity[_DEVICE - 1]:
            continue
        highest, smallest = max(highest, priority), min(smallest, pages)
        descending = descending and priority <= before
        before = priority
        found[count] = chunk
        count += 1
    if not count or smallest <= max(caches.free[0], caches.free[1]):
        return count, descending
    # Only now, because it may put heaps in order.
    for row in range(2):
        low = lowest(caches.heaps, row)
        if low >= 0 and priorities[low] < highest:
            return count, descending
    return 0, descending


@compiled((CACHES, TOUCHED, "int64"), makes_arrays=False)
def _has_moved(caches: Caches, touched: Touched, place: int) -> bool:
    """Whether a touched chunk is now in a cache, in another place than before."""
    chunk, source = touched.chunks[place], touched.sources[place]
    target = caches.tiers[chunk]
    if source != target or target == _SSD:
        return target != _SSD
    # It may have left its cache and come back.
    page = caches.first[chunk]
    for number in range(caches.num_pages[chunk]):
        if touched.pages[place, number] != page:
            return True
        page = caches.following[target - 1, page]
    return False


@compiled((CACHES, TOUCHED, "int64", "int64[::1]", "int64[::1]"), makes_arrays=False)
def sum_up(
    caches: Caches, touched: Touched, count: int, moved: Indices, evicted: Indices
) -> tuple[int, int]:
    """How many of the first `count` touched chunks move, and the most pages of one.

    Chunks that do not move are removed from `touched`. `moved` int64 [9] is raised by the chunks
    that went from tier to tier, at 3 * source + target; `evicted` int64 [2] gets the last chunk
    that went from each tier to a lower one, if any did.
    """
    moving, width = 0, 0
    for place in range(count):
        chunk, source = touched.chunks[place], touched.sources[place]
        touched.marks[chunk] = 0
        if source != caches.tiers[chunk]:
            moved[3 * source + caches.tiers[chunk]] += 1
            if source > caches.tiers[chunk]:
                evicted[source - 1] = chunk
        if _has_moved(caches, touched, place):
            pages = int(caches.num_pages[chunk])
            if moving < place:
                touched.chunks[moving], touched.sources[moving] = chunk, source
                for number in range(pages if source != _SSD else 0):
                    touched.pages[moving, number] = touched.pages[place, number]
            moving += 1
            width = max(width, pages)
    return moving, width
