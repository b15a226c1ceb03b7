from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from impress_sglang.tiers.slab import PageShape, Slab
from impress_sglang.triton import gather

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bits, so NaNs of all kinds, too."""
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(INTEGERS[tensor.dtype.itemsize])


def assert_same_bits(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(bits(found), bits(wanted))


def pinned(tensor: Tensor, device: str) -> Tensor:
    return tensor.pin_memory() if device == "cuda" else tensor


def make_spaces(
    unit: int, dtype: torch.dtype, device: str, *, counts: tuple[int, int, int] = (50, 70, 60)
) -> gather.Spaces:
    slab, host, staging = (random_bits((count, unit), dtype) for count in counts)
    return gather.Spaces(slab.to(device), pinned(host, device), pinned(staging, device))


def random_index(
    spaces: gather.Spaces, shape: tuple[int, ...], width: int, of: tuple[int, ...] = (0, 1, 2)
) -> Tensor:
    """First vectors of rows anywhere in the spaces with these numbers, the last ones among them."""
    limits = np.array([len(vectors) - width // spaces.unit for vectors in spaces.by_number])
    space = np.random.choice(of, shape)
    vector = np.random.randint(0, limits[space] + 1)
    vector.reshape(-1)[-1] = limits[space.reshape(-1)[-1]]
    return torch.from_numpy(gather.pack_index(space, vector))


@dataclasses.dataclass
class Pools:
    """Pools as views of larger memory, with gaps between slots and between heads."""

    memory: Tensor
    heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def make(cls, slots: int, heads: int, dims: tuple[int, int], dtype: torch.dtype) -> Pools:
        memory = random_bits((slots, 2, heads + 1, max(dims) + 16), dtype)
        return cls(memory, heads, *dims)

    def on(self, device: str) -> Pools:
        return dataclasses.replace(self, memory=self.memory.to(device, copy=True))

    @property
    def keys(self) -> Tensor:
        return self.memory[:, 0, : self.heads, : self.key_dim]

    @property
    def values(self) -> Tensor:
        return self.memory[:, 1, 1:, : self.value_dim]


def check_gather(
    pools: Pools, slots: Tensor, indices: tuple[Tensor, Tensor], spaces: gather.Spaces, device: str
) -> None:
    """All of the pools' memory is as the oracle leaves it."""
    wanted, found = pools.on("cpu"), pools.on(device)
    gather.gather_vectors_reference(wanted.keys, wanted.values, slots, *indices, spaces)
    on_device = [tensor.to(device) for tensor in (slots, *indices)]
    gather.gather_vectors(found.keys, found.values, *on_device, spaces)
    assert not torch.equal(bits(wanted.memory), bits(pools.memory))
    assert_same_bits(found.memory, wanted.memory)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("unit", "dims", "heads", "k"),
    [
        (64, (64, 64), 2, 40),
        (32, (96, 64), 3, 21),
        (16, (128, 128), 1, 33),
        (64, (192, 128), 8, 5),
        (5, (5, 15), 2, 50),
        (8, (8, 8), 4, 1),
    ],
)
def test_all_spaces_mixed(
    device: str, dtype: torch.dtype, unit: int, dims: tuple[int, int], heads: int, k: int
) -> None:
    spaces = make_spaces(unit, dtype, device)
    pools = Pools.make(64, heads, dims, dtype)
    keys, values = (random_index(spaces, (k, heads), width) for width in dims)
    check_gather(pools, torch.randperm(64)[:k], (keys, values), spaces, device)


@pytest.mark.parametrize("space", list(gather.Space))
def test_one_space_and_the_others_missing(device: str, space: gather.Space) -> None:
    counts = [0, 0, 0]
    counts[space] = 40
    spaces = make_spaces(16, torch.bfloat16, device, counts=(counts[0], counts[1], counts[2]))
    pools = Pools.make(30, 2, (32, 16), torch.bfloat16)
    keys, values = (random_index(spaces, (9, 2), width, (space,)) for width in (32, 16))
    check_gather(pools, torch.randperm(30)[:9], (keys, values), spaces, device)


def test_a_missing_space_needs_no_unit(device: str) -> None:
    spaces = make_spaces(16, torch.float16, device)
    none = torch.empty(0, dtype=torch.float16)
    spaces = dataclasses.replace(spaces, host=none, device=none.to(device))
    pools = Pools.make(30, 2, (16, 16), torch.float16)
    index = random_index(spaces, (9, 2), 16, (gather.Space.STAGING,))
    check_gather(pools, torch.randperm(30)[:9], (index, index.flip(0)), spaces, device)


def test_vectors_that_do_not_begin_at_16_bytes(device: str) -> None:
    spaces = make_spaces(16, torch.bfloat16, device)
    moved = pinned(random_bits((16 * 60 + 1,), torch.bfloat16), device)[1:].view(60, 16)
    spaces = dataclasses.replace(spaces, staging=moved)
    pools = Pools.make(30, 2, (32, 16), torch.bfloat16)
    keys, values = (random_index(spaces, (9, 2), width) for width in (32, 16))
    check_gather(pools, torch.randperm(30)[:9], (keys, values), spaces, device)


def test_keys_and_values_with_different_heads(device: str) -> None:
    """Keys of probe heads are elsewhere: fewer heads of keys, or none."""
    spaces = make_spaces(16, torch.bfloat16, device)
    slots = torch.randperm(30)[:9]
    values = random_index(spaces, (9, 3), 32)
    for key_heads in (2, 0):
        pools = Pools.make(30, 3, (32, 32), torch.bfloat16)
        wanted, found = pools.on("cpu"), pools.on(device)
        keys = random_index(spaces, (9, 3), 32)[:, :key_heads].contiguous()
        gather.gather_vectors_reference(
            wanted.keys[:, :key_heads], wanted.values, slots, keys, values, spaces
        )
        gather.gather_vectors(
            found.keys[:, :key_heads],
            found.values,
            *(tensor.to(device) for tensor in (slots, keys, values)),
            spaces,
        )
        assert_same_bits(found.memory, wanted.memory)


