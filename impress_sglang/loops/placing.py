"""Places chunks one after another: two heaps and the free pages of two tiers, as flat arrays.

`tiers.placement` says by which rule. Tiers are numbered as in `tiers.placement.Tier`: 0 is SSD, 1
the host and 2 the device; of what only caches have, tier t has row t - 1.

A heap has each member of its tier once, the lowest first, of equal ones that with the lower id.
What it goes by is `noted`, which is at most a chunk's priority: one that rises is corrected when
the chunk comes up, one that falls is told by `note_falls`.

    tiers uint8 [chunks]          where each chunk stands
    first int64 [chunks]          where in `pages` its own begin
    num_pages uint16 [chunks]     how many these are
    pages int32                   their numbers, if the chunk is in a cache
    noted float64 [chunks]        what the heap of a chunk's tier goes by
    places int64 [chunks]         where in the heap a chunk is, 0 for nowhere
    heaps int64 [2, 1 + chunks]   ids, from place 1 on
    sizes int64 [2]               members
    stacks int32 [2, pages]       free pages, the next one last
    free int64 [2]                how many these are
"""

from __future__ import annotations

from impress_sglang.loops.jit import compiled
from impress_sglang.loops.types import Floats, Indices, Int32s, Uint8s, Uint16s

_SSD, _DEVICE = 0, 2
_HEAP = "int64[:, ::1], int64[::1], int64[::1], float64[::1]"
_CHUNKS = "uint8[::1], int64[::1], uint16[::1], int32[::1]"
_STATE = f"{_CHUNKS}, {_HEAP}, int32[:, ::1], int64[::1]"


@compiled("(float64[::1], int64, int64)")
def _before(noted: Floats, one: int, other: int) -> bool:
    return noted[one] < noted[other] or (noted[one] == noted[other] and one < other)


