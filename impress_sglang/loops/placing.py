"""Places chunks one after another: two heaps and the free pages of two tiers, as flat arrays.

`tiers.placement` describes the rule. Tiers are numbered as in `Tier`: 0 is SSD, 1 the host and 2
the device; in arrays for the caches only, tier t has row t - 1. Tables have as few bytes per chunk
as possible: there may be a billion chunks, few of which are in a cache.
"""

from __future__ import annotations

from typing import NamedTuple

from impress_sglang.loops.heaps import HEAPS, Heaps, enter, leave, lowest
from impress_sglang.loops.jit import compiled, tuple_type
from impress_sglang.loops.types import Indices, Int32s, Uint8s, Uint16s

_SSD, _HOST, _DEVICE = 0, 1, 2


class Caches(NamedTuple):
    """Where chunks are, and which pages are free."""

    tiers: Uint8s  # uint8 [chunks], the tier of each
    num_pages: Uint16s  # uint16 [chunks], how many pages each takes
    first: Int32s  # int32 [chunks], the first of these pages, if the chunk is in a cache
    following: Int32s  # int32 [2, pages], the page behind each in the same chunk, or of free ones
    free: Indices  # int64 [2], how many pages are free
    first_free: Indices  # int64 [2], the first of these, if there are any
    capacity: Indices  # int64 [2], pages of each tier
    heaps: Heaps  # The heaps of the chunks in a cache


class Journal(NamedTuple):
    """The places that chunks had before an access, for those that it touched."""

    chunks: Indices  # int64 [n]
    sources: Uint8s  # uint8 [n], their tiers
    pages: Indices  # int64, their pages, chunk after chunk; 0, 1, 2, ... of one that is on SSD
    sizes: Indices  # int64 [2], how many chunks and pages were noted
    marks: Uint8s  # uint8 [all chunks], 1 for those in `chunks`
    displaced: Indices  # int64 [width], room for chunks that are displaced from the device
    dropped: Indices  # int64 [width], room for chunks that are displaced from the host


CACHES = tuple_type(
    Caches,
    "uint8[::1], uint16[::1], int32[::1], int32[:, ::1], int64[::1], int64[::1], int64[::1]",
    HEAPS,
)
JOURNAL = tuple_type(
    Journal, "int64[::1], uint8[::1], int64[::1], int64[::1], uint8[::1], int64[::1], int64[::1]"
)


@compiled((CACHES, "int64"), makes_arrays=False)
def _free_pages(caches: Caches, chunk: int) -> None:
    row, count = int(caches.tiers[chunk]) - 1, int(caches.num_pages[chunk])
    last = caches.first[chunk]
    for _ in range(1, count):
        last = caches.following[row, last]
    caches.following[row, last] = caches.first_free[row]
    caches.first_free[row] = caches.first[chunk]
    caches.free[row] += count
    caches.tiers[chunk] = _SSD


@compiled((CACHES, "int64", "int64"), makes_arrays=False)
def _occupy(caches: Caches, chunk: int, tier: int) -> None:
    """Put a chunk into a cache that has enough free pages."""
    row, count = tier - 1, int(caches.num_pages[chunk])
    last = caches.first_free[row]
    caches.first[chunk] = last
    for _ in range(1, count):
        last = caches.following[row, last]
    caches.first_free[row] = caches.following[row, last]
    caches.free[row] -= count
    caches.tiers[chunk] = tier
    enter(caches.heaps, row, chunk)


@compiled((CACHES, "int64[::1]"), makes_arrays=False)
def drop(caches: Caches, ids: Indices) -> None:
    """Remove chunks from the caches that they are in, if any."""
    for number in range(len(ids)):
        chunk = ids[number]
        if caches.tiers[chunk] != _SSD:
            leave(caches.heaps, int(caches.tiers[chunk]) - 1, chunk)
            _free_pages(caches, chunk)


@compiled((CACHES, "int64", "int64[::1]", "int64"), makes_arrays=False)
def _put_pages(caches: Caches, chunk: int, found: Indices, end: int) -> int:
    """Append the pages of a chunk to the first `end` found; returns how many there are then."""
    row, page = int(caches.tiers[chunk]) - 1, caches.first[chunk]
    for number in range(caches.num_pages[chunk]):
        found[end] = number if row < 0 else page
        if row >= 0:
            page = caches.following[row, page]
        end += 1
    return end


@compiled((CACHES, "int64[::1]", "int64[::1]"), makes_arrays=False)
def put_pages(caches: Caches, ids: Indices, found: Indices) -> None:
    """Put the pages of chunks, one chunk after another, into `found`; see `Journal.pages`."""
    end = 0
    for number in range(len(ids)):
        end = _put_pages(caches, ids[number], found, end)


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


@compiled((CACHES, JOURNAL, "int64"), makes_arrays=False)
def _note(caches: Caches, journal: Journal, chunk: int) -> None:
    """Note where a chunk is, unless it was touched before."""
    if not journal.marks[chunk]:
        number, end = journal.sizes
        journal.marks[chunk] = 1
        journal.chunks[number] = chunk
        journal.sources[number] = caches.tiers[chunk]
        journal.sizes[0] = number + 1
        journal.sizes[1] = _put_pages(caches, chunk, journal.pages, end)


@compiled((CACHES, JOURNAL, "int64", "int64", "int64[::1]"), makes_arrays=False)
def _move(caches: Caches, journal: Journal, chunk: int, tier: int, victims: Indices) -> int:
    """Bring a chunk to a tier if it beats those that must make room for it.

    Returns how many these are, which are in `victims` and in no cache now; -1 if it did not move.
    """
    priority = caches.heaps.priorities[chunk]
    count = _victims(caches, tier - 1, int(caches.num_pages[chunk]), priority, victims)
    if count < 0:
        return -1
    for number in range(count):
        _note(caches, journal, victims[number])
        _free_pages(caches, victims[number])
    _note(caches, journal, chunk)
    if caches.tiers[chunk] != _SSD:
        # Displaced chunks have left their heap already.
        leave(caches.heaps, int(caches.tiers[chunk]) - 1, chunk)
        _free_pages(caches, chunk)
    _occupy(caches, chunk, tier)
    return count


@compiled((CACHES, "int64[::1]", JOURNAL), makes_arrays=False)
def place(caches: Caches, order: Indices, journal: Journal) -> None:
    """Place chunks that are not on the device, best first; none has more pages than `width`.

    The journal has room for all of them, and for all that is in a cache.
    """
    for number in range(len(order)):
        chunk = order[number]
        # Try the device first; a chunk that is refused there stays where it is, if in a cache.
        count = _move(caches, journal, chunk, _DEVICE, journal.displaced)
        # Chunks displaced from the device contend for the host, the best one first.
        for place in range(count - 1, -1, -1):
            _move(caches, journal, journal.displaced[place], _HOST, journal.dropped)
        if count < 0 and caches.tiers[chunk] == _SSD:
            _move(caches, journal, chunk, _HOST, journal.dropped)
