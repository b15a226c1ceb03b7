"""The loops, compiled with Numba when this module is imported, and later taken from its cache.

What they do is said in `vectorised`, function by function; results are equal bit for bit.
"""

from __future__ import annotations

import numpy as np

from impress_sglang.loops.jit import compiled
from impress_sglang.loops.types import Flags, Floats, Indices, Int32s, Mapping, Uint8s, Uint16s

NAME = "numba"

# As in segment files.
_MAPPINGS = ("uint16[::1]", "uint32[::1]")


@compiled("(int64[::1], int64, int64)")
def _between(ascending: Indices, first: int, stop: int) -> tuple[int, int]:
    """Where the values from `first` to before `stop` stand."""
    return int(np.searchsorted(ascending, first)), int(np.searchsorted(ascending, stop))


@compiled("(uint8[::1], int32[::1], int32[::1], boolean[::1])")
def _flag_blocks(wanted: Uint8s, first: Int32s, last: Int32s, blocks: Flags) -> None:
    """Flag the blocks of which a row, from the first to the last that it holds, is wanted."""
    for block in range(len(blocks)):
        row, stop = np.uint64(first[block]), np.uint64(last[block] + 1)
        while row < stop and not wanted[row]:
            row += np.uint64(1)
        blocks[block] = row < stop


