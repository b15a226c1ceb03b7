"""The arithmetic of a read: rows to chunks to blocks, compared with loops over single tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.storage.layout import KVShape, SegmentLayout, Stream
from impress_sglang.storage.segment import MappingLists
from impress_sglang.transfer.plan import (
    SourceSpan,
    StagedRun,
    block_runs,
    plan_probe,
    plan_rows,
    wanted_blocks,
)
from tests.unit.kv_factory import (
    PROBE,
    VALUES,
    kv_of,
    lane_of,
    lanes_of,
    make_cache,
    make_info,
    make_shape,
    open_span,
    random_kvs,
    random_mapping,
    row_size,
    rows_in,
    streams_of,
    tokens_in_row,
    write_kvs,
)

BLOCK = 4096
# Rows of a few bytes, rows that cross the ends of blocks, and rows longer than a block.
SHAPES = [
    make_shape(),
    make_shape(query_heads=3, kv_heads=3, key_dim=128, value_dim=160, probe=(1,)),
    make_shape(key_dim=500, value_dim=1500),
    make_shape(key_dim=512, value_dim=1024, probe=(0, 1)),
    make_shape(sketch_bits=4),
    make_shape(query_heads=3, kv_heads=3, key_dim=128, value_dim=1500, sketch_bits=8),
]
SPAN_SHAPES = {
    "probe heads": SHAPES[0],
    "sketch": SHAPES[4],
    "sketch bfloat16": make_shape(dtype=torch.bfloat16, sketch_bits=2),
}


@st.composite
def layouts(draw: st.DrawFn) -> SegmentLayout:
    return SegmentLayout(
        draw(st.sampled_from(SHAPES)),
        chunk_tokens=8 * draw(st.integers(1, 3)),
        num_tokens=draw(st.integers(1, 70)),
        header_bytes=BLOCK * draw(st.integers(1, 3)),
    )


def some_of(data: st.DataObject, count: int) -> np.ndarray:
    """At least one of the numbers [0, count), ascending."""
    return np.array(sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1))))


def stream_with_bytes(data: st.DataObject, shape: KVShape) -> Stream:
    return data.draw(st.sampled_from([s for s in streams_of(shape) if row_size(shape, s)]))


def span_of(
    directory: Path, layout: SegmentLayout, mapping_seed: int | None, start: int, stop: int
) -> tuple[SourceSpan, MappingLists | None]:
    info = make_info(
        layout.shape,
        range(layout.num_tokens),
        chunk_tokens=layout.chunk_tokens,
        generation=mapping_seed is not None,
    )
    mapping = None if mapping_seed is None else random_mapping(info, mapping_seed)
    kvs = random_kvs(layout.shape, layout.num_tokens, seed=1)
    path = write_kvs(directory, info, *kvs, mapping=mapping)
    return open_span(path, make_cache(layout.shape), start, stop), mapping


@given(data=st.data())
@pytest.mark.parametrize("name", SPAN_SHAPES)
def test_rows_are_planned_where_they_stand(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    shape = SPAN_SHAPES[name]
    layout = SegmentLayout(shape, 8 * data.draw(st.integers(1, 3)), 45, BLOCK)
    seed = data.draw(st.sampled_from([None, 1, 2]))
    span, mapping = span_of(tmp_path_factory.mktemp("plan"), layout, seed, 3, 45)
    tokens, layer = some_of(data, 45), data.draw(st.integers(0, 1))
    lane = data.draw(st.integers(0, lanes_of(shape) - 1))
    rows = [int(token if mapping is None else mapping[layer, lane][token]) for token in tokens]
    chunks = [row // layout.chunk_tokens for row in rows]

    plan = plan_rows(span, layer, lane, tokens)

    assert plan.num_rows == len(tokens)
    assert plan.chunks.tolist() == sorted(set(chunks))
    assert plan.counts.tolist() == [chunks.count(chunk) for chunk in sorted(set(chunks))]
    assert plan.chunks[plan.chunk_of_row].tolist() == chunks
    assert plan.offset_of_row.tolist() == [row % layout.chunk_tokens for row in rows]
    sizes = [min(layout.chunk_tokens, 45 - c * layout.chunk_tokens) for c in sorted(set(chunks))]
    assert plan.shares().tolist() == [
        chunks.count(chunk) / size for chunk, size in zip(sorted(set(chunks)), sizes, strict=True)
    ]
    for stream in kv_of(shape):
        if lane_of(shape, stream) == lane:
            first = first_id(span, layer, stream)
            assert plan.chunk_ids(layer, stream).tolist() == (first + plan.chunks).tolist()
    span.segment.close()


def first_id(span: SourceSpan, layer: int, stream: Stream) -> int:
    """Chunks are numbered by layer, then by stream; sketches have fewer."""
    layout = span.segment.layout
    counts = [
        -(-rows_in(layout.shape, other, layout.num_tokens) // layout.chunk_tokens)
        for other in streams_of(layout.shape)
    ]
    return span.base + layer * sum(counts) + sum(counts[:stream])


@given(data=st.data())
@pytest.mark.parametrize("name", SPAN_SHAPES)
def test_the_probe_stream_is_planned_whole_and_in_logical_order(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    """Whatever the order of the rest; the first and the last row may hold tokens of no one."""
    shape = SPAN_SHAPES[name]
    count = data.draw(st.integers(1, 300))
    layout = SegmentLayout(shape, 8 * data.draw(st.integers(1, 2)), count, BLOCK)
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    seed = data.draw(st.sampled_from([None, 1]))
    span, _ = span_of(tmp_path_factory.mktemp("plan"), layout, seed, start, stop)
    rows = sorted({token // tokens_in_row(shape, PROBE) for token in range(start, stop)})
    chunks = [row // layout.chunk_tokens for row in rows]

    plan = plan_probe(span)

    assert plan.unbroken
    assert plan.num_rows == len(rows)
    assert plan.chunks.tolist() == sorted(set(chunks))
    assert plan.chunks[plan.chunk_of_row].tolist() == chunks
    assert plan.offset_of_row.tolist() == [row % layout.chunk_tokens for row in rows]
    total = rows_in(shape, PROBE, count)
    sizes = [min(layout.chunk_tokens, total - c * layout.chunk_tokens) for c in sorted(set(chunks))]
    assert plan.shares().tolist() == [
        chunks.count(chunk) / size for chunk, size in zip(sorted(set(chunks)), sizes, strict=True)
    ]
    for layer in range(2):
        ids = first_id(span, layer, PROBE) + plan.chunks
        assert plan.chunk_ids(layer, PROBE).tolist() == ids.tolist()
    span.segment.close()


@pytest.mark.parametrize(
    ("tokens", "unbroken"),
    [([7], True), ([7, 8, 9], True), (range(45), True), ([7, 9], False), ([7, 8, 10], False)],
)
@pytest.mark.parametrize("name", SPAN_SHAPES)
def test_only_neighbouring_rows_are_unbroken(
    tmp_path: Path, name: str, tokens: list[int], unbroken: bool
) -> None:
    layout = SegmentLayout(SPAN_SHAPES[name], 8, 45, BLOCK)
    lane = lanes_of(layout.shape) - 1
    plain, _ = span_of(tmp_path, layout, None, 0, 45)
    assert plan_rows(plain, 0, lane, np.array(tokens)).unbroken == unbroken
    plain.segment.close()

    reordered, _ = span_of(tmp_path, layout, 1, 0, 45)
    assert not plan_rows(reordered, 0, lane, np.array(tokens)).unbroken
    reordered.segment.close()


@pytest.mark.parametrize("name", SPAN_SHAPES)
def test_ids_of_a_second_segment_follow_its_own_base(tmp_path: Path, name: str) -> None:
    shape = SPAN_SHAPES[name]
    path = write_kvs(tmp_path, make_info(shape, range(20)), *random_kvs(shape, 20, seed=1))
    cache = make_cache(shape)
    first, second = open_span(path, cache), open_span(path, cache)

    every: list[int] = []
    for span in (first, second):
        for layer in range(2):
            every += plan_probe(span).chunk_ids(layer, PROBE).tolist()
            for stream in kv_of(shape):
                plan = plan_rows(span, layer, lane_of(shape, stream), np.arange(20))
                every += plan.chunk_ids(layer, stream).tolist()

    assert len(set(every)) == len(every) == 2 * first.segment.layout.total_chunks
    first.segment.close()
    second.segment.close()


@given(layouts(), st.data())
def test_wanted_blocks_are_those_that_hold_a_byte_of_a_row(
    layout: SegmentLayout, data: st.DataObject
) -> None:
    stream = stream_with_bytes(data, layout.shape)
    chunks = some_of(data, layout.stream_chunks(stream))
    whole = np.array([data.draw(st.booleans()) for _ in chunks])
    row_bytes = row_size(layout.shape, stream)
    expected, positions, offsets = [], [], []
    for position, chunk in enumerate(chunks.tolist()):
        rows = rows_in(layout.shape, stream, layout.num_tokens) - chunk * layout.chunk_tokens
        rows = min(rows, layout.chunk_tokens)
        wanted = list(range(rows)) if whole[position] else some_of(data, rows).tolist()
        touched = {
            byte // BLOCK
            for row in wanted
            for byte in (
                *range(row * row_bytes, (row + 1) * row_bytes, 64),
                (row + 1) * row_bytes - 1,
            )
        }
        blocks = -(-layout.chunk_tokens * row_bytes // BLOCK)
        expected.append([block in touched for block in range(blocks)])
        # A chunk that is wanted whole need not say all its rows.
        said = wanted[:1] if whole[position] else wanted
        positions += [position] * len(said)
        offsets += said

    found = wanted_blocks(layout, stream, chunks, whole, np.array(positions), np.array(offsets))

    assert found.tolist() == expected


def naive_runs(
    layout: SegmentLayout,
    layer: int,
    stream: Stream,
    chunks: np.ndarray,
    wanted: np.ndarray,
    gap_bytes: int,
) -> list[StagedRun]:
    """Block by block: go on with the last run where that costs no more than the gap."""
    runs: list[StagedRun] = []
    width = wanted.shape[1]
    for position, chunk in enumerate(chunks.tolist()):
        start = layout.stream_offset(layer, stream) + chunk * width * BLOCK
        for block in np.flatnonzero(wanted[position]).tolist():
            offset, staged = start + block * BLOCK, (position * width + block) * BLOCK
            last = runs[-1] if runs else None
            if last is not None:
                behind = last.offset + last.stop - last.start
                gap = offset - behind
                if gap == staged - last.stop and gap <= gap_bytes:
                    runs[-1] = StagedRun(last.offset, last.start, staged + BLOCK)
                    continue
            runs.append(StagedRun(offset, staged, staged + BLOCK))
    return runs


GAPS = st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 1 << 20])


@given(layouts(), GAPS, st.data())
def test_runs_of_blocks_are_those_of_a_loop_over_blocks(
    layout: SegmentLayout, gap_bytes: int, data: st.DataObject
) -> None:
    stream = stream_with_bytes(data, layout.shape)
    layer = data.draw(st.integers(0, 1))
    chunks = some_of(data, layout.stream_chunks(stream))
    width = layout.chunk_stride(stream) // BLOCK
    wanted = np.array([[data.draw(st.booleans()) for _ in range(width)] for _ in chunks])

    found = block_runs(layout, layer, stream, chunks, wanted, gap_bytes)

    assert found == naive_runs(layout, layer, stream, chunks, wanted, gap_bytes)
    staged = np.zeros(wanted.size, np.bool_)
    for run in found:
        assert not staged[run.start // BLOCK : run.stop // BLOCK].any(), "read twice"
        staged[run.start // BLOCK : run.stop // BLOCK] = True
    assert staged[wanted.reshape(-1)].all(), "all that is wanted"
    if gap_bytes < BLOCK:
        assert staged.sum() == wanted.sum(), "nothing else"


def test_chunks_that_are_apart_on_disk_are_never_one_run() -> None:
    """However cheap the gap: their memory is in one piece, so there is no place for it."""
    layout = SegmentLayout(make_shape(), 8, 40, BLOCK)
    chunks, wanted = np.array([0, 1, 3]), np.ones((3, 1), np.bool_)

    found = block_runs(layout, 0, PROBE, chunks, wanted, 1 << 20)

    assert found == [
        StagedRun(BLOCK, 0, 2 * BLOCK),
        StagedRun(4 * BLOCK, 2 * BLOCK, 3 * BLOCK),
    ]


@pytest.mark.parametrize(
    ("gap_bytes", "runs"),
    [(0, [(0, 1), (2, 3), (5, 6)]), (4096, [(0, 3), (5, 6)]), (8192, [(0, 6)])],
)
def test_a_gap_is_read_through_when_it_is_no_larger_than_told(
    gap_bytes: int, runs: list[tuple[int, int]]
) -> None:
    """Chunks of three blocks: blocks 0 and 2 of the first one, and the last of the second."""
    layout = SegmentLayout(make_shape(key_dim=192, value_dim=192), 8, 16, BLOCK)
    assert layout.chunk_stride(VALUES) == 3 * BLOCK
    wanted = np.array([[True, False, True], [False, False, True]])

    found = block_runs(layout, 0, VALUES, np.array([0, 1]), wanted, gap_bytes)

    base = layout.stream_offset(0, VALUES)
    assert found == [
        StagedRun(base + start * BLOCK, start * BLOCK, stop * BLOCK) for start, stop in runs
    ]


def test_nothing_wanted_is_no_run() -> None:
    layout = SegmentLayout(make_shape(), 8, 16, BLOCK)

    assert not block_runs(layout, 0, VALUES, np.array([0, 1]), np.zeros((2, 1), np.bool_), 1 << 20)