def test_no_slots(device: str) -> None:
    spaces = make_spaces(16, torch.bfloat16, device)
    pools = Pools.make(10, 2, (16, 16), torch.bfloat16).on(device)
    before = pools.memory.clone()
    none = torch.empty(0, dtype=torch.int64, device=device)
    gather.gather_vectors(pools.keys, pools.values, none, none.view(0, 2), none.view(0, 2), spaces)
    assert_same_bits(pools.memory, before)


@pytest.mark.parametrize("width", [16, 48, 4800])
def test_rows(device: str, width: int) -> None:
    """Rows of an output with gaps."""
    spaces = make_spaces(16, torch.float32, device, counts=(400, 410, 420))
    index = random_index(spaces, (37,), width)
    memory = random_bits((40, width + 8), torch.float32)
    wanted, found = memory.clone(), memory.to(device, copy=True)
    wanted[:37, None, :width] = rows_by_numpy(spaces, index, width)[:, None]
    gather.gather_rows(found[:37, :width], index.to(device), spaces)
    assert_same_bits(found, wanted)


def rows_by_numpy(spaces: gather.Spaces, index: Tensor, width: int) -> Tensor:
    """Row by row, from what `pack_index` promises."""
    flat = [vectors.cpu().reshape(-1) for vectors in spaces.by_number]
    firsts = [divmod(number, 1 << 56) for number in index.tolist()]
    rows = [flat[space][first * spaces.unit :][:width] for space, first in firsts]
    return torch.stack(rows)


def test_rows_are_a_slabs(device: str) -> None:
    """What `Slab.read_rows` gives for chunks whose rows have two vectors."""
    page = PageShape(8, 4, torch.float32)
    slab = Slab(page, 12, torch.device("cpu"), option="--impress-host-gb", pin=device == "cuda")
    slab.write_pages(np.arange(12, dtype=np.int32), random_bits((12, 32), torch.float32))
    pages = np.random.permutation(12).astype(np.int32).reshape(6, 2)
    offsets = np.random.randint(0, 4, 6)
    vector = offsets * 2
    page_of_row = np.take_along_axis(pages, vector[:, None] // 4, axis=1)[:, 0]
    index = gather.pack_index(gather.Space.HOST, page_of_row.astype(np.int64) * 4 + vector % 4)
    none = torch.empty(0, dtype=torch.float32)
    vectors = slab.read_pages(np.arange(12, dtype=np.int32)).view(-1, 8)
    spaces = gather.Spaces(none.to(device), pinned(vectors, device), none)
    out = torch.full((6, 16), float("nan"), device=device)
    gather.gather_rows(out, torch.from_numpy(index).to(device), spaces)
    assert_same_bits(out, slab.read_rows(pages, offsets, 2))


def test_packed_index_has_room_for_any_vector() -> None:
    index = gather.pack_index(np.array([0, 1, 2], np.uint8), np.array([[7], [2**56 - 1]]))
    assert index.dtype == np.int64 and index.shape == (2, 3)
    assert [divmod(number, 1 << 56) for number in index.reshape(-1).tolist()] == [
        (space, vector) for vector in (7, 2**56 - 1) for space in range(3)
    ]


def test_spaces_fit_together() -> None:
    vectors = torch.zeros(4, 8)
    for other in (torch.zeros(4, 16), torch.zeros(4, 8).half(), torch.zeros(8, 4).T):
        with pytest.raises(AssertionError):
            gather.Spaces(vectors, other, vectors)


def test_memory_that_is_not_pinned_is_refused() -> None:
    with pytest.raises(AssertionError, match="not pinned"):
        gather.assert_readable(torch.zeros(4), torch.device("cuda", 0))


@needs_cuda
def test_a_gather_from_memory_that_is_not_pinned_is_refused(device: str) -> None:
    spaces = make_spaces(16, torch.bfloat16, device)
    spaces = dataclasses.replace(spaces, host=spaces.host.clone())
    pools = Pools.make(10, 1, (16, 16), torch.bfloat16).on(device)
    index = torch.zeros(3, 1, dtype=torch.int64, device=device)
    with pytest.raises(AssertionError, match="not pinned"):
        gather.gather_vectors(pools.keys, pools.values, index[:, 0], index, index, spaces)


@pytest.fixture
def no_synchronisation() -> Iterator[Callable[[], None]]:
    """Call it, and from then on torch raises where it would wait for the device."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@needs_cuda
def test_nothing_is_waited_for(device: str, no_synchronisation: Callable[[], None]) -> None:
    """Also index tensors may be pinned."""
    spaces = make_spaces(64, torch.bfloat16, device)
    pools = Pools.make(64, 8, (128, 128), torch.bfloat16)
    wanted, found = pools.on("cpu"), pools.on(device)
    keys, values = (random_index(spaces, (40, 8), 128) for _ in range(2))
    slots = torch.randperm(64)[:40]
    gather.gather_vectors_reference(wanted.keys, wanted.values, slots, keys, values, spaces)
    by_bus = [tensor.pin_memory() for tensor in (slots, keys, values)]
    no_synchronisation()
    gather.gather_vectors(found.keys, found.values, *by_bus, spaces)
    torch.cuda.set_sync_debug_mode("default")
    assert_same_bits(found.memory, wanted.memory)
