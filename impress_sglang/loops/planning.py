"""Planning of reads for every token, chunk and block, as loops over flat arrays.

Arrays are contiguous and of the dtypes that the functions name. Results that are arrays are new,
except where a function says that it changes its arguments. Tests compare each loop bit for bit with
an equivalent in NumPy.
"""

from __future__ import annotations

import numpy as np

from impress_sglang.loops.jit import compiled
from impress_sglang.loops.types import Flags, Floats, Indices, Int32s, Mapping, Uint8s

# As in segment files.
_MAPPINGS = ("uint16[::1]", "uint32[::1]")


@compiled("(int64[::1], int64, int64)")
def between(ascending: Indices, first: int, stop: int) -> tuple[int, int]:
    """The places [low, high) of the values in [first, stop)."""
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
    head_group_rows: int,
    chunk_rows: int,
    value_first: Int32s,
    value_last: Int32s,
    key_first: Int32s,
    key_last: Int32s,
    placed: bool,
) -> tuple[Indices, Indices, Indices, Indices, Flags, Flags]:
    """Where the tokens of a span are stored.

    Each row is marked in a byte, and chunks and blocks are counted from these in order: several
    times faster than counting tokens as they come. Unsigned indices avoid a test for negative ones.

    Args:
        tokens: int64 [head groups, k], ascending in each head group, counted from the start of the
            prefix.
            t: the span's first token, counted like `tokens`.
            : likewise, after its last one.
            t: the span's first token, counted from the start of its segment.
            ing: [head groups * rows of a head group], the row of each token; empty if tokens are in
            logical order.
        head_group_rows: rows of a head group, which are tokens of the segment.
        chunk_rows: rows of a chunk.
        value_first: int32 [blocks of a head group's values], the first row that a block holds.
        value_last: likewise the last row.
        key_first: the same for keys; empty if key blocks are not wanted.
        key_last: the same for keys.
        placed: whether there are other spans, so that positions are wanted; otherwise all tokens
            are the span's.

        rns:
        For the tokens of the span, int64 [n]: positions in the read (token after token and, within
        each, by head group), head groups, and rows. If not `placed`, the first two are empty, and
        rows come in the order of the read. Then the wanted rows of each chunk, int64 [head groups *
        chunks of a head group]; and which blocks of values and of keys hold wanted rows, bool [head
        groups * blocks of a head group].
    """
    num_head_groups, k = tokens.shape
    head_group_chunks = -(-head_group_rows // chunk_rows)
    value_blocks, key_blocks = len(value_first), len(key_first)
    positions = np.empty(num_head_groups * k if placed else 0, np.int64)
    head_groups = np.empty(num_head_groups * k if placed else 0, np.int64)
    rows = np.empty(num_head_groups * k, np.int64)
    wanted = np.zeros(num_head_groups * head_group_rows, np.uint8)
    counts = np.empty(num_head_groups * head_group_chunks, np.int64)
    in_values = np.empty(num_head_groups * value_blocks, np.bool_)
    in_keys = np.empty(num_head_groups * key_blocks, np.bool_)
    found = 0
    for head_group in range(num_head_groups):
        own = tokens[head_group]
        low, high = between(own, first, stop) if placed else (0, k)
        marks = wanted[head_group * head_group_rows : (head_group + 1) * head_group_rows]
        mapped = mapping[head_group * head_group_rows : (head_group + 1) * head_group_rows]
        for j in range(low, high):
            row = np.uint64(own[j] - first + start)
            if len(mapping):
                row = np.uint64(mapped[row])
            marks[row] = 1
            place = np.uint64(j * num_head_groups + head_group)
            if placed:
                positions[found] = np.int64(place)
                head_groups[found] = head_group
                place = np.uint64(found)
                found += 1
            rows[place] = np.int64(row)
        for chunk in range(head_group_chunks):
            count = 0
            last = min((chunk + 1) * chunk_rows, head_group_rows)
            for marked in range(chunk * chunk_rows, last):
                count += marks[np.uint64(marked)]
            counts[head_group * head_group_chunks + chunk] = count
        blocks = in_values[head_group * value_blocks : (head_group + 1) * value_blocks]
        _flag_blocks(marks, value_first, value_last, blocks)
        blocks = in_keys[head_group * key_blocks : (head_group + 1) * key_blocks]
        _flag_blocks(marks, key_first, key_last, blocks)
    if placed:
        rows = rows[:found]
    return positions[:found], head_groups[:found], rows, counts, in_values, in_keys


@compiled("(int64[::1], float64[::1])")
def touched_chunks(counts: Indices, rows_of_chunk: Floats) -> tuple[Indices, Indices, Floats]:
    """The chunks with wanted rows.

    Args:
        counts: int64 [chunks], wanted rows of each.
        rows_of_chunk: float64 [chunks], all rows of each.

    Returns:
        The chunks, ascending, and for each the number of wanted rows and their share.
    """
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
    """Numbers of wanted rows by the tier (0 to 2) where they are found, then of chunks.

    Args:
        tiers: uint8 [n], the tier of each chunk.
        counts: int64 [n], wanted rows of each.
    """
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
    """Flag the blocks that must be read: wanted ones, and all blocks of kept chunks.

    Args:
        blocks: bool [blocks], changed in place.
        wanted: bool [blocks].
        chunk_of_block: int64 [blocks], ascending, of all chunks.
        chunks: int64 [n], the touched chunks.
        tiers: uint8 [n], where these are found.
        kept: bool [n], whether they will be cached.
        tier: only chunks that are found here count.
    """
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
    head_group_rows: int,
    chunk_rows: int,
    hit: Flags,
) -> tuple[int, int]:
    """How many tokens are in the span, and how many of these are in flagged chunks.

    `hit` is bool [head groups * chunks of a head group]; for the rest see `locate_rows`.
    """
    head_group_chunks = -(-head_group_rows // chunk_rows)
    wanted, hits = 0, 0
    for head_group in range(len(tokens)):
        own = tokens[head_group]
        low, high = between(own, first, stop)
        mapped = mapping[head_group * head_group_rows : (head_group + 1) * head_group_rows]
        flags = hit[head_group * head_group_chunks : (head_group + 1) * head_group_chunks]
        for j in range(low, high):
            row = np.uint64(own[j] - first + start)
            if len(mapping):
                row = np.uint64(mapped[row])
            hits += flags[row // np.uint64(chunk_rows)]
        wanted += high - low
    return wanted, hits


@compiled("(uint8[:, ::1], int64[::1], boolean[::1], int64)")
def missing_blocks(tiers: Uint8s, chunk_of_block: Indices, possible: Flags, ssd: int) -> Flags:
    """Which blocks are in chunks that are on SSD alone.

    Args:
        tiers: uint8 [layers, chunks of a layer].
        chunk_of_block: int64 [blocks of a layer].
        possible: bool [blocks of a layer], those that count.
        ssd: the number of this tier.

    Returns:
        bool [layers, blocks of a layer].
    """
    num_layers, num_blocks = len(tiers), len(chunk_of_block)
    missing = np.empty((num_layers, num_blocks), np.bool_)
    for layer in range(num_layers):
        own = tiers[layer]
        for block in range(num_blocks):
            missing[layer, block] = possible[block] and own[chunk_of_block[block]] == ssd
    return missing


@compiled(
    "(int64[::1], int64[::1], uint8[::1], int64[::1], int32[:, ::1], int64, int64, int64, int64, "
    "int64, int64, int64, int64, int64[::1])"
)
def vector_addresses(
    head_groups: Indices,
    rows: Indices,
    tiers: Uint8s,
    place_of_chunk: Indices,
    pages: Int32s,
    head_group_chunks: int,
    chunk_rows: int,
    row_vectors: int,
    page_vectors: int,
    vector_bytes: int,
    start: int,
    head_group_bytes: int,
    stride: int,
    bases: Indices,
) -> Indices:
    """Addresses of the vectors of rows: from SSD in an image of the layer, in caches in pages.

    Args:
        head_groups: int64 [n], the head group of each row.
        rows: int64 [n], the rows, counted in their head groups.
        tiers: uint8 [c], where each touched chunk is found; 0 is SSD.
        place_of_chunk: int64 [head groups * head_group_chunks], which of the c each chunk is.
        pages: int32 [c, width] of the touched chunks; may be empty if none is cached.
        head_group_chunks: chunks of a head group.
        chunk_rows: rows of a chunk.
        row_vectors: vectors of a row.
        page_vectors: vectors of a page.
        vector_bytes: bytes of a vector, which divide those of a row.
        start: byte of the image where the head groups begin.
        head_group_bytes: bytes of a head group.
        stride: bytes from chunk to chunk.
        bases: int64 [3], by tier: where the image begins, and the first page of each cache.

    Returns:
        int64 [n * row_vectors].
    """
    addresses = np.empty(len(rows) * row_vectors, np.int64)
    # Unsigned division is faster.
    per_chunk, per_page = np.uint64(chunk_rows), np.uint64(page_vectors)
    for j in range(len(rows)):
        chunk = np.int64(np.uint64(rows[j]) // per_chunk)
        offset = rows[j] - chunk * chunk_rows
        place = place_of_chunk[head_groups[j] * head_group_chunks + chunk]
        own = addresses[j * row_vectors : (j + 1) * row_vectors]
        base = bases[tiers[place]]
        if tiers[place] == 0:
            base += start + head_groups[j] * head_group_bytes + chunk * stride
            for vector in range(row_vectors):
                own[vector] = base + (offset * row_vectors + vector) * vector_bytes
        else:
            for vector in range(row_vectors):
                at = offset * row_vectors + vector
                number = np.int64(np.uint64(at) // per_page)
                page = np.int64(pages[place, number])
                inside = at - number * page_vectors
                own[vector] = base + (page * page_vectors + inside) * vector_bytes
    return addresses


@compiled(
    "(int64[::1], uint8[::1], int32[:, ::1], int64[::1], int64, int64, int64, int64, int64, int64, "
    "int64)"
)
def chunk_pages(
    chunks: Indices,
    tiers: Uint8s,
    pages: Int32s,
    begins: Indices,
    head_group_chunks: int,
    head_group_bytes: int,
    start: int,
    stride: int,
    row_vectors: int,
    last_pages: int,
    page_bytes: int,
) -> Indices:
    """Addresses of the pages of whole chunks, int64 [c * row_vectors], chunk after chunk.

    A full chunk has `row_vectors` pages; a shorter one has fewer, and what stands for the others is
    the first page of its tier.

    Args:
        chunks: int64 [c], head group * head_group_chunks + chunk.
        tiers: uint8 [c], where each is found; 0 is SSD.
        pages: int32 [c, width], of those that are cached.
        begins: int64 [3], by tier: where the image of the layer begins, and each cache.
        head_group_chunks: chunks of a head group.
        head_group_bytes: bytes of a head group.
        start: byte of the image where the head groups begin.
        stride: bytes from chunk to chunk.
        row_vectors: pages of a full chunk.
        last_pages: pages of the last chunk of a head group.
        page_bytes: bytes of a page.
    """
    addresses = np.empty(len(chunks) * row_vectors, np.int64)
    for place in range(len(chunks)):
        head_group, chunk = divmod(chunks[place], head_group_chunks)
        tier = tiers[place]
        base = begins[tier]
        if tier == 0:
            base += start + head_group * head_group_bytes + chunk * stride
        last = chunk == head_group_chunks - 1
        for number in range(row_vectors):
            page = np.int64(number)
            if tier != 0:
                there = not last or number < last_pages
                page = np.int64(pages[place, number]) if there else np.int64(0)
            addresses[place * row_vectors + number] = base + page * page_bytes
    return addresses
