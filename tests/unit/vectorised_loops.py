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
    lane_rows: int,
    chunk_rows: int,
    value_first: Int32s,
    value_last: Int32s,
    key_first: Int32s,
    key_last: Int32s,
    placed: bool,
) -> tuple[Indices, Indices, Indices, Indices, Flags, Flags]:
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
    lane_rows: int,
    chunk_rows: int,
    hit: Flags,
) -> tuple[int, int]:
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
    lanes, places = np.nonzero((tokens >= first) & (tokens < stop))
    own = averages[:, start : start + stop - first]
    selected = tokens[lanes, places] - first
    before = own[lanes, selected]
    own[:] = kept[own]
    own[lanes, selected] = raised[before]


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
    chunks = rows // chunk_rows
    place = place_of_chunk[lanes * lane_chunks + chunks]
    at = (rows % chunk_rows * row_vectors)[:, None] + np.arange(row_vectors)
    inside = at * vector_bytes + (start + lanes * lane_bytes + chunks * stride)[:, None]
    cached = tiers[place] != 0
    if cached.any():
        page = pages[place[cached, None], at[cached] // page_vectors].astype(np.int64)
        inside[cached] = (page * page_vectors + at[cached] % page_vectors) * vector_bytes
    return (inside + bases[tiers[place]][:, None]).reshape(-1)
