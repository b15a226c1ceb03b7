"""Copies vectors from anywhere in memory to their rows of a pool, in one launch.

Stage: load. Sources are addresses, of memory on the device or of pinned CPU memory, which the
kernel reads over the bus without a copy in between (unified addressing: a pinned address is valid
on the device). So one launch takes what a layer uses from the device cache, the host cache and any
number of read buffers. `gather_reference` is the oracle.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from impress_sglang.triton.sizes import power_of_two

# Bytes that one program moves: each thread has several loads of 16 bytes in flight.
TILE_BYTES = 8192
MAX_TILE_ROWS = 128
# The most bytes that a thread moves at once.
WORD_BYTES = 16

# Vectors are moved as integers, so that no bit of them changes.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """Where the vectors of a row of a pool begin.

    `offsets` int64 [vectors] on the device, in elements from the beginning of the row; all of them
    are multiples of `grain`.
    """

    offsets: Tensor
    grain: int


def head_columns(pool: Tensor, heads: Sequence[int], width: int) -> Columns:
    """The vectors of `width` elements of some heads of a pool [rows, G, D], head after head."""
    assert pool.stride(2) == 1 and pool.shape[2] % width == 0
    return _head_columns(tuple(heads), pool.stride(1), pool.shape[2], width, pool.device)


@functools.lru_cache(maxsize=256)
def _head_columns(
    heads: tuple[int, ...], head_stride: int, dim: int, width: int, device: torch.device
) -> Columns:
    offsets = [head * head_stride + first for head in heads for first in range(0, dim, width)]
    return Columns(torch.tensor(offsets, dtype=torch.int64, device=device), math.gcd(*offsets))


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What to fill of a pool, and from where: n entries, each the vectors of one head group.

    Entry i fills, in the row `slots[p // head_groups]` of the pool, the vectors of head group
    `p % head_groups`, where p is `positions[i]`. No vector is filled twice.

    All of them are on the device, or pinned, but for the columns.

    Attributes:
        pool: [rows, ...]; any strides but the last, which is 1.
        columns: the columns of a row of the pool, head group by head group: head_groups * v.
        addresses: int64 [n, v], the address of the first byte of each vector.
        slots: int64 [rows that are filled]; None: row j is row j of the pool.
        positions: int64 [n]; None: entry i has position i.
        head_groups: head groups per row.
    """

    pool: Tensor
    columns: Columns
    addresses: Tensor
    slots: Tensor | None = None
    positions: Tensor | None = None
    head_groups: int = 1

    def __post_init__(self) -> None:
        vectors = self.addresses.shape[1] * self.head_groups
        assert self.columns.offsets.shape == (vectors,), "each vector of a row has a column"
        for index in self._indices:
            assert index.dtype == torch.int64 and index.is_contiguous()
        assert self.positions is None or len(self.positions) == len(self.addresses)

    @property
    def _indices(self) -> list[Tensor]:
        every = (self.columns.offsets, self.addresses, self.slots, self.positions)
        return [index for index in every if index is not None]

    def check_readable(self) -> None:
        """Check that all tensors can be reached from the device of the columns."""
        for tensor in (self.pool, *self._indices):
            assert_readable(tensor, self.columns.offsets.device)


