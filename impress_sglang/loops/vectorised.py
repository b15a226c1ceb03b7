"""The loops, vectorised with NumPy: the reference, and what runs where Numba is not installed."""

from __future__ import annotations

import numpy as np
import xxhash

from impress_sglang.loops.types import (
    BLOCK_WORDS,
    Flags,
    Floats,
    Indices,
    Int32s,
    Mapping,
    Uint8s,
    Uint16s,
    Words,
)

NAME = "numpy"


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
    """Where the tokens of a span stand.

    Args:
        tokens: int64 [lanes, k], ascending in each lane, counted from the start of the prefix.
        first: of the span, counted like `tokens`.
        stop: likewise, after its last one.
        start: of the span, counted from the start of its segment.
        mapping: [lanes * rows of a lane], the row of each token; empty if they are the same.
        lane_rows: rows of a lane, which are tokens of the segment.
        chunk_rows: rows of a chunk.
        value_first: int32 [blocks of a lane's values], the first row that a block holds.
        value_last: likewise the last row.
        key_first: the same of keys; empty if nobody asks.
        key_last: the same of keys.
        placed: whether there are other spans, so that positions are wanted; else all tokens are
            the span's.

    Returns:
        Of the tokens of the span int64 [n]: positions in the read (token after token and in each
        lane by lane), lanes, and rows. If not `placed` the first two are empty, and rows come in
        the order of the read. Then the rows wanted of each chunk, int64 [lanes * chunks of a lane];
        and which blocks of values and of keys hold wanted rows, bool [lanes * blocks of a lane].
    """
    num_lanes, k = tokens.shape
    if placed:
        lanes, places = np.nonzero((tokens >= first) & (tokens < stop))
        positions = places * num_lanes + lanes
        rows = tokens[lanes, places]
    else:
        lanes, positions = np.tile(np.arange(num_lanes), k), np.empty(0, np.int64)
        rows = tokens.T.reshape(-1)
    rows = rows - first + start
    if len(mapping):
        rows = mapping[lanes * lane_rows + rows].astype(np.int64)
    lane_chunks = -(-lane_rows // chunk_rows)
    chunks = rows // chunk_rows + lanes * lane_chunks
    counts = np.bincount(chunks, minlength=num_lanes * lane_chunks)
    wanted = np.zeros((num_lanes, lane_rows + 1), np.int64)
    wanted[lanes, rows + 1] = 1
    before = wanted.cumsum(1)
    in_values = before[:, value_last + 1] > before[:, value_first]
    in_keys = before[:, key_last + 1] > before[:, key_first]
    if not placed:
        lanes = lanes[:0]
    return positions, lanes, rows, counts, in_values.reshape(-1), in_keys.reshape(-1)


def touched_chunks(counts: Indices, rows_of_chunk: Floats) -> tuple[Indices, Indices, Floats]:
    """The chunks of which rows are wanted.

    Args:
        counts: int64 [chunks], wanted rows of each.
        rows_of_chunk: float64 [chunks], all rows of each.

    Returns:
        The chunks, ascending, and of each the wanted rows and their share.
    """
    chunks = np.flatnonzero(counts)
    wanted = counts[chunks]
    return chunks, wanted, wanted / rows_of_chunk[chunks]


def tally(tiers: Uint8s, counts: Indices) -> tuple[int, int, int, int, int, int]:
    """Wanted rows by the tier (0 to 2) where they are found, and then chunks.

    Args:
        tiers: uint8 [n], of each chunk.
        counts: int64 [n], wanted rows of each.
    """
    chunks = np.bincount(tiers, minlength=3).tolist()
    rows = np.bincount(tiers, counts, 3).astype(np.int64).tolist()
    return (*rows, *chunks)


def add_cached_blocks(
    blocks: Flags,
    wanted: Flags,
    chunk_of_block: Indices,
    chunks: Indices,
    tiers: Uint8s,
    kept: Flags,
    tier: int,
) -> None:
    """Flag the blocks that must be read: wanted ones, and all of chunks that are kept.

    Args:
        blocks: bool [blocks], changed in place.
        wanted: bool [blocks].
        chunk_of_block: int64 [blocks], ascending, of all chunks.
        chunks: int64 [n], those that are touched.
        tiers: uint8 [n], where these are found.
        kept: bool [n], whether they will be cached.
        tier: only chunks that are found here count.
    """
    degree = np.zeros(int(chunk_of_block[-1]) + 1, np.uint8)
    here = tiers == tier
    degree[chunks[here]] = 1
    degree[chunks[here & kept]] = 2
    own = degree[chunk_of_block]
    blocks |= (own == 2) | ((own == 1) & wanted)


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
    """How many tokens stand in the span, and how many of these in chunks that are flagged.

    `hit` is bool [lanes * chunks of a lane]; for the rest see `locate_rows`.
    """
    lanes, places = np.nonzero((tokens >= first) & (tokens < stop))
    rows = tokens[lanes, places] - first + start
    if len(mapping):
        rows = mapping[lanes * lane_rows + rows].astype(np.int64)
    hits = hit[lanes * -(-lane_rows // chunk_rows) + rows // chunk_rows]
    return len(rows), int(np.count_nonzero(hits))


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
    """Count an access to distinct chunks, and give them their new priorities.

    Args:
        ids: int64 [n].
        shares: float64 [n], share of each chunk's rows that is wanted.
        accesses: uint16, by id, changed in place.
        averages: float64, moving averages of the shares, by id, changed in place.
        frequencies: float64, by id, changed in place.
        priorities: float64, frequency times average, by id, changed in place.
        unit: what an access adds to a frequency.
        least_weight: of a share in its average; the first ones count alike.
        most_accesses: where counting stops.
    """
    accesses[ids] = np.where(accesses[ids] < most_accesses, accesses[ids] + 1, accesses[ids])
    weight = np.maximum(1.0 / accesses[ids], least_weight)
    old = averages[ids]
    averages[ids] = average = old + weight * (shares - old)
    frequencies[ids] += unit
    priorities[ids] = frequencies[ids] * average


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
    """Chunks that might move to a better place; if one has a chance, all that could move at all.

    A chunk may displace a larger one and leave room for others.

    Args:
        ids: int64 [n].
        tiers: uint8 [n], where they stand.
        num_pages: uint16, by id.
        priorities: float64, by id.
        width: a chunk of more pages never moves.
        device: the best tier.
        lowest_device: the lowest priority there, infinity if it is empty.
        lowest_host: likewise.
        free_device: pages.
        free_host: pages.

    Returns:
        Their places in `ids`, ascending.
    """
    pages = num_pages[ids]
    movable = (tiers != device) & (pages <= width)
    chance = (priorities[ids] > min(lowest_device, lowest_host)) | (
        pages <= max(free_device, free_host)
    )
    return np.flatnonzero(movable) if (movable & chance).any() else np.empty(0, np.int64)


def move_codes(codes: Uint8s, wanted: Flags, kept: Uint8s, raised: Uint8s) -> None:
    """Move the chance of every block, in place.

    Args:
        codes: uint8 [blocks].
        wanted: bool [blocks].
        kept: uint8 [256], what becomes of a code whose block was not wanted.
        raised: uint8 [256], of one whose block was.
    """
    codes[:] = np.where(wanted, raised[codes], kept[codes])


def move_averages(
    averages: Uint8s,
    tokens: Indices,
    first: int,
    stop: int,
    start: int,
    kept: Uint8s,
    raised: Uint8s,
) -> None:
    """Move the average of every token of a span, in place.

    Args:
        averages: uint8 [lanes, tokens of the segment].
        tokens: int64 [lanes, k], the selected ones, distinct in a lane; see `locate_rows`.
        first: see `locate_rows`.
        stop: see `locate_rows`.
        start: see `locate_rows`.
        kept: uint8 [256], what becomes of an average whose token was not selected.
        raised: uint8 [256], of one whose token was.
    """
    lanes, places = np.nonzero((tokens >= first) & (tokens < stop))
    own = averages[:, start : start + stop - first]
    selected = tokens[lanes, places] - first
    before = own[lanes, selected]
    own[:] = kept[own]
    own[lanes, selected] = raised[before]


def missing_blocks(tiers: Uint8s, chunk_of_block: Indices, possible: Flags, ssd: int) -> Flags:
    """Which blocks stand in chunks that are on SSD alone.

    Args:
        tiers: uint8 [layers, chunks of a layer].
        chunk_of_block: int64 [blocks of a layer].
        possible: bool [blocks of a layer], those that count.
        ssd: the number of this tier.

    Returns:
        bool [layers, blocks of a layer].
    """
    on_ssd: Flags = tiers == ssd
    missing: Flags = on_ssd[:, chunk_of_block] & possible
    return missing


def weigh_codes(codes: Uint8s, candidates: Flags) -> Indices:
    """How many of the candidates have each code, int64 [256]; both arguments are flat."""
    return np.bincount(codes[candidates], minlength=256)


def likely_flags(codes: Uint8s, candidates: Flags, threshold: int) -> Flags:
    """The candidates whose code is at least `threshold`; both arrays are flat."""
    likely: Flags = candidates & (codes >= threshold)
    return likely


def first_bad_block(words: Words, blocks: Indices, checksums: Words, first: int) -> int:
    """The place in `blocks` of the first block that fails its checksum, -1 if none does.

    Args:
        words: uint64, memory that has blocks of `BLOCK_WORDS` words.
        blocks: int64 [n], the blocks of the memory that are verified.
        checksums: uint64, XXH3-64 of blocks.
        first: which of them is that of the first block of the memory.
    """
    for place, block in enumerate(blocks.tolist()):
        own = words[block * BLOCK_WORDS : (block + 1) * BLOCK_WORDS]
        if xxhash.xxh3_64_intdigest(own.data) != checksums[first + block]:
            return place
    return -1


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
    """Addresses of the vectors of rows: from SSD in an image of the layer, in caches in pages.

    Args:
        lanes: int64 [n], of each row.
        rows: int64 [n], in its lane.
        tiers: uint8 [c], where each touched chunk is found; 0 is SSD.
        place_of_chunk: int64 [lanes * lane_chunks], which of the c each chunk is.
        pages: int32 [c, width] of the touched chunks; may be empty if none is cached.
        lane_chunks: chunks of a lane.
        chunk_rows: rows of a chunk.
        row_vectors: vectors of a row.
        page_vectors: vectors of a page.
        vector_bytes: bytes of a vector, which divide those of a row.
        start: byte of the image where the lanes begin.
        lane_bytes: bytes of a lane.
        stride: bytes from chunk to chunk.
        bases: int64 [3], by tier: where the image begins, and the first page of each cache.

    Returns:
        int64 [n * row_vectors].
    """
    chunks = rows // chunk_rows
    place = place_of_chunk[lanes * lane_chunks + chunks]
    at = (rows % chunk_rows * row_vectors)[:, None] + np.arange(row_vectors)
    inside = at * vector_bytes + (start + lanes * lane_bytes + chunks * stride)[:, None]
    cached = tiers[place] != 0
    if cached.any():
        page = pages[place[cached, None], at[cached] // page_vectors].astype(np.int64)
        inside[cached] = (page * page_vectors + at[cached] % page_vectors) * vector_bytes
    return (inside + bases[tiers[place]][:, None]).reshape(-1)
