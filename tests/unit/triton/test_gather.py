from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

from impress_sglang.loops import copies
from impress_sglang.tiers.page_copies import KernelCopier, LoopCopier, PageCopier
from impress_sglang.tiers.slab import PageShape
from impress_sglang.tiers.staging import Staging
from impress_sglang.triton import chunk_rows, gather, pages
from tests.unit.triton.conftest import compiled

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


def make_memories(unit: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Vectors on the device and in memory of the host, as of a cache and of two layer buffers."""
    slab, *others = (random_bits((count, unit), dtype) for count in (50, 70, 60, 20))
    return [slab.to(device), *(pinned(own, device) for own in others)]


def random_addresses(memories: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Of vectors anywhere in the memories, the last one of each among them."""
    number = np.random.choice(len(memories), shape)
    counts = np.array([len(memory) for memory in memories])
    vector = np.random.randint(0, counts[number])
    flat_number, flat_vector = number.reshape(-1), vector.reshape(-1)
    last = min(len(memories), flat_number.size)
    flat_number[:last], flat_vector[:last] = np.arange(last), counts[:last] - 1
    bases = np.array([memory.data_ptr() for memory in memories])
    step = memories[0].shape[1] * memories[0].element_size()
    return torch.from_numpy(bases[number] + vector * step)


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


@dataclasses.dataclass
class Wish:
    """What goes where, on the CPU; one index for keys and values, or for one of them."""

    unit: int
    addresses: list[Tensor]
    heads: list[tuple[int, ...]]
    slots: Tensor | None = None
    positions: Tensor | None = None
    head_groups: int = 1

    def targets(self, pools: Sequence[Tensor], device: str) -> list[gather.Target]:
        def there(index: Tensor | None) -> Tensor | None:
            return None if index is None else index.to(device)

        return [
            gather.Target(
                pool,
                gather.head_columns(pool, heads, self.unit),
                addresses.to(device),
                there(self.slots),
                there(self.positions),
                self.head_groups,
            )
            for pool, addresses, heads in zip(pools, self.addresses, self.heads, strict=True)
        ]


def check_gather(
    pools: Pools, wish: Wish, memories: Sequence[Tensor], device: str, *, grain: int | None = None
) -> None:
    """All of the pools' memory is as the oracle leaves it."""
    wanted, found = pools.on("cpu"), pools.on(device)
    count = len(wish.addresses)
    targets = wish.targets([wanted.keys, wanted.values][:count], "cpu")
    gather.gather_reference(targets, wish.unit, memories)
    targets = wish.targets([found.keys, found.values][:count], device)
    size = pools.memory.element_size()
    gather.gather(targets, wish.unit, grain_bytes=grain or wish.unit * size)
    assert not torch.equal(bits(wanted.memory), bits(pools.memory))
    assert_same_bits(found.memory, wanted.memory)
    if device == "cpu":
        looped = pools.on("cpu")
        targets = wish.targets([looped.keys, looped.values][:count], "cpu")
        for target, heads in zip(targets, wish.heads, strict=True):
            copy_rows(target, heads, wish.unit)
        assert_same_bits(looped.memory, wanted.memory)


def copy_rows(target: gather.Target, heads: Sequence[int], unit: int) -> None:
    """What a CPU does instead of launching a kernel; it is never asked for no heads."""
    if heads:
        pool, count, size = target.pool, len(target.addresses), target.pool.element_size()
        copies.copy_rows(
            target.addresses.numpy(),
            np.arange(count) if target.positions is None else target.positions.numpy(),
            np.arange(len(pool)) if target.slots is None else target.slots.numpy(),
            np.array(heads),
            pool.data_ptr(),
            pool.stride(0) * size,
            pool.stride(1) * size,
            pool.shape[2] // unit,
            unit * size,
        )


SHAPES = [
    (64, (64, 64), 2, 40),
    (32, (96, 64), 3, 21),
    (16, (128, 128), 1, 33),
    (64, (192, 128), 8, 5),
    (5, (5, 15), 2, 50),
    (8, (8, 8), 4, 1),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("unit", "dims", "heads", "k"), SHAPES)
def test_rows_of_all_heads_and_of_head_groups_in_any_order(
    device: str, dtype: torch.dtype, unit: int, dims: tuple[int, int], heads: int, k: int
) -> None:
    memories, pools = make_memories(unit, dtype, device), Pools.make(64, heads, dims, dtype)
    slots, heads_of = torch.randperm(64)[:k], [tuple(range(heads))] * 2
    # One head group: a row has the vectors of all heads.
    addresses = [random_addresses(memories, (k, heads * dim // unit)) for dim in dims]
    check_gather(pools, Wish(unit, addresses, heads_of, slots), memories, device)
    # A head group per head: two spans have some of the positions each, none has the rest.
    positions = torch.randperm(k * heads)[: max(1, k * heads - 3)]
    addresses = [random_addresses(memories, (len(positions), dim // unit)) for dim in dims]
    for own in (slots, None):
        wish = Wish(unit, addresses, heads_of, own, positions, head_groups=heads)
        check_gather(pools, wish, memories, device)


# Of keys and values, and the number of head groups.
ALL = (0, 1, 2)
HEADS = {
    "whole head groups, without positions": ([ALL, ALL], 3),
    "keys but those of a probe head": ([(0, 2), ALL], 1),
    "one head of keys": ([(1,), ALL], 1),
    "no keys": ([(), ALL], 1),
    "one target": ([ALL], 1),
}


@pytest.mark.parametrize(("heads", "head_groups"), HEADS.values(), ids=HEADS)
def test_some_heads(device: str, heads: list[tuple[int, ...]], head_groups: int) -> None:
    memories = make_memories(16, torch.bfloat16, device)
    pools = Pools.make(30, 3, (32, 32), torch.bfloat16)
    rows = [(9 * head_groups, 2 * len(own) // head_groups) for own in heads]
    addresses = [random_addresses(memories, own) for own in rows]
    wish = Wish(16, addresses, heads, torch.randperm(30)[:9], head_groups=head_groups)
    check_gather(pools, wish, memories, device)


@pytest.mark.parametrize("shift", [1, 4])
def test_vectors_that_do_not_begin_at_16_bytes(device: str, shift: int) -> None:
    moved = random_bits((16 * 60 + shift,), torch.bfloat16)
    memories = [pinned(moved, device)[shift:].view(60, 16)]
    pools = Pools.make(30, 2, (32, 16), torch.bfloat16)
    addresses = [random_addresses(memories, (9, 2 * dim // 16)) for dim in (32, 16)]
    wish = Wish(16, addresses, [(0, 1)] * 2, torch.randperm(30)[:9])
    check_gather(pools, wish, memories, device, grain=2 * shift)


def test_nothing_to_gather(device: str) -> None:
    pools = Pools.make(10, 2, (16, 16), torch.bfloat16).on(device)
    before = pools.memory.clone()
    none = torch.empty(0, 2, dtype=torch.int64)
    wish = Wish(16, [none, none], [(0, 1)] * 2, torch.empty(0, dtype=torch.int64))
    gather.gather(wish.targets([pools.keys, pools.values], device), 16, grain_bytes=16)
    assert_same_bits(pools.memory, before)


@pytest.mark.parametrize("kind", [LoopCopier, KernelCopier])
@pytest.mark.parametrize(
    ("unit", "vectors", "dtype"),
    [
        (8, 4, torch.float32),
        (128, 64, torch.bfloat16),
        (5, 7, torch.float16),
        (1024, 1, torch.int32),
        (3, 1, torch.int8),
        (1000, 3, torch.float32),
    ],
)
def test_pages(
    device: str, unit: int, vectors: int, dtype: torch.dtype, kind: type[PageCopier]
) -> None:
    """Pages of memory of the host and of the device go to memory of both, in one launch."""
    if kind is LoopCopier:
        device = "cpu"
    page, chosen = PageShape(unit, vectors, dtype), np.random.permutation(12)
    sources, found = (random_bits((2, 12, page.elements), dtype) for _ in range(2))
    expected = found.clone()
    for numbers, place in ((chosen[:5], 0), (chosen[5:9], 1)):
        expected[place, numbers[::-1].copy()] = sources[1 - place, torch.from_numpy(numbers)]
    sources, found = ([own[0].to(device), pinned(own[1], device)] for own in (sources, found))
    step = page.page_bytes
    from_host, from_device = (own.data_ptr() + chosen * step for own in reversed(sources))
    to_device, to_host = (own.data_ptr() + chosen * step for own in found)
    copier = kind(page, torch.device(device), Staging(torch.device(device)))
    copier.copy(
        np.concatenate([from_host[:5], from_device[5:9]]),
        np.concatenate([to_device[4::-1], to_host[8:4:-1]]),
    )
    for own, wanted in zip(found, expected, strict=True):
        assert_same_bits(own, wanted)


PAGE_WORDS = {8: "ld.global.v2.b64", 2: "ld.global.b16"}


@pytest.mark.parametrize("grain", [16, 2])
def test_pages_are_moved_in_words_of_16_bytes(grain: int) -> None:
    """Compiled for compute capability 9.0, which needs no GPU."""
    word = pages._WORDS[grain]
    size = word.primitive_bitwidth // 8
    constants = {"WORD": word, "WORDS": 4096 // size, "BLOCK": 4096 // size, "GRAIN": grain}
    kinds = {"table": "*i64", "count": "i32"}
    ptx = compiled(pages._copy_kernel, kinds, constants, []).asm["ptx"]
    assert PAGE_WORDS[size] in ptx
    assert PAGE_WORDS[size].replace("ld", "st") in ptx


def test_the_oracle_reads_only_the_memories() -> None:
    memory = torch.zeros(4, 8)
    pool = torch.ones(2, 1, 8)
    for address in (memory.data_ptr() - 4, memory.data_ptr() + 25 * 4, memory.data_ptr() + 2):
        wish = Wish(8, [torch.tensor([[address]])], [(0,)], torch.tensor([1]))
        with pytest.raises(AssertionError, match="in none of the memories"):
            gather.gather_reference(wish.targets([pool], "cpu"), 8, [memory])


def test_targets_fit_together() -> None:
    pool = torch.zeros(4, 2, 8)
    columns = gather.head_columns(pool, (0, 1), 8)
    with pytest.raises(AssertionError, match="each vector of a row has a column"):
        gather.Target(pool, columns, torch.zeros(3, 1, dtype=torch.int64))
    with pytest.raises(AssertionError):
        gather.Target(pool, columns, torch.zeros(3, 2, dtype=torch.int32))
    with pytest.raises(AssertionError):
        gather.head_columns(pool, (0,), 3)


def test_memory_that_is_not_pinned_is_refused() -> None:
    with pytest.raises(AssertionError, match="not pinned"):
        gather.assert_readable(torch.zeros(4), torch.device("cuda", 0))


WORDS = {  # elements of a vector, grain of addresses and of places in bytes: loads and stores
    (128, 16, 16): ("ld.global.v4.b32", "st.global.v4.b32"),
    (2048, 16, 16): ("ld.global.v4.b32", "st.global.v4.b32"),
    (80, 16, 16): ("ld.global.v4.b32", "st.global.v4.b32"),
    (64, 16, 2): ("ld.global.v4.b32", "st.global.b16"),
    (5, 2, 2): ("ld.global.b16", "st.global.b16"),
}


@pytest.mark.parametrize(("case", "words"), WORDS.items())
def test_threads_move_16_bytes_at_once(case: tuple[int, int, int], words: tuple[str, str]) -> None:
    """Compiled for compute capability 9.0, which needs no GPU: loads by address are whole words."""
    width, from_grain, to_grain = case
    kernel = gather._gather_kernel
    padded = triton.next_power_of_2(width)
    constants = {
        **{f"{own}_HEAD_GROUPS": 8 for own in ("FIRST", "LAST")},
        **{f"{own}_VECTORS": 1 for own in ("FIRST", "LAST")},
        **{f"{own}_positions": None for own in ("first", "last")},
        "WIDTH": width,
        "PADDED": padded,
        "FROM_GRAIN": from_grain,
        "TO_GRAIN": to_grain,
        "TILE_ROWS": max(1, gather.TILE_BYTES // (2 * padded)),
    }
    endings = {"pool": "*i16", "stride": "i64", "count": "i32"}
    names = [name for name in kernel.arg_names if name not in constants]
    kinds = {name: endings.get(name.split("_")[-1], "*i64") for name in names}
    aligned = [name for name, kind in kinds.items() if kind in ("*i16", "i64")]
    ptx = compiled(kernel, kinds, constants, aligned).asm["ptx"]
    assert all(word in ptx for word in words)
    narrow = {"ld.global.b16", "st.global.b16"} - set(words)
    assert not any(word in ptx for word in narrow)


def test_rows_of_chunks_are_moved_in_words_of_16_bytes() -> None:
    kernel, both = chunk_rows._chunks_kernel, ("FIRST", "LAST")
    constants = {f"{own}_{name}": 1 for own in both for name in ("VECTORS", "PAGES")}
    constants |= {"HEAD_GROUPS": 8, "CHUNK_ROWS": 64, "WIDTH": 128, "PADDED": 128}
    constants |= {"VECTOR_BYTES": 256, "FROM_GRAIN": 16, "TO_GRAIN": 16, "TILE_ROWS": 32}
    kinds = {name: "*i64" for name in kernel.arg_names if name not in constants}
    kinds |= dict.fromkeys(("start", "count", "chunks"), "i32")
    for own in ("first", "last"):
        kinds |= {f"{own}_pool": "*i16", f"{own}_stride": "i64"}
    aligned = [f"{own}_{name}" for own in ("first", "last") for name in ("pool", "stride")]
    ptx = compiled(kernel, kinds, constants, aligned).asm["ptx"]
    assert all(word in ptx for word in ("ld.global.v4.b32", "st.global.v4.b32"))
    assert not any(word in ptx for word in ("ld.global.b16", "st.global.b16"))


@needs_cuda
def test_a_pool_that_is_not_pinned_is_refused(device: str) -> None:
    memories = make_memories(16, torch.bfloat16, device)
    pool = torch.zeros(10, 1, 16, dtype=torch.bfloat16)
    addresses = random_addresses(memories, (3, 1))
    columns = gather.head_columns(pool.to(device), (0,), 16)
    target = gather.Target(pool, columns, addresses.to(device))
    with pytest.raises(AssertionError, match="not pinned"):
        gather.gather([target], 16, grain_bytes=16)


@needs_cuda
def test_nothing_is_waited_for(device: str, no_synchronisation: Callable[[], None]) -> None:
    memories = make_memories(64, torch.bfloat16, device)
    pools = Pools.make(64, 8, (128, 128), torch.bfloat16)
    addresses = [random_addresses(memories, (40, 16)) for _ in range(2)]
    wish = Wish(64, addresses, [tuple(range(8))] * 2, torch.randperm(64)[:40])
    wanted, found = pools.on("cpu"), pools.on(device)
    gather.gather_reference(wish.targets([wanted.keys, wanted.values], "cpu"), 64, memories)
    targets = wish.targets([found.keys, found.values], device)
    no_synchronisation()
    gather.gather(targets, 64, grain_bytes=16)
    Staging(torch.device(device)).upload(addresses[0].numpy())
    torch.cuda.set_sync_debug_mode("default")
    assert_same_bits(found.memory, wanted.memory)