def gather(targets: Sequence[Target], width: int, *, grain_bytes: int) -> None:
    """Fill one or two targets, in one launch that is not waited for.

    The memory at the addresses must not change until the device is done.

    Args:
        targets: in pools with elements of the same size, for instance keys and values.
        width: elements per vector, the same for all targets.
        grain_bytes: every address is a multiple of it; from 16 on, whole words are moved.
    """
    assert 1 <= len(targets) <= 2
    first, last = targets[0], targets[-1]
    most = max(target.addresses.numel() for target in targets)
    if not most:
        return
    size = first.pool.element_size()
    assert last.pool.element_size() == size
    for target in targets:
        target.check_readable()
    tile_rows = rows_of_tile(width, size)
    _gather_kernel[(-(-most // tile_rows), len(targets))](
        *_arguments(first),
        *_arguments(last),
        FIRST_HEAD_GROUPS=first.head_groups,
        FIRST_VECTORS=max(1, first.addresses.shape[1]),
        LAST_HEAD_GROUPS=last.head_groups,
        LAST_VECTORS=max(1, last.addresses.shape[1]),
        WIDTH=width,
        PADDED=power_of_two(width),
        FROM_GRAIN=math.gcd(grain_bytes, WORD_BYTES),
        TO_GRAIN=math.gcd(*(grain_of(own.pool, own.columns, width) for own in targets)),
        TILE_ROWS=tile_rows,
        num_warps=4,
    )


def rows_of_tile(width: int, element_bytes: int) -> int:
    """How many vectors of `width` elements a program moves."""
    return min(MAX_TILE_ROWS, max(1, TILE_BYTES // (power_of_two(width) * element_bytes)))


def grain_of(pool: Tensor, columns: Columns, width: int) -> int:
    """Bytes of which every vector's place in a pool is a multiple; at most `WORD_BYTES`."""
    steps = math.gcd(pool.stride(0), columns.grain, width)
    return math.gcd(pool.data_ptr(), steps * pool.element_size(), WORD_BYTES)


def gather_reference(targets: Sequence[Target], width: int, memories: Sequence[Tensor]) -> None:
    """Do the same as `gather` by torch indexing; addresses point into the flat `memories`."""
    for target in targets:
        entries, vectors = target.addresses.shape
        positions = torch.arange(entries) if target.positions is None else target.positions.cpu()
        rows = positions // target.head_groups
        rows = rows if target.slots is None else target.slots.cpu()[rows]
        columns = target.columns.offsets.cpu().view(target.head_groups, vectors)[
            positions % target.head_groups
        ]
        flat = target.pool.as_strided((_extent(target.pool),), (1,))
        for entry in range(entries):
            for vector in range(vectors):
                begin = int(rows[entry]) * target.pool.stride(0) + int(columns[entry, vector])
                source = _at(memories, int(target.addresses[entry, vector]), width)
                flat[begin : begin + width] = source.to(flat.device).view(flat.dtype)


def _extent(pool: Tensor) -> int:
    """Number of elements from the first to the last one of a pool."""
    steps = zip(pool.shape, pool.stride(), strict=True)
    return 1 + sum((count - 1) * stride for count, stride in steps)


def _at(memories: Sequence[Tensor], address: int, width: int) -> Tensor:
    """`width` elements that begin at an address inside one of the memories."""
    for memory in memories:
        first, rest = divmod(address - memory.data_ptr(), memory.element_size())
        if not rest and 0 <= first <= memory.numel() - width:
            return memory.view(-1)[first : first + width]
    raise AssertionError(f"{address} is in none of the memories")


def _arguments(target: Target) -> tuple[object, ...]:
    integer = INTEGERS[target.pool.element_size()]
    return (
        target.pool.view(integer),
        target.pool.stride(0),
        target.columns.offsets,
        target.addresses,
        target.addresses.numel(),
        target.slots,
        target.positions,
    )


def assert_readable(tensor: Tensor, device: torch.device) -> None:
    """Check that a kernel can read a tensor: on its device or, on CUDA, in pinned memory."""
    if tensor.device != device:
        assert device.type == "cuda" and tensor.is_pinned(), f"{tensor.device} is not pinned memory"


# Counts, and where an index begins in memory, differ from layer to layer.
@triton.jit(
    do_not_specialize=["first_count", "last_count"],
    do_not_specialize_on_alignment=[
        "first_columns",
        "first_addresses",
        "first_slots",
        "first_positions",
        "last_columns",
        "last_addresses",
        "last_slots",
        "last_positions",
    ],
)
def _gather_kernel(
    first_pool: tl.tensor,
    first_stride: tl.tensor,
    first_columns: tl.tensor,
    first_addresses: tl.tensor,
    first_count: tl.tensor,
    first_slots: tl.tensor,
    first_positions: tl.tensor,
    last_pool: tl.tensor,
    last_stride: tl.tensor,
    last_columns: tl.tensor,
    last_addresses: tl.tensor,
    last_count: tl.tensor,
    last_slots: tl.tensor,
    last_positions: tl.tensor,
    FIRST_HEAD_GROUPS: tl.constexpr,
    FIRST_VECTORS: tl.constexpr,
    LAST_HEAD_GROUPS: tl.constexpr,
    LAST_VECTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    FROM_GRAIN: tl.constexpr,
    TO_GRAIN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
) -> None:
    """One program per tile of vectors; of the first target if program id 1 is 0, else the last."""
    vectors = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    if tl.program_id(1) == 0:
        inside = vectors < first_count
        place = place_vectors(
            vectors,
            inside,
            first_stride,
            first_columns,
            first_slots,
            first_positions,
            FIRST_HEAD_GROUPS,
            FIRST_VECTORS,
        )
        source = tl.load(first_addresses + vectors, mask=inside, other=0)
        move_vectors(source, first_pool, place, inside, WIDTH, PADDED, FROM_GRAIN, TO_GRAIN)
    else:
        inside = vectors < last_count
        place = place_vectors(
            vectors,
            inside,
            last_stride,
            last_columns,
            last_slots,
            last_positions,
            LAST_HEAD_GROUPS,
            LAST_VECTORS,
        )
        source = tl.load(last_addresses + vectors, mask=inside, other=0)
        move_vectors(source, last_pool, place, inside, WIDTH, PADDED, FROM_GRAIN, TO_GRAIN)


@triton.jit
def place_vectors(
    vectors: tl.tensor,
    inside: tl.tensor,
    stride: tl.tensor,
    columns: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    HEAD_GROUPS: tl.constexpr,
    VECTORS: tl.constexpr,
) -> tl.tensor:
    """The element of the pool where each vector goes."""
    position = (vectors // VECTORS).to(tl.int64)
    if positions is not None:
        position = tl.load(positions + position, mask=inside, other=0)
    row = position // HEAD_GROUPS
    if slots is not None:
        row = tl.load(slots + row, mask=inside, other=0)
    column = (position % HEAD_GROUPS) * VECTORS + vectors % VECTORS
    return row * stride + tl.load(columns + column, mask=inside, other=0)


@triton.jit
def move_vectors(
    source: tl.tensor,
    pool: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    FROM_GRAIN: tl.constexpr,
    TO_GRAIN: tl.constexpr,
) -> None:
    """Copy vectors of WIDTH elements from the addresses `source` to `pool + place`."""
    columns = tl.arange(0, PADDED)
    mask = inside[:, None] & (columns < WIDTH)[None, :]
    # The compiler sees no divisibility in loaded values, and would move element by element. A hint
    # counts only on values computed in the same function; for a pointer it is in bytes.
    begin = tl.multiple_of(source.to(tl.pointer_type(pool.dtype.element_ty)), FROM_GRAIN)
    words = tl.load(begin[:, None] + columns[None, :], mask=mask)
    target = tl.multiple_of(pool + place, TO_GRAIN)
    tl.store(target[:, None] + columns[None, :], words, mask=mask)
