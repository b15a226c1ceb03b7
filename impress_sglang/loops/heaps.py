"""Heaps of the chunks of two tiers: which chunk of a tier is worth least.

A heap has each member of its tier once, the lowest first; of equals, that with the lower id.
It is ordered by `noted`, which is at most a chunk's priority: a rise is corrected when the chunk
comes to the top, and a fall is reported by `note_falls`.
"""

from __future__ import annotations

from typing import NamedTuple

from impress_sglang.loops.jit import compiled, tuple_type
from impress_sglang.loops.types import Indices, Int32s, Uint8s

_SSD = 0


class Heaps(NamedTuple):
    """The heaps of host and device (tier t has row t - 1), and tables of chunks."""

    members: Indices  # int64 [2, 1 + most members], ids, from place 1 on
    noted: Indices  # int64 [2, 1 + most members], the noted priority of the member at each place
    sizes: Indices  # int64 [2], how many members there are
    places: Int32s  # int32 [chunks], where in its heap a chunk is, 0 for nowhere
    priorities: Indices  # int64 [chunks]


HEAPS = tuple_type(Heaps, "int64[:, ::1], int64[:, ::1], int64[::1], int32[::1], int64[::1]")


@compiled("(int64, int64, int64, int64)", makes_arrays=False)
def _before(noted: int, chunk: int, other_noted: int, other: int) -> bool:
    return noted < other_noted or (noted == other_noted and chunk < other)


@compiled((HEAPS, "int64", "int64", "int64", "int64"), makes_arrays=False)
def _put(heaps: Heaps, row: int, at: int, chunk: int, noted: int) -> None:
    heaps.members[row, at] = chunk
    heaps.noted[row, at] = noted
    heaps.places[chunk] = at


@compiled((HEAPS, "int64", "int64", "int64", "int64"), makes_arrays=False)
def _rise(heaps: Heaps, row: int, at: int, chunk: int, noted: int) -> None:
    """Put a chunk at this place, or above if it is lower than the chunks there."""
    while at > 1:
        above = at // 2
        parent, parent_noted = heaps.members[row, above], heaps.noted[row, above]
        if not _before(noted, chunk, parent_noted, parent):
            break
        _put(heaps, row, at, parent, parent_noted)
        at = above
    _put(heaps, row, at, chunk, noted)


@compiled((HEAPS, "int64", "int64", "int64", "int64"), makes_arrays=False)
def _sink(heaps: Heaps, row: int, at: int, chunk: int, noted: int) -> None:
    """Put a chunk at this place, or below if it is higher than the chunks there."""
    size = heaps.sizes[row]
    while 2 * at <= size:
        child = 2 * at
        smaller, smaller_noted = heaps.members[row, child], heaps.noted[row, child]
        if child < size:
            other, other_noted = heaps.members[row, child + 1], heaps.noted[row, child + 1]
            if _before(other_noted, other, smaller_noted, smaller):
                child, smaller, smaller_noted = child + 1, other, other_noted
        if not _before(smaller_noted, smaller, noted, chunk):
            break
        _put(heaps, row, at, smaller, smaller_noted)
        at = child
    _put(heaps, row, at, chunk, noted)


@compiled((HEAPS, "int64", "int64"), makes_arrays=False)
def enter(heaps: Heaps, row: int, chunk: int) -> None:
    """Make a chunk a member."""
    heaps.sizes[row] += 1
    _rise(heaps, row, heaps.sizes[row], chunk, heaps.priorities[chunk])


@compiled((HEAPS, "int64", "int64"), makes_arrays=False)
def leave(heaps: Heaps, row: int, chunk: int) -> None:
    """Remove a member."""
    at, end = int(heaps.places[chunk]), heaps.sizes[row]
    last, noted = heaps.members[row, end], heaps.noted[row, end]
    heaps.sizes[row] -= 1
    heaps.places[chunk] = 0
    if last != chunk:
        above = at // 2
        if above and _before(noted, last, heaps.noted[row, above], heaps.members[row, above]):
            _rise(heaps, row, at, last, noted)
        else:
            _sink(heaps, row, at, last, noted)


@compiled((HEAPS, "int64"), makes_arrays=False)
def lowest(heaps: Heaps, row: int) -> int:
    """The member with the lowest priority, -1 if there is none; it stays."""
    while heaps.sizes[row]:
        chunk = heaps.members[row, 1]
        if heaps.priorities[chunk] <= heaps.noted[row, 1]:
            return int(chunk)
        _sink(heaps, row, 1, chunk, heaps.priorities[chunk])
    return -1


@compiled((HEAPS, "int64[::1]", "uint8[::1]"), makes_arrays=False)
def note_falls(heaps: Heaps, ids: Indices, tiers: Uint8s) -> None:
    """Correct the heaps for chunks in these tiers whose priorities may have fallen."""
    for number in range(len(ids)):
        chunk = ids[number]
        if tiers[number] != _SSD:
            row, at = tiers[number] - 1, int(heaps.places[chunk])
            if heaps.priorities[chunk] < heaps.noted[row, at]:
                _rise(heaps, row, at, chunk, heaps.priorities[chunk])
