"""The arithmetic of a read: rows to chunks to blocks, compared with loops over single tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.storage.layout import Column, SegmentLayout
from impress_sglang.transfer.geometry import (
    ColumnGroup,
    LayerGeometry,
    geometry_of,
)
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


@st.composite
def layouts(draw: st.DrawFn) -> SegmentLayout:
    return SegmentLayout(
        draw(st.sampled_from(SHAPES)),
        chunk_tokens=8 * draw(st.integers(1, 3)),
        num_tokens=draw(st.integers(1, 70)),
        header_bytes=BLOCK * draw(st.integers(1, 3)),
    )


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
