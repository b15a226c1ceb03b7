"""The arithmetic of a read: rows to chunks to blocks, compared with loops over single tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.storage.layout import Column, SegmentLayout
from impress_sglang.storage.segment import MappingLists
from impress_sglang.tiers.placement import Tier
from impress_sglang.transfer.geometry import (
    ColumnGroup,
    LayerGeometry,
    SourceSpan,
    geometry_of,
    plan_rows,
)
from impress_sglang.transfer.read_planner import PrefixPlanner
from tests.unit import kv_factory as kv

BLOCK = 4096
# Rows of a few bytes, rows that cross the ends of blocks, and rows longer than a block.
SHAPES = [
    kv.make_shape(),
    kv.make_shape(query_heads=3, kv_heads=3, key_dim=128, value_dim=160, probe=(1,)),
    kv.make_shape(key_dim=500, value_dim=1500),
    kv.make_shape(key_dim=512, value_dim=1024, probe=(0, 1)),
    kv.make_shape(probe=()),
    kv.make_shape(query_heads=3, kv_heads=3, key_dim=128, value_dim=1500, probe=()),
]
SPAN_SHAPES = {"probe heads": SHAPES[0], "no probe heads": SHAPES[4]}


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


def group_of(geometry: LayerGeometry, layout: SegmentLayout, column: Column) -> ColumnGroup | None:
    if column == kv.PROBE:
        return geometry.probe
    return geometry.values if kv.holds_values(layout.shape, column) else geometry.keys


def chunks_of(layout: SegmentLayout, column: Column) -> list[int]:
    """Bytes on disk of each chunk of a column."""
    count = -(-layout.num_tokens // layout.chunk_tokens)
    own = layout.shape, column, layout.chunk_tokens, layout.num_tokens
    return [kv.chunk_disk_bytes(*own, chunk) for chunk in range(count)]


def column_starts(layout: SegmentLayout) -> dict[Column, tuple[int, int]]:
    """Where each column starts in its layer: byte, and number of the first chunk."""
    starts, place, chunk = {}, 0, 0
    for column in kv.columns_of(layout.shape):
        starts[column] = place, chunk
        place += sum(chunks_of(layout, column))
        chunk += len(chunks_of(layout, column))
    return starts


@given(layouts())
def test_geometry_of_a_layer_is_that_of_its_columns(layout: SegmentLayout) -> None:
    geometry, starts = geometry_of(layout), column_starts(layout)
    chunk_of_block: list[int] = []
    for column in kv.columns_of(layout.shape):
        group, sizes = group_of(geometry, layout, column), chunks_of(layout, column)
        size = kv.row_size(layout.shape, column)
        if not size:
            assert group is None
            continue
        assert group is not None
        head_group = 0 if column == kv.PROBE else kv.head_group_of(layout.shape, column)
        assert group.head_groups == (1 if column == kv.PROBE else kv.head_groups_of(layout.shape))
        assert group.start + head_group * group.column_bytes == starts[column][0]
        assert group.first_chunk + head_group * group.chunks == starts[column][1]
        assert (group.column_bytes, group.chunks) == (sum(sizes), len(sizes))
        assert (group.row_bytes, group.chunk_rows) == (size, layout.chunk_tokens)
        total = layout.num_tokens
        rows = [
            min(layout.chunk_tokens, total - chunk * layout.chunk_tokens)
            for chunk in range(len(sizes))
        ]
        own = slice(head_group * len(sizes), (head_group + 1) * len(sizes))
        assert group.rows_of_chunk[own].tolist() == rows
        mine = [chunk for chunk, num in enumerate(sizes) for _ in range(num // BLOCK)]
        chunk_of_block += [starts[column][1] + chunk for chunk in mine]
        assert group.blocks.start == group.start // BLOCK
        blocks = len(mine)
        in_group = group.chunk_of_block[head_group * blocks : (head_group + 1) * blocks]
        assert in_group.tolist() == [head_group * len(sizes) + chunk for chunk in mine]
        assert group.blocks.stop - group.blocks.start == group.head_groups * blocks
    assert geometry.chunk_of_block.tolist() == chunk_of_block
    assert geometry.num_blocks == len(chunk_of_block)
    assert geometry.num_chunks == sum(
        len(chunks_of(layout, s)) for s in kv.columns_of(layout.shape)
    )


@given(layouts(), st.data())
def test_wanted_blocks_are_those_that_hold_a_byte_of_a_row(
    layout: SegmentLayout, data: st.DataObject
) -> None:
    geometry = geometry_of(layout)
    group = data.draw(
        st.sampled_from([g for g in (geometry.probe, geometry.keys, geometry.values) if g])
    )
    places = [
        (head_group, row) for head_group in range(group.head_groups) for row in range(group.rows)
    ]
    chosen = [places[place] for place in some_of(data, len(places))]
    head_groups, rows = np.array(chosen).T
    expected = np.zeros(group.head_groups * group.column_bytes // BLOCK, np.bool_)
    stride = -(-layout.chunk_tokens * group.row_bytes // BLOCK) * BLOCK
    offsets = []
    for head_group, row in chosen:
        chunk, place = divmod(row, layout.chunk_tokens)
        offsets.append(head_group * group.column_bytes + chunk * stride + place * group.row_bytes)
        last = offsets[-1] + group.row_bytes - 1
        expected[offsets[-1] // BLOCK : last // BLOCK + 1] = True

    assert group.row_offsets(head_groups, rows).tolist() == offsets
    assert group.blocks_of_rows(head_groups, rows).tolist() == expected.tolist()


@given(layouts(), st.data())
def test_groups_that_look_alike_have_the_same_blocks(
    layout: SegmentLayout, data: st.DataObject
) -> None:
    geometry = geometry_of(layout)
    keys, values = geometry.keys, geometry.values
    if keys is None:
        return
    shape = layout.shape
    alike = kv.row_size(shape, shape.key_columns[0]) == kv.row_size(shape, shape.value_columns[0])
    assert keys.looks_like(values) == values.looks_like(keys) == alike
    if alike:
        rows = some_of(data, values.rows)
        head_groups = np.full(len(rows), values.head_groups - 1)
        assert (
            keys.blocks_of_rows(head_groups, rows) == values.blocks_of_rows(head_groups, rows)
        ).all()


def span_of(
    directory: Path, layout: SegmentLayout, mapping_seed: int | None, start: int, stop: int
) -> tuple[SourceSpan, MappingLists | None]:
    info = kv.make_info(
        layout.shape,
        range(layout.num_tokens),
        chunk_tokens=layout.chunk_tokens,
        generation=mapping_seed is not None,
    )
    mapping = None if mapping_seed is None else kv.random_mapping(info, mapping_seed)
    kvs = kv.random_kvs(layout.shape, layout.num_tokens, seed=1)
    path = kv.write_kvs(directory, info, *kvs, mapping=mapping)
    return kv.open_span(path, kv.make_cache(layout.shape), start, stop), mapping


@given(data=st.data())
@pytest.mark.parametrize("name", SPAN_SHAPES)
def test_rows_are_planned_where_they_stand(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    """Of all head groups at once, each with tokens of its own; others do not count."""
    shape = SPAN_SHAPES[name]
    layout = SegmentLayout(shape, 8 * data.draw(st.integers(1, 3)), 45, BLOCK)
    seed = data.draw(st.sampled_from([None, 1, 2]))
    span, mapping = span_of(tmp_path_factory.mktemp("plan"), layout, seed, 3, 45)
    layer, num_chunks = data.draw(st.integers(0, 1)), -(-45 // layout.chunk_tokens)
    num_head_groups, num_rows = kv.head_groups_of(shape), layout.num_tokens
    alone = data.draw(st.booleans())
    # Tokens of other spans stand before and behind in the prefix.
    first = 0 if alone else data.draw(st.integers(0, 4))
    count = data.draw(st.integers(1, len(span)))
    numbers = st.integers(0, len(span) - 1 if alone else len(span) + 9)
    some = st.sets(numbers, min_size=count, max_size=count).map(sorted)
    tokens = np.array([data.draw(some) for _ in range(num_head_groups)])
    asked = [
        (place * num_head_groups + head_group, head_group, token - first + span.start)
        for place in range(count)
        for head_group, token in enumerate(tokens[:, place].tolist())
        if first <= token < first + len(span)
    ]
    rows = [
        (position, head_group, token if mapping is None else int(mapping[layer, head_group][token]))
        for position, head_group, token in asked
    ]

    plan = plan_rows(span, layer, tokens, first, alone=alone)

    found = list(zip(plan.head_groups.tolist(), plan.rows.tolist(), strict=True))
    if alone:
        assert plan.positions is None and found == [own[1:] for own in rows]
    else:
        assert plan.positions is not None and plan.positions.dtype == np.int64
        placed = zip(plan.positions.tolist(), found, strict=True)
        assert sorted((position, *own) for position, own in placed) == sorted(rows)
    chunks = [head_group * num_chunks + row // layout.chunk_tokens for _, head_group, row in rows]
    assert plan.chunks.tolist() == sorted(set(chunks))
    assert plan.counts.tolist() == [chunks.count(chunk) for chunk in plan.chunks.tolist()]
    for chunk, own, share in zip(plan.chunks, plan.counts, plan.shares, strict=True):
        start = chunk % num_chunks * layout.chunk_tokens
        assert share == own / (min(start + layout.chunk_tokens, num_rows) - start)
    geometry = span.geometry
    for group, blocks in ((geometry.keys, plan.key_blocks), (geometry.values, plan.value_blocks)):
        assert (group is None) == (blocks is None)
        if group is not None and blocks is not None:
            expected = group.blocks_of_rows(plan.head_groups, plan.rows)
            assert blocks.tolist() == expected.tolist()
    span.segment.close()


def first_id(span: SourceSpan, layer: int, column: Column) -> int:
    """Chunks are numbered by layer, then by column."""
    layout = span.segment.layout
    counts = [len(chunks_of(layout, other)) for other in kv.columns_of(layout.shape)]
    return span.base + layer * sum(counts) + sum(counts[:column])


@given(data=st.data())
def test_the_probe_column_is_planned_whole_and_in_logical_order(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever the order of the rest."""
    shape = SPAN_SHAPES["probe heads"]
    count = data.draw(st.integers(1, 300))
    layout = SegmentLayout(shape, 8 * data.draw(st.integers(1, 2)), count, BLOCK)
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    seed = data.draw(st.sampled_from([None, 1]))
    span, _ = span_of(tmp_path_factory.mktemp("plan"), layout, seed, start, stop)
    rows = list(range(start, stop))
    chunks = [row // layout.chunk_tokens for row in rows]
    cache = kv.make_cache(shape)
    assert kv.attach(cache, layout) == span.base
    planner = PrefixPlanner(shape, [span], cache.placement, cache.page.page_bytes)

    for layer in range(2):
        (own,) = planner.plan_probe(layer).spans
        (part,) = own.parts
        assert own.rows is None and part.group is span.geometry.probe
        assert part.chunks.tolist() == sorted(set(chunks))
        assert part.counts.tolist() == [chunks.count(chunk) for chunk in sorted(set(chunks))]
        assert part.ids.tolist() == (first_id(span, layer, kv.PROBE) + part.chunks).tolist()
        assert own.blocks is not None
        assert own.blocks.tolist() == span.probe_blocks.tolist()
        wanted = np.zeros(span.geometry.num_blocks, np.bool_)
        wanted[part.group.blocks] = part.group.blocks_of_rows(np.zeros_like(rows), np.array(rows))
        assert own.blocks.tolist() == wanted.tolist()
    span.segment.close()


@given(data=st.data())
@pytest.mark.parametrize("name", SPAN_SHAPES)
def test_blocks_of_a_span_are_those_that_hold_its_rows(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    """And of these, those whose chunks are in a cache are not missing."""
    shape = SPAN_SHAPES[name]
    count = data.draw(st.integers(1, 60))
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    layout = SegmentLayout(shape, 8 * data.draw(st.integers(1, 2)), count, BLOCK)
    info = kv.make_info(shape, range(count), chunk_tokens=layout.chunk_tokens)
    path = kv.write_kvs(tmp_path_factory.mktemp("plan"), info, *kv.random_kvs(shape, count, seed=1))
    cache = kv.make_cache(shape, host_chunks=3, chunk_tokens=16)
    span = kv.open_span(path, cache, start, stop)
    ids = first_id(span, 1, kv.PROBE) + np.arange(span.geometry.num_chunks)
    ids = ids[some_of(data, len(ids))]
    cache.placement.access(ids, np.ones(len(ids)))
    planner = PrefixPlanner(shape, [span], cache.placement, cache.page.page_bytes)

    expected: dict[bool, list[bool]] = {True: [], False: []}
    possible: dict[bool, list[bool]] = {True: [], False: []}
    for column in kv.columns_of(shape):
        size, sizes = kv.row_size(shape, column), chunks_of(layout, column)
        rows = range(start, stop)
        for chunk, num_bytes in enumerate(sizes):
            first = chunk * layout.chunk_tokens
            held = {
                ((row - first) * size + byte) // BLOCK
                for row in rows
                if first <= row < first + layout.chunk_tokens
                for byte in range(size)
            }
            tier = int(cache.placement.tiers(first_id(span, 1, column) + chunk, 1)[0])
            for block in range(num_bytes // BLOCK):
                for probe in (True, False):
                    here = block in held and (column == kv.PROBE) == probe
                    possible[probe].append(here)
                    expected[probe].append(here and tier == Tier.SSD)

    assert span.probe_blocks.tolist() == possible[True]
    assert span.kv_blocks.tolist() == possible[False]
    for probe in (True, False):
        for layers, found in ((1, [expected[probe]]), (2, [possible[probe], expected[probe]])):
            first = 2 - layers
            missing = planner.missing(first, span, probe=probe)
            assert missing.tolist() == found
            for count in range(1, layers + 1):
                some = planner.missing(first, span, probe=probe, layers=count)
                assert some.tolist() == found[:count]
    span.segment.close()
