"""Rows of a layer from wherever they are to their slots, in one launch.

Stage: load. The kernel reads vectors on the device, and vectors in pinned CPU memory over the bus
without a copy in between (unified addressing: a pinned address is valid on the device).
`gather_vectors_reference` is the oracle.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

# An index is the space above these bits, and the number of a vector in them.
SPACE_SHIFT = 56
VECTOR_MASK = (1 << SPACE_SHIFT) - 1

# Bytes that a program moves: each thread has several loads of 16 bytes under way.
TILE_BYTES = 8192
MAX_TILE_ROWS = 128

# Rows are moved as integers, so that no bit of them changes.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_SHIFT = tl.constexpr(SPACE_SHIFT)
_MASK = tl.constexpr(VECTOR_MASK)


class Space(enum.IntEnum):
    """Where a vector stands."""

    DEVICE = 0
    HOST = 1
    STAGING = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Spaces:
    """Vectors of `unit` elements of one dtype, each contiguous [count, unit]; empty if missing.

    `device` is on the device, or pinned like the others: `host` is the host slab, `staging` is what
    reads from SSD land in.
    """

    device: Tensor
    host: Tensor
    staging: Tensor

    def __post_init__(self) -> None:
        units = {space.shape[-1] for space in self.present}
        assert len(units) <= 1, "vectors of one unit"
        assert all(space.is_contiguous() and space.dim() == 2 for space in self.present)
        assert len({space.dtype for space in self.by_number}) == 1, "vectors of one dtype"

    @property
    def by_number(self) -> tuple[Tensor, Tensor, Tensor]:
        """In the order of `Space`."""
        return self.device, self.host, self.staging

    @property
    def present(self) -> list[Tensor]:
        """Those that are not missing."""
        return [space for space in self.by_number if space.numel()]

    @property
    def unit(self) -> int:
        """Elements of a vector, of any space."""
        return int(self.present[0].shape[-1])

    @property
    def dtype(self) -> torch.dtype:
        """Of all vectors."""
        return self.device.dtype


def pack_index(
    space: int | npt.NDArray[np.integer], vector: npt.NDArray[np.integer]
) -> npt.NDArray[np.int64]:
    """What the kernel takes for the vector with this number in that space; shapes broadcast."""
    return (np.asarray(space, np.int64) << SPACE_SHIFT) | np.asarray(vector, np.int64)


def gather_vectors(
    key_pool: Tensor,
    value_pool: Tensor,
    slots: Tensor,
    key_index: Tensor,
    value_index: Tensor,
    spaces: Spaces,
) -> None:
    """Fill keys and values of some slots of a layer: one launch, nothing is waited for.

    Index tensors are on the device, or pinned. What is on the host must not change before the
    device is done.

    Args:
        key_pool: [slots, G, Dk] with any strides but the last, which is 1.
        value_pool: [slots, G, Dv], likewise.
        slots: int64 [k], distinct.
        key_index: int64 [k, G] from `pack_index`: the first of Dk / unit neighbouring vectors.
        value_index: int64 [k, G], the first of Dv / unit.
        spaces: what the indices refer to.
    """
    _launch([(key_pool, key_index), (value_pool, value_index)], slots, spaces)


def gather_rows(out: Tensor, index: Tensor, spaces: Spaces) -> None:
    """Fill out [n, width], whose rows are contiguous, by index int64 [n]: see `gather_vectors`."""
    _launch([(out[:, None], index[:, None])], None, spaces)


def gather_layer(outputs: Sequence[Tensor], indices: Sequence[Tensor], spaces: Spaces) -> None:
    """Fill one or two outputs [n, vectors, width] by indices int64 [n, vectors], in one launch.

    Outputs may differ in `vectors` and `width`; see `gather_vectors`.
    """
    assert 1 <= len(outputs) == len(indices) <= 2
    _launch(list(zip(outputs, indices, strict=True)), None, spaces)


def gather_vectors_reference(
    key_pool: Tensor,
    value_pool: Tensor,
    slots: Tensor,
    key_index: Tensor,
    value_index: Tensor,
    spaces: Spaces,
) -> None:
    """The same as `gather_vectors` with torch indexing, on any devices."""
    for pool, index in ((key_pool, key_index), (value_pool, value_index)):
        rows = _rows_reference(index.reshape(-1).cpu(), pool.shape[2], spaces)
        pool[slots.to(pool.device)] = rows.view(len(slots), *pool.shape[1:]).to(pool.device)


def _rows_reference(index: Tensor, width: int, spaces: Spaces) -> Tensor:
    """[n, width] on the CPU by index int64 [n]."""
    rows = torch.empty(len(index), width, dtype=spaces.dtype)
    space, vector = index >> SPACE_SHIFT, index & VECTOR_MASK
    for number, vectors in enumerate(spaces.by_number):
        chosen = (space == number).nonzero()[:, 0]
        if len(chosen):
            numbers = vector[chosen, None] + torch.arange(width // spaces.unit)
            rows[chosen] = vectors[numbers.to(vectors.device)].reshape(-1, width).cpu()
    return rows


def _launch(targets: list[tuple[Tensor, Tensor]], slots: Tensor | None, spaces: Spaces) -> None:
    """One launch for one or two pools and their indices [k, G]."""
    (key_pool, key_index), (value_pool, value_index) = targets[0], targets[-1]
    most = max(index.numel() for _, index in targets)
    if not most:
        return
    for pool, index in targets:
        assert pool.dtype == spaces.dtype and pool.stride(2) == 1
        assert pool.shape[2] % spaces.unit == 0, "a row is whole vectors"
        assert index.shape == (len(key_index), pool.shape[1])
    indices = [index for _, index in targets] + ([] if slots is None else [slots])
    for index in indices:
        assert index.dtype == torch.int64 and index.is_contiguous()
        assert len(index) == len(key_index)
    for tensor in (*indices, *spaces.present):
        assert_readable(tensor, key_pool.device)
    integer = _INTEGERS[spaces.dtype.itemsize]
    widest = triton.next_power_of_2(max(pool.shape[2] for pool, _ in targets))
    tile_rows = min(MAX_TILE_ROWS, max(1, TILE_BYTES // (widest * spaces.dtype.itemsize)))
    _gather_kernel[(triton.cdiv(most, tile_rows), len(targets))](
        key_pool.view(integer),
        key_pool.stride(0),
        key_pool.stride(1),
        key_index,
        key_index.numel(),
        value_pool.view(integer),
        value_pool.stride(0),
        value_pool.stride(1),
        value_index,
        value_index.numel(),
        slots,
        *(vectors.view(integer) for vectors in spaces.by_number),
        KEY_HEADS=max(1, key_pool.shape[1]),
        KEY_WIDTH=key_pool.shape[2],
        KEY_PADDED=triton.next_power_of_2(key_pool.shape[2]),
        VALUE_HEADS=max(1, value_pool.shape[1]),
        VALUE_WIDTH=value_pool.shape[2],
        VALUE_PADDED=triton.next_power_of_2(value_pool.shape[2]),
        UNIT=spaces.unit,
        ALIGNED=all(vectors.data_ptr() % 16 == 0 for vectors in spaces.present),
        TILE_ROWS=tile_rows,
        num_warps=4,
    )


def assert_readable(tensor: Tensor, device: torch.device) -> None:
    """A kernel on a device can read a tensor there, and on a CUDA device pinned memory."""
    if tensor.device != device:
        assert device.type == "cuda" and tensor.is_pinned(), f"{tensor.device} is not pinned memory"


@triton.jit(do_not_specialize=["key_count", "value_count"])
def _gather_kernel(
    key_pool: tl.tensor,
    key_slot_stride: tl.tensor,
    key_head_stride: tl.tensor,
    key_index: tl.tensor,
    key_count: tl.tensor,
    value_pool: tl.tensor,
    value_slot_stride: tl.tensor,
    value_head_stride: tl.tensor,
    value_index: tl.tensor,
    value_count: tl.tensor,
    slots: tl.tensor,
    device: tl.tensor,
    host: tl.tensor,
    staging: tl.tensor,
    KEY_HEADS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
) -> None:
    """A program per tile of rows: keys where the second number is 0, else values."""
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    if tl.program_id(1) == 0:
        source, offset = _find(key_index, rows, key_count, device, host, staging, UNIT, ALIGNED)
        place = _place(rows, key_count, slots, key_slot_stride, key_head_stride, KEY_HEADS)
        _move(source, offset, key_pool, place, rows < key_count, KEY_WIDTH, KEY_PADDED)
    else:
        source, offset = _find(value_index, rows, value_count, device, host, staging, UNIT, ALIGNED)
        place = _place(rows, value_count, slots, value_slot_stride, value_head_stride, VALUE_HEADS)
        _move(source, offset, value_pool, place, rows < value_count, VALUE_WIDTH, VALUE_PADDED)


@triton.jit
def _find(
    index: tl.tensor,
    rows: tl.tensor,
    count: tl.tensor,
    device: tl.tensor,
    host: tl.tensor,
    staging: tl.tensor,
    UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The space of each row, and the element in it where the row begins."""
    packed = tl.load(index + rows, mask=rows < count, other=0)
    space = packed >> _SHIFT
    source = tl.where(space == 0, device, tl.where(space == 1, host, staging))
    if ALIGNED:
        # The compiler does not see this through the choice, and would load element by element.
        source = tl.multiple_of(source, 16)
    return source, (packed & _MASK) * UNIT


@triton.jit
def _place(
    rows: tl.tensor,
    count: tl.tensor,
    slots: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    HEADS: tl.constexpr,
) -> tl.tensor:
    """The element of the pool where each row goes."""
    slot = (rows // HEADS).to(tl.int64)
    if slots is not None:
        slot = tl.load(slots + slot, mask=rows < count, other=0)
    return slot * slot_stride + (rows % HEADS).to(tl.int64) * head_stride


@triton.jit
def _move(
    source: tl.tensor,
    offset: tl.tensor,
    pool: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Rows of WIDTH elements from `source + offset` to `pool + place`."""
    columns = tl.arange(0, PADDED)
    mask = inside[:, None] & (columns < WIDTH)[None, :]
    words = tl.load((source + offset)[:, None] + columns[None, :], mask=mask)
    tl.store(pool + place[:, None] + columns[None, :], words, mask=mask)
