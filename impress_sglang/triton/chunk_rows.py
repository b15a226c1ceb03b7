"""Copies neighbouring rows out of their chunks to rows of a pool, in one launch.

Stage: load. Where each page of the chunks begins is all that the host tells; `gather` is for rows
that are anywhere. `impress_sglang.loops.vector_addresses` says where rows are in chunks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from impress_sglang.triton.gather import (
    INTEGERS,
    WORD_BYTES,
    Columns,
    assert_readable,
    grain_of,
    move_vectors,
    place_vectors,
    rows_of_tile,
)
from impress_sglang.triton.sizes import power_of_two


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkRows:
    """A pool, and the chunks that have its rows, the same rows of each head group.

    Attributes:
        pool: see `gather.Target`.
        columns: see `gather.Target`.
        pages: int64 [head groups, chunks, pages of a chunk] on the device: where each page of
            neighbouring chunks begins. Rows follow each other through the pages of a chunk.
        slots: int64 [n] on the device: where each row goes; None: row j is row j of the pool.
    """

    pool: Tensor
    columns: Columns
    pages: Tensor
    slots: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.pages.dtype == torch.int64 and self.pages.is_contiguous()
        assert not len(self.columns.offsets) % len(self.pages)

    @property
    def vectors(self) -> int:
        """Vectors of a row of a head group."""
        return len(self.columns.offsets) // len(self.pages)


def gather_chunks(
    targets: Sequence[ChunkRows],
    rows: tuple[int, int],
    chunk_rows: int,
    width: int,
    *,
    grain_bytes: int,
) -> None:
    """Fill slots of one or two pools with neighbouring rows, in one launch that is not waited for.

    The memory at the addresses must not change until the device is done.

    Args:
        targets: in pools with elements of the same size, with as many head groups and chunks.
        rows: the first row, counted from that of the first chunk, and how many.
        chunk_rows: rows of a chunk.
        width: elements per vector.
        grain_bytes: see `gather.gather`.
    """
    assert 1 <= len(targets) <= 2
    first, last = targets[0], targets[-1]
    size = first.pool.element_size()
    assert last.pool.element_size() == size and last.pages.shape[:2] == first.pages.shape[:2]
    start, count = rows
    head_groups, chunks = first.pages.shape[:2]
    assert start + count <= chunks * chunk_rows
    for own in targets:
        assert_readable(own.pool, own.pages.device)
    tile_rows = rows_of_tile(width, size)
    most = count * head_groups * max(own.vectors for own in targets)
    pointers = [
        (
            own.pool.view(INTEGERS[size]),
            own.pool.stride(0),
            own.columns.offsets,
            own.pages,
            own.slots,
        )
        for own in (first, last)
    ]
    _chunks_kernel[(-(-most // tile_rows), len(targets))](
        *pointers[0],
        *pointers[1],
        start,
        count,
        chunks,
        HEAD_GROUPS=head_groups,
        FIRST_VECTORS=first.vectors,
        FIRST_PAGES=first.pages.shape[2],
        LAST_VECTORS=last.vectors,
        LAST_PAGES=last.pages.shape[2],
        CHUNK_ROWS=chunk_rows,
        WIDTH=width,
        PADDED=power_of_two(width),
        VECTOR_BYTES=width * size,
        FROM_GRAIN=math.gcd(grain_bytes, WORD_BYTES),
        TO_GRAIN=math.gcd(*(grain_of(own.pool, own.columns, width) for own in targets)),
        TILE_ROWS=tile_rows,
        num_warps=4,
    )


# Counts, and where an index begins in memory, differ from layer to layer.
@triton.jit(
    do_not_specialize=["start", "count", "chunks"],
    do_not_specialize_on_alignment=[
        "first_columns",
        "first_pages",
        "first_slots",
        "last_columns",
        "last_pages",
        "last_slots",
    ],
)
def _chunks_kernel(
    first_pool: tl.tensor,
    first_stride: tl.tensor,
    first_columns: tl.tensor,
    first_pages: tl.tensor,
    first_slots: tl.tensor,
    last_pool: tl.tensor,
    last_stride: tl.tensor,
    last_columns: tl.tensor,
    last_pages: tl.tensor,
    last_slots: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    chunks: tl.tensor,
    HEAD_GROUPS: tl.constexpr,
    FIRST_VECTORS: tl.constexpr,
    FIRST_PAGES: tl.constexpr,
    LAST_VECTORS: tl.constexpr,
    LAST_PAGES: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    VECTOR_BYTES: tl.constexpr,
    FROM_GRAIN: tl.constexpr,
    TO_GRAIN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
) -> None:
    """One program per tile of vectors; of the first target if program id 1 is 0, else the last."""
    vectors = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    if tl.program_id(1) == 0:
        inside = vectors < count * (HEAD_GROUPS * FIRST_VECTORS)
        place = place_vectors(
            vectors,
            inside,
            first_stride,
            first_columns,
            first_slots,
            None,
            HEAD_GROUPS,
            FIRST_VECTORS,
        )
        source = _in_chunks(
            vectors,
            inside,
            first_pages,
            start,
            chunks,
            HEAD_GROUPS,
            FIRST_VECTORS,
            FIRST_PAGES,
            CHUNK_ROWS,
            VECTOR_BYTES,
        )
        move_vectors(source, first_pool, place, inside, WIDTH, PADDED, FROM_GRAIN, TO_GRAIN)
    else:
        inside = vectors < count * (HEAD_GROUPS * LAST_VECTORS)
        place = place_vectors(
            vectors,
            inside,
            last_stride,
            last_columns,
            last_slots,
            None,
            HEAD_GROUPS,
            LAST_VECTORS,
        )
        source = _in_chunks(
            vectors,
            inside,
            last_pages,
            start,
            chunks,
            HEAD_GROUPS,
            LAST_VECTORS,
            LAST_PAGES,
            CHUNK_ROWS,
            VECTOR_BYTES,
        )
        move_vectors(source, last_pool, place, inside, WIDTH, PADDED, FROM_GRAIN, TO_GRAIN)


@triton.jit
def _in_chunks(
    vectors: tl.tensor,
    inside: tl.tensor,
    pages: tl.tensor,
    start: tl.tensor,
    chunks: tl.tensor,
    HEAD_GROUPS: tl.constexpr,
    VECTORS: tl.constexpr,
    PAGES: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    VECTOR_BYTES: tl.constexpr,
) -> tl.tensor:
    """The address of each vector."""
    # All pages of a chunk together have the vectors of all its rows.
    PAGE_VECTORS: tl.constexpr = CHUNK_ROWS * VECTORS // PAGES
    entry = vectors // VECTORS
    row = start + entry // HEAD_GROUPS
    inner = (row % CHUNK_ROWS) * VECTORS + vectors % VECTORS
    chunk = (entry % HEAD_GROUPS) * chunks + row // CHUNK_ROWS
    page = tl.load(pages + chunk * PAGES + inner // PAGE_VECTORS, mask=inside, other=0)
    return page + (inner % PAGE_VECTORS) * VECTOR_BYTES
