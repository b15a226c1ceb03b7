"""Heaps of the chunks of two tiers, as flat arrays: which chunk of a tier is worth least.

A heap has each member of its tier once, the lowest first, of equal ones that with the lower id.
What it goes by is `noted`, which is at most a chunk's priority: one that rises is corrected when
the chunk comes up, one that falls is told by `note_falls`.

    heaps int64 [2, 1 + most members]    ids, from place 1 on
    sizes int64 [2]                      members
    places int32 [chunks]                where in its heap a chunk is, 0 for nowhere
    noted int64 [2, 1 + most members]    of the member at each place
"""

from __future__ import annotations

from impress_sglang.loops.jit import compiled
from impress_sglang.loops.types import Indices, Int32s, Uint8s

_SSD = 0
HEAP = "int64[:, ::1], int64[::1], int32[::1], int64[:, ::1]"


@compiled("(int64, int64, int64, int64)")
def _before(noted: int, chunk: int, other_noted: int, other: int) -> bool:
    return noted < other_noted or (noted == other_noted and chunk < other)


@compiled("(int64[::1], int32[::1], int64[::1], int64, int64, int64)")
def _put(heap: Indices, places: Int32s, noted: Indices, at: int, chunk: int, own: int) -> None:
    heap[at] = chunk
    noted[at] = own
    places[chunk] = at


@compiled("(int64[::1], int32[::1], int64[::1], int64)")
def _rise(heap: Indices, places: Int32s, noted: Indices, at: int) -> None:
    """The chunk at this place may be lower than those above."""
    chunk, own = heap[at], noted[at]
    while at > 1 and _before(own, chunk, noted[at // 2], heap[at // 2]):
        _put(heap, places, noted, at, heap[at // 2], noted[at // 2])
        at //= 2
    _put(heap, places, noted, at, chunk, own)


@compiled("(int64[::1], int64, int32[::1], int64[::1], int64)")
def _sink(heap: Indices, size: int, places: Int32s, noted: Indices, at: int) -> None:
    """The chunk at this place may be higher than those below."""
    chunk, own = heap[at], noted[at]
    while 2 * at <= size:
        child = 2 * at
        if child < size and _before(noted[child + 1], heap[child + 1], noted[child], heap[child]):
            child += 1
        if not _before(noted[child], heap[child], own, chunk):
            break
        _put(heap, places, noted, at, heap[child], noted[child])
        at = child
    _put(heap, places, noted, at, chunk, own)


@compiled(f"({HEAP}, int64, int64, int64)")
def enter(
    heaps: Indices,
    sizes: Indices,
    places: Int32s,
    noted: Indices,
    row: int,
    chunk: int,
    priority: int,
) -> None:
    """A chunk becomes a member."""
    sizes[row] += 1
    _put(heaps[row], places, noted[row], sizes[row], chunk, priority)
    _rise(heaps[row], places, noted[row], sizes[row])


@compiled(f"({HEAP}, int64, int64)")
def leave(
    heaps: Indices, sizes: Indices, places: Int32s, noted: Indices, row: int, chunk: int
) -> None:
    """A chunk that is a member is none any more."""
    at, end = int(places[chunk]), sizes[row]
    last = heaps[row, end]
    sizes[row] -= 1
    places[chunk] = 0
    if last != chunk:
        _put(heaps[row], places, noted[row], at, last, noted[row, end])
        _rise(heaps[row], places, noted[row], at)
        _sink(heaps[row], sizes[row], places, noted[row], int(places[last]))


@compiled(f"({HEAP}, int64, int64[::1])")
def lowest(
    heaps: Indices, sizes: Indices, places: Int32s, noted: Indices, row: int, priorities: Indices
) -> int:
    """The member with the lowest priority, -1 if there is none; it stays."""
    while sizes[row]:
        chunk = heaps[row, 1]
        if priorities[chunk] <= noted[row, 1]:
            return int(chunk)
        noted[row, 1] = priorities[chunk]
        _sink(heaps[row], sizes[row], places, noted[row], 1)
    return -1


@compiled(f"(int64[::1], uint8[::1], {HEAP}, int64[::1])")
def note_falls(
    ids: Indices,
    tiers: Uint8s,
    heaps: Indices,
    sizes: Indices,
    places: Int32s,
    noted: Indices,
    priorities: Indices,
) -> None:
    """Priorities of chunks, which stand in these tiers, may have fallen."""
    for number in range(len(ids)):
        chunk = ids[number]
        if tiers[number] != _SSD:
            row, at = tiers[number] - 1, int(places[chunk])
            if priorities[chunk] < noted[row, at]:
                noted[row, at] = priorities[chunk]
                _rise(heaps[row], places, noted[row], at)
