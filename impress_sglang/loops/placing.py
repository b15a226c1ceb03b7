"""Places chunks one after another: two heaps and the free pages of two tiers, as flat arrays.

`tiers.placement` says by which rule. Tiers are numbered as in `tiers.placement.Tier`: 0 is SSD, 1
the host and 2 the device; of what only caches have, tier t has row t - 1.

Tables of chunks are not larger than they need be: there may be a billion of them, few of which are
in a cache.
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
from impress_sglang.loops.jit import array_type, compiled, tuple_type
from impress_sglang.loops.types import Indices, Int32s, Uint8s, Uint16s

_SSD, _HOST, _DEVICE = 0, 1, 2


class Caches(NamedTuple):
    """Where chunks stand, and which pages are free."""

    tiers: Uint8s
    """uint8 [chunks], where each stands."""
    num_pages: Uint16s
    """uint16 [chunks], how many pages it takes."""
    first: Int32s
    """int32 [chunks], the first of them, if the chunk is in a cache."""
    following: Int32s
    """int32 [2, pages], the page of the same chunk that comes after each."""
    stacks: Int32s
    """int32 [2, pages], free pages, the next one last."""
    free: Indices
    """int64 [2], how many these are."""
    capacity: Indices
    """int64 [2], pages of each tier."""
    heaps: Heaps
    """Of the chunks in a cache."""


class Touched(NamedTuple):
    """Where chunks stood before an access moved them, as far as it did."""

    chunks: Indices
    """int64 [n]."""
    sources: Uint8s
    """uint8 [n], their tiers."""
    pages: Int32s
    """int32 [n, width], of which those that were in a cache have used the first."""
    marks: Uint8s
    """uint8 [chunks], 1 for those that are here."""
    displaced: Indices
    """int64 [width], room for who is displaced from the device."""
    dropped: Indices
    """int64 [width], room for who is displaced from the host."""


_INTEGERS = array_type(np.int64)
CACHES = tuple_type(
    Caches,
    array_type(np.uint8),
    array_type(np.uint16),
    array_type(np.int32),
    array_type(np.int32, 2),
    array_type(np.int32, 2),
    _INTEGERS,
    _INTEGERS,
    HEAPS,
)
TOUCHED = tuple_type(
    Touched,
    _INTEGERS,
    array_type(np.uint8),
    array_type(np.int32, 2),
    array_type(np.uint8),
    _INTEGERS,
    _INTEGERS,
)


@compiled((CACHES, "int64"), makes_arrays=False)
def _free_pages(caches: Caches, chunk: int) -> None:
    """The pages of a chunk are free, and it stands in no cache."""
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
    """Chunks leave one of the caches, if they are in it."""
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
    """Chunks leave the caches that they are in, if any."""
    for tier in range(_HOST, _DEVICE + 1):
        _drop_from(caches, ids, tier)


@compiled((CACHES, "int64", "int32[:, ::1]", "int64"), makes_arrays=False)
def _copy_pages(caches: Caches, chunk: int, pages: Int32s, place: int) -> None:
    """Write the pages of a chunk, if it has some, to a row of `pages`."""
    row = int(caches.tiers[chunk]) - 1
    if row >= 0:
        page = caches.first[chunk]
        for number in range(caches.num_pages[chunk]):
            pages[place, number] = page
            page = caches.following[row, page]


@compiled((CACHES, "int64[::1]", "int64"))
def pages_of(caches: Caches, ids: Indices, width: int) -> Int32s:
    """Pages of chunks, int32 [n, width], with anything where there are none."""
    found = np.empty((len(ids), width), np.int32)
    for number in range(len(ids)):
        _copy_pages(caches, ids[number], found, number)
    return found


@compiled((CACHES, "int64", "int64"), makes_arrays=False)
def _occupy(caches: Caches, chunk: int, tier: int) -> None:
    """A chunk enters a cache, whose free pages do."""
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
    """Members to displace so that `wanted` pages are free, lowest first, which leave their heap.

    They are put into `found`, which has room for as many as pages are wanted. Returns how many; -1,
    and nothing has changed, if one of them is not lower than `priority`.
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
    """Keep where a chunk stood before anything moved; returns how many are kept."""
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
    """Bring a chunk to a tier if it beats who must make room for it.

    Returns:
        How many were displaced, who are in `victims` and in no cache now, -1 if it did not move;
        and how many chunks were touched so far.
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
        # Who was displaced has left its heap.
        leave(caches.heaps, int(caches.tiers[chunk]) - 1, chunk)
        _free_pages(caches, chunk)
    _occupy(caches, chunk, tier)
    return displaced, count


@compiled((CACHES, "int64[::1]", "int64", "int64", "int64", TOUCHED), makes_arrays=False)
def place(
    caches: Caches, order: Indices, begin: int, refused: int, count: int, touched: Touched
) -> tuple[int, int, int]:
    """Place chunks, best first; returns `begin`, `refused` and `count` to go on with.

    Args:
        caches: changed in place.
        order: the chunks, int64; none has more pages than there is room for who is displaced.
        begin: the first one that was not considered yet.
        refused: chunks of so many pages find no place until something moves.
        count: chunks that were touched so far. It ends early when there is no room for more.
        touched: changed in place.
    """
    width = len(touched.displaced)
    # Who enters, who makes room for it, and who makes room for them.
    most = 1 + width + width * width
    while begin < len(order) and count + most <= len(touched.chunks):
        chunk = order[begin]
        begin += 1
        wanted = int(caches.num_pages[chunk])
        from_ssd = caches.tiers[chunk] == _SSD
        if wanted >= refused and from_ssd:
            continue
        # The device first; there stays what does not come from SSD.
        victims, count = _move(caches, chunk, _DEVICE, count, touched, touched.displaced)
        moved = victims >= 0
        # Who was displaced from the device contends for the host, the best one first.
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

    A chunk may displace a larger one and leave room for others.

    Args:
        caches: their heaps may be put in order.
        ids: int64 [n].
        tiers: uint8 [n], where they stand.
        width: a chunk of more pages, or of none, never moves.
        found: int64 [n], takes these ids, in their order.

    Returns:
        How many they are, and whether no priority is higher than those before.
    """
    priorities = caches.heaps.priorities
    beaten = np.iinfo(np.int64).max
    for row in range(2):
        low = lowest(caches.heaps, row)
        if low >= 0:
            beaten = min(beaten, priorities[low])
    any_chance, descending, before = False, True, np.iinfo(np.int64).max
    room, count = max(caches.free[0], caches.free[1]), 0
    for place in range(len(ids)):
        chunk = ids[place]
        pages, priority = int(caches.num_pages[chunk]), priorities[chunk]
        if tiers[place] == _DEVICE or not 0 < pages <= width:
            continue
        any_chance = any_chance or priority > beaten or pages <= room
        descending = descending and priority <= before
        before = priority
        found[count] = chunk
        count += 1
    return count if any_chance else 0, descending


@compiled((CACHES, TOUCHED, "int64"), makes_arrays=False)
def _has_moved(caches: Caches, touched: Touched, place: int) -> bool:
    """Whether a chunk that was touched is now elsewhere in a cache."""
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
    """How many of the first `count` chunks that were touched move, and the most pages of one.

    What does not is forgotten: others take its place. `moved` int64 [9], changed in place, is how
    many chunks went from tier to tier, by 3 * source + target; `evicted` int64 [2], changed in
    place, which chunk went from a tier to a lower one last, if any did.
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