@compiled("(int64[::1], int64[::1], float64[::1], int64)")
def _rise(heap: Indices, places: Indices, noted: Floats, at: int) -> None:
    """The chunk at this place may be lower than those above."""
    chunk = heap[at]
    while at > 1 and _before(noted, chunk, heap[at // 2]):
        heap[at] = heap[at // 2]
        places[heap[at]] = at
        at //= 2
    heap[at] = chunk
    places[chunk] = at


@compiled("(int64[::1], int64, int64[::1], float64[::1], int64)")
def _sink(heap: Indices, size: int, places: Indices, noted: Floats, at: int) -> None:
    """The chunk at this place may be higher than those below."""
    chunk = heap[at]
    while 2 * at <= size:
        child = 2 * at
        if child < size and _before(noted, heap[child + 1], heap[child]):
            child += 1
        if not _before(noted, heap[child], chunk):
            break
        heap[at] = heap[child]
        places[heap[at]] = at
        at = child
    heap[at] = chunk
    places[chunk] = at


@compiled(f"({_HEAP}, int64, int64, float64)")
def enter(
    heaps: Indices,
    sizes: Indices,
    places: Indices,
    noted: Floats,
    row: int,
    chunk: int,
    priority: float,
) -> None:
    """A chunk becomes a member."""
    sizes[row] += 1
    heaps[row, sizes[row]] = chunk
    noted[chunk] = priority
    _rise(heaps[row], places, noted, sizes[row])


@compiled(f"({_HEAP}, int64, int64)")
def leave(
    heaps: Indices, sizes: Indices, places: Indices, noted: Floats, row: int, chunk: int
) -> None:
    """A chunk that is a member is none any more."""
    at = places[chunk]
    last = heaps[row, sizes[row]]
    sizes[row] -= 1
    places[chunk] = 0
    if last != chunk:
        heaps[row, at] = last
        places[last] = at
        _rise(heaps[row], places, noted, at)
        _sink(heaps[row], sizes[row], places, noted, places[last])


@compiled(f"({_HEAP}, int64, float64[::1])")
def lowest(
    heaps: Indices, sizes: Indices, places: Indices, noted: Floats, row: int, priorities: Floats
) -> int:
    """The member with the lowest priority, -1 if there is none; it stays."""
    while sizes[row]:
        chunk = heaps[row, 1]
        if priorities[chunk] <= noted[chunk]:
            return int(chunk)
        noted[chunk] = priorities[chunk]
        _sink(heaps[row], sizes[row], places, noted, 1)
    return -1


@compiled(f"(int64[::1], uint8[::1], {_HEAP}, float64[::1])")
def note_falls(
    ids: Indices,
    tiers: Uint8s,
    heaps: Indices,
    sizes: Indices,
    places: Indices,
    noted: Floats,
    priorities: Floats,
) -> None:
    """Priorities of chunks, which stand in these tiers, may have fallen."""
    for number in range(len(ids)):
        chunk = ids[number]
        if tiers[number] != _SSD and priorities[chunk] < noted[chunk]:
            noted[chunk] = priorities[chunk]
            _rise(heaps[tiers[number] - 1], places, noted, places[chunk])


@compiled(f"(int64, {_STATE})")
def release(
    chunk: int,
    tiers: Uint8s,
    first: Indices,
    num_pages: Uint16s,
    pages: Int32s,
    heaps: Indices,
    sizes: Indices,
    places: Indices,
    noted: Floats,
    stacks: Int32s,
    free: Indices,
) -> None:
    """A chunk leaves its cache."""
    row = tiers[chunk] - 1
    # Who is chosen to be displaced has left the heap before.
    if places[chunk]:
        leave(heaps, sizes, places, noted, row, chunk)
    count = num_pages[chunk]
    for number in range(count):
        stacks[row, free[row] + number] = pages[first[chunk] + count - 1 - number]
    free[row] += count
    tiers[chunk] = _SSD


@compiled(f"(int64, int64, float64, {_STATE})")
def _occupy(
    chunk: int,
    tier: int,
    priority: float,
    tiers: Uint8s,
    first: Indices,
    num_pages: Uint16s,
    pages: Int32s,
    heaps: Indices,
    sizes: Indices,
    places: Indices,
    noted: Floats,
    stacks: Int32s,
    free: Indices,
) -> None:
    """A chunk enters a cache, whose free pages do."""
    row, count = tier - 1, num_pages[chunk]
    free[row] -= count
    for number in range(count):
        pages[first[chunk] + number] = stacks[row, free[row] + count - 1 - number]
    tiers[chunk] = tier
    enter(heaps, sizes, places, noted, row, chunk, priority)


@compiled(
    f"(int64, int64, float64, float64[::1], int64[::1], uint16[::1], {_HEAP}, int64[::1],"
    " int64[::1])"
)
def _victims(
    row: int,
    wanted: int,
    priority: float,
    priorities: Floats,
    capacity: Indices,
    num_pages: Uint16s,
    heaps: Indices,
    sizes: Indices,
    places: Indices,
    noted: Floats,
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


_TOUCHED = "int64[::1], uint8[::1], int32[:, ::1], int64[::1]"


@compiled(f"(int64, int64, {_CHUNKS}, {_TOUCHED})")
def _remember(
    chunk: int,
    count: int,
    tiers: Uint8s,
    first: Indices,
    num_pages: Uint16s,
    pages: Int32s,
    touched: Indices,
    sources: Uint8s,
    source_pages: Int32s,
    marks: Indices,
) -> int:
    """Keep where a chunk stood before anything moved; returns how many are kept."""
    if marks[chunk]:
        return count
    marks[chunk] = 1
    touched[count] = chunk
    sources[count] = tiers[chunk]
    for number in range(num_pages[chunk]):
        source_pages[count, number] = pages[first[chunk] + number]
    return count + 1


@compiled(f"(int64, int64, int64, float64[::1], int64[::1], {_STATE}, {_TOUCHED}, int64[::1])")
def _move(
    chunk: int,
    tier: int,
    count: int,
    priorities: Floats,
    capacity: Indices,
    tiers: Uint8s,
    first: Indices,
    num_pages: Uint16s,
    pages: Int32s,
    heaps: Indices,
    sizes: Indices,
    places: Indices,
    noted: Floats,
    stacks: Int32s,
    free: Indices,
    touched: Indices,
    sources: Uint8s,
    source_pages: Int32s,
    marks: Indices,
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
            own, count, tiers, first, num_pages, pages, touched, sources, source_pages, marks
        )
        if tiers[own] != _SSD:
            release(own, tiers, first, num_pages, pages, heaps, sizes, places, noted, stacks, free)
    _occupy(
        chunk,
        tier,
        priorities[chunk],
        tiers,
        first,
        num_pages,
        pages,
        heaps,
        sizes,
        places,
        noted,
        stacks,
        free,
    )
    return displaced, count


@compiled(
    f"(int64[::1], int64, int64, int64, float64[::1], int64[::1], {_STATE}, {_TOUCHED}, "
    "int64[::1], int64[::1])"
)
def place(
    order: Indices,
    begin: int,
    refused: int,
    count: int,
    priorities: Floats,
    capacity: Indices,
    tiers: Uint8s,
    first: Indices,
    num_pages: Uint16s,
    pages: Int32s,
    heaps: Indices,
    sizes: Indices,
    places: Indices,
    noted: Floats,
    stacks: Int32s,
    free: Indices,
    touched: Indices,
    sources: Uint8s,
    source_pages: Int32s,
    marks: Indices,
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
        priorities: float64 [chunks].
        capacity: int64 [2], pages of each tier.
        tiers, ..., free: the state.
        touched, sources, source_pages: see there.
        marks: int64 [chunks], 1 for those that were touched.
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
                first,
                num_pages,
                pages,
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
                    first,
                    num_pages,
                    pages,
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
