"""Loops of `impress_sglang.loops.planning`, vectorised with NumPy: what these must equal."""

from __future__ import annotations

import numpy as np

from impress_sglang.loops.types import (
    Flags,
    Floats,
    Indices,
    Int32s,
    Mapping,
    Uint8s,
    Uint16s,
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
    num_head_groups, k = tokens.shape
    if placed:
        head_groups, places = np.nonzero((tokens >= first) & (tokens < stop))
        positions = places * num_head_groups + head_groups
        rows = tokens[head_groups, places]
    else:
        head_groups, positions = np.tile(np.arange(num_head_groups), k), np.empty(0, np.int64)
        rows = tokens.T.reshape(-1)
    rows = rows - first + start
    if len(mapping):
        rows = mapping[head_groups * head_group_rows + rows].astype(np.int64)
    head_group_chunks = -(-head_group_rows // chunk_rows)
    chunks = rows // chunk_rows + head_groups * head_group_chunks
    counts = np.bincount(chunks, minlength=num_head_groups * head_group_chunks)
    wanted = np.zeros((num_head_groups, head_group_rows + 1), np.int64)
    wanted[head_groups, rows + 1] = 1
    before = wanted.cumsum(1)
    in_values = before[:, value_last + 1] > before[:, value_first]
    in_keys = before[:, key_last + 1] > before[:, key_first]
    if not placed:
        head_groups = head_groups[:0]
    return positions, head_groups, rows, counts, in_values.reshape(-1), in_keys.reshape(-1)


def touched_chunks(counts: Indices, rows_of_chunk: Floats) -> tuple[Indices, Indices, Floats]:
    chunks = np.flatnonzero(counts)
    wanted = counts[chunks]
    return chunks, wanted, wanted / rows_of_chunk[chunks]


def tally(tiers: Uint8s, counts: Indices) -> tuple[int, int, int, int, int, int]:
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
    head_group_rows: int,
    chunk_rows: int,
    hit: Flags,
) -> tuple[int, int]:
    head_groups, places = np.nonzero((tokens >= first) & (tokens < stop))
    rows = tokens[head_groups, places] - first + start
    if len(mapping):
        rows = mapping[head_groups * head_group_rows + rows].astype(np.int64)
    hits = hit[head_groups * -(-head_group_rows // chunk_rows) + rows // chunk_rows]
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
    pages = num_pages[ids]
    movable = (tiers != device) & (pages <= width)
    chance = (priorities[ids] > min(lowest_device, lowest_host)) | (
        pages <= max(free_device, free_host)
    )
    return np.flatnonzero(movable) if (movable & chance).any() else np.empty(0, np.int64)


def move_codes(codes: Uint8s, wanted: Flags, kept: Uint8s, raised: Uint8s) -> None:
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
    head_groups, places = np.nonzero((tokens >= first) & (tokens < stop))
    own = averages[:, start : start + stop - first]
    selected = tokens[head_groups, places] - first
    before = own[head_groups, selected]
    own[:] = kept[own]
    own[head_groups, selected] = raised[before]


def missing_blocks(tiers: Uint8s, chunk_of_block: Indices, possible: Flags, ssd: int) -> Flags:
    on_ssd: Flags = tiers == ssd
    missing: Flags = on_ssd[:, chunk_of_block] & possible
    return missing


def weigh_codes(codes: Uint8s, candidates: Flags) -> Indices:
    return np.bincount(codes[candidates], minlength=256)


def likely_flags(codes: Uint8s, candidates: Flags, threshold: int) -> Flags:
    likely: Flags = candidates & (codes >= threshold)
    return likely


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
    chunks = rows // chunk_rows
    place = place_of_chunk[head_groups * head_group_chunks + chunks]
    at = (rows % chunk_rows * row_vectors)[:, None] + np.arange(row_vectors)
    inside = at * vector_bytes + (start + head_groups * head_group_bytes + chunks * stride)[:, None]
    cached = tiers[place] != 0
    if cached.any():
        page = pages[place[cached, None], at[cached] // page_vectors].astype(np.int64)
        inside[cached] = (page * page_vectors + at[cached] % page_vectors) * vector_bytes
    return (inside + bases[tiers[place]][:, None]).reshape(-1)