@compiled(
    *(
        f"(int64[:, ::1], int64, int64, int64, {mapping}, int64, int64, int32[::1], int32[::1], "
        "int32[::1], int32[::1], boolean)"
        for mapping in _MAPPINGS
    )
)
def locate_rows(
    tokens: Indices,
    first: int,
    stop: int,
    start: int,
    mapping: Mapping,
    lane_rows: int,
    chunk_rows: int,
    value_first: Int32s,
    value_last: Int32s,
    key_first: Int32s,
    key_last: Int32s,
    placed: bool,
) -> tuple[Indices, Indices, Indices, Indices, Flags, Flags]:
    """See `vectorised.locate_rows`.

    Rows are marked in a byte each, from which chunks and blocks are counted in order: several times
    faster than counting as they come. Unsigned numbers spare a test whether an index is negative.
    """
    num_lanes, k = tokens.shape
    lane_chunks = -(-lane_rows // chunk_rows)
    value_blocks, key_blocks = len(value_first), len(key_first)
    positions = np.empty(num_lanes * k if placed else 0, np.int64)
    lanes = np.empty(num_lanes * k if placed else 0, np.int64)
    rows = np.empty(num_lanes * k, np.int64)
    wanted = np.zeros(num_lanes * lane_rows, np.uint8)
    counts = np.empty(num_lanes * lane_chunks, np.int64)
    in_values = np.empty(num_lanes * value_blocks, np.bool_)
    in_keys = np.empty(num_lanes * key_blocks, np.bool_)
    found = 0
    for lane in range(num_lanes):
        own = tokens[lane]
        low, high = _between(own, first, stop) if placed else (0, k)
        marks = wanted[lane * lane_rows : (lane + 1) * lane_rows]
        mapped = mapping[lane * lane_rows : (lane + 1) * lane_rows]
        for j in range(low, high):
            row = np.uint64(own[j] - first + start)
            if len(mapping):
                row = np.uint64(mapped[row])
            marks[row] = 1
            place = np.uint64(j * num_lanes + lane)
            if placed:
                positions[found] = np.int64(place)
                lanes[found] = lane
                place = np.uint64(found)
                found += 1
            rows[place] = np.int64(row)
        for chunk in range(lane_chunks):
            count = 0
            last = min((chunk + 1) * chunk_rows, lane_rows)
            for marked in range(chunk * chunk_rows, last):
                count += marks[np.uint64(marked)]
            counts[lane * lane_chunks + chunk] = count
        blocks = in_values[lane * value_blocks : (lane + 1) * value_blocks]
        _flag_blocks(marks, value_first, value_last, blocks)
        blocks = in_keys[lane * key_blocks : (lane + 1) * key_blocks]
        _flag_blocks(marks, key_first, key_last, blocks)
    if placed:
        rows = rows[:found]
    return positions[:found], lanes[:found], rows, counts, in_values, in_keys


@compiled("(int64[::1], float64[::1])")
def touched_chunks(counts: Indices, rows_of_chunk: Floats) -> tuple[Indices, Indices, Floats]:
    """See `vectorised.touched_chunks`."""
    found = 0
    for chunk in range(len(counts)):
        found += counts[chunk] > 0
    chunks = np.empty(found, np.int64)
    wanted = np.empty(found, np.int64)
    shares = np.empty(found, np.float64)
    place = 0
    for chunk in range(len(counts)):
        if counts[chunk] > 0:
            chunks[place] = chunk
            wanted[place] = counts[chunk]
            shares[place] = counts[chunk] / rows_of_chunk[chunk]
            place += 1
    return chunks, wanted, shares


@compiled("(uint8[::1], int64[::1])")
def tally(tiers: Uint8s, counts: Indices) -> tuple[int, int, int, int, int, int]:
    """See `vectorised.tally`."""
    rows = np.zeros(3, np.int64)
    chunks = np.zeros(3, np.int64)
    for place in range(len(tiers)):
        rows[tiers[place]] += counts[place]
        chunks[tiers[place]] += 1
    return rows[0], rows[1], rows[2], chunks[0], chunks[1], chunks[2]


@compiled("(boolean[::1], boolean[::1], int64[::1], int64[::1], uint8[::1], boolean[::1], int64)")
def add_cached_blocks(
    blocks: Flags,
    wanted: Flags,
    chunk_of_block: Indices,
    chunks: Indices,
    tiers: Uint8s,
    kept: Flags,
    tier: int,
) -> None:
    """See `vectorised.add_cached_blocks`."""
    # 1: wanted blocks of the chunk; 2: all of its blocks.
    degree = np.zeros(chunk_of_block[-1] + 1, np.uint8)
    for place in range(len(chunks)):
        if tiers[place] == tier:
            degree[chunks[place]] = 2 if kept[place] else 1
    for block in range(len(blocks)):
        own = degree[chunk_of_block[block]]
        if own == 2 or (own == 1 and wanted[block]):
            blocks[block] = True


@compiled(
    *(
        f"(int64[:, ::1], int64, int64, int64, {mapping}, int64, int64, boolean[::1])"
        for mapping in _MAPPINGS
    )
)
def chunk_hits(
    tokens: Indices,
    first: int,
    stop: int,
    start: int,
    mapping: Mapping,
    lane_rows: int,
    chunk_rows: int,
    hit: Flags,
) -> tuple[int, int]:
    """See `vectorised.chunk_hits`."""
    lane_chunks = -(-lane_rows // chunk_rows)
    wanted, hits = 0, 0
    for lane in range(len(tokens)):
        own = tokens[lane]
        low, high = _between(own, first, stop)
        mapped = mapping[lane * lane_rows : (lane + 1) * lane_rows]
        flags = hit[lane * lane_chunks : (lane + 1) * lane_chunks]
        for j in range(low, high):
            row = np.uint64(own[j] - first + start)
            if len(mapping):
                row = np.uint64(mapped[row])
            hits += flags[row // np.uint64(chunk_rows)]
        wanted += high - low
    return wanted, hits


@compiled(
    "(int64[::1], float64[::1], uint16[::1], float64[::1], float64[::1], float64[::1], "
    "float64, float64, int64)"
)
def record_scores(
    ids: Indices,
    shares: Floats,
    accesses: Uint16s,
    averages: Floats,
    frequencies: Floats,
    priorities: Floats,
    unit: float,
    least_weight: float,
    most_accesses: int,
) -> None:
    """See `vectorised.record_scores`."""
    # A division takes longer than all of the rest.
    always_least = 2.0 / least_weight
    for place in range(len(ids)):
        chunk = np.uint64(ids[place])
        if accesses[chunk] < most_accesses:
            accesses[chunk] += np.uint16(1)
        weight = least_weight
        if accesses[chunk] < always_least:
            weight = max(1.0 / accesses[chunk], least_weight)
        old = averages[chunk]
        average = old + weight * (shares[place] - old)
        averages[chunk] = average
        frequencies[chunk] += unit
        priorities[chunk] = frequencies[chunk] * average


@compiled(
    "(int64[::1], uint8[::1], uint16[::1], float64[::1], int64, int64, float64, float64, int64, "
    "int64)"
)
def find_candidates(
    ids: Indices,
    tiers: Uint8s,
    num_pages: Uint16s,
    priorities: Floats,
    width: int,
    device: int,
    lowest_device: float,
    lowest_host: float,
    free_device: int,
    free_host: int,
) -> Indices:
    """See `vectorised.find_candidates`."""
    lowest = min(lowest_device, lowest_host)
    movable = 0
    any_chance = False
    for place in range(len(ids)):
        pages = num_pages[ids[place]]
        if tiers[place] != device and pages <= width:
            movable += 1
            if priorities[ids[place]] > lowest or pages <= free_device or pages <= free_host:
                any_chance = True
    if not any_chance:
        return np.empty(0, np.int64)
    found = np.empty(movable, np.int64)
    count = 0
    for place in range(len(ids)):
        if tiers[place] != device and num_pages[ids[place]] <= width:
            found[count] = place
            count += 1
    return found


@compiled("(uint8[::1], boolean[::1], uint8[::1], uint8[::1])")
def move_codes(codes: Uint8s, wanted: Flags, kept: Uint8s, raised: Uint8s) -> None:
    """See `vectorised.move_codes`."""
    for block in range(len(codes)):
        codes[block] = raised[codes[block]] if wanted[block] else kept[codes[block]]


@compiled("(uint8[:, ::1], int64[:, ::1], int64, int64, int64, uint8[::1], uint8[::1])")
def move_averages(
    averages: Uint8s,
    tokens: Indices,
    first: int,
    stop: int,
    start: int,
    kept: Uint8s,
    raised: Uint8s,
) -> None:
    """See `vectorised.move_averages`."""
    num_lanes, k = tokens.shape
    before = np.empty(k, np.uint8)
    for lane in range(num_lanes):
        own = averages[lane, start : start + stop - first]
        selected = tokens[lane]
        low, high = _between(selected, first, stop)
        for j in range(low, high):
            before[j] = own[np.uint64(selected[j] - first)]
        for token in range(len(own)):
            own[token] = kept[own[token]]
        for j in range(low, high):
            own[np.uint64(selected[j] - first)] = raised[before[j]]


@compiled("(uint8[:, ::1], int64[::1], boolean[::1], int64)")
def missing_blocks(tiers: Uint8s, chunk_of_block: Indices, possible: Flags, ssd: int) -> Flags:
    """See `vectorised.missing_blocks`."""
    num_layers, num_blocks = len(tiers), len(chunk_of_block)
    missing = np.empty((num_layers, num_blocks), np.bool_)
    for layer in range(num_layers):
        own = tiers[layer]
        for block in range(num_blocks):
            missing[layer, block] = possible[block] and own[chunk_of_block[block]] == ssd
    return missing


@compiled("(uint8[::1], boolean[::1])")
def weigh_codes(codes: Uint8s, candidates: Flags) -> Indices:
    """See `vectorised.weigh_codes`."""
    counts = np.zeros(256, np.int64)
    for block in range(len(codes)):
        counts[codes[block]] += candidates[block]
    return counts


@compiled("(uint8[::1], boolean[::1], int64)")
def likely_flags(codes: Uint8s, candidates: Flags, threshold: int) -> Flags:
    """See `vectorised.likely_flags`."""
    likely = np.empty(len(codes), np.bool_)
    for block in range(len(codes)):
        likely[block] = candidates[block] and codes[block] >= threshold
    return likely


@compiled(
    "(int64[::1], int64[::1], uint8[::1], int64[::1], int32[:, ::1], int64, int64, int64, int64, "
    "int64, int64, int64, int64, int64[::1])"
)
def vector_addresses(
    lanes: Indices,
    rows: Indices,
    tiers: Uint8s,
    place_of_chunk: Indices,
    pages: Int32s,
    lane_chunks: int,
    chunk_rows: int,
    row_vectors: int,
    page_vectors: int,
    vector_bytes: int,
    start: int,
    lane_bytes: int,
    stride: int,
    bases: Indices,
) -> Indices:
    """See `vectorised.vector_addresses`."""
    addresses = np.empty(len(rows) * row_vectors, np.int64)
    for j in range(len(rows)):
        chunk = rows[j] // chunk_rows
        offset = rows[j] - chunk * chunk_rows
        place = place_of_chunk[lanes[j] * lane_chunks + chunk]
        own = addresses[j * row_vectors : (j + 1) * row_vectors]
        base = bases[tiers[place]]
        if tiers[place] == 0:
            base += start + lanes[j] * lane_bytes + chunk * stride
            for vector in range(row_vectors):
                own[vector] = base + (offset * row_vectors + vector) * vector_bytes
        else:
            for vector in range(row_vectors):
                at = offset * row_vectors + vector
                page = np.int64(pages[place, at // page_vectors])
                own[vector] = base + (page * page_vectors + at % page_vectors) * vector_bytes
    return addresses
