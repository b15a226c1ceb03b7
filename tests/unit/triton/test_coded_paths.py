"""What a GPU uses to load a prefix, or a part of one, gives the same as what a CPU uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from impress_sglang.cost import ReadCost
from impress_sglang.storage.layout import BLOCK_BYTES
from impress_sglang.storage.reader import BlockReader
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.copying import PageCopier
from impress_sglang.tiers.placement import Tier
from impress_sglang.tiers.rules import LeastRecentlyUsed
from impress_sglang.transfer.buffers import PooledMemory
from impress_sglang.transfer.sources import take_blocks
from impress_sglang.triton import groups as codes
from impress_sglang.triton import pages, scores
from tests.unit.coded_factory import SHAPE, CodedCase, CodedPart
from tests.unit.kv_factory import make_cache
from tests.unit.reading import LoadedLayer, asking, load_layer, request_of
from tests.unit.source_factory import CUT_ROWS, RULES, SEVERAL, Case, open_case
from tests.unit.triton.conftest import use_kernels

# Kernels are interpreted only in modules that were imported before.
KERNELS = (codes, pages, scores)
CPU = torch.device("cpu")
FRAMES = 7

pytestmark = pytest.mark.usefixtures("interpreted")


def both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[bool, Path]]:
    """Without kernels, then with them, each with a folder of its own."""
    # What is read through is measured, and differs from run to run.
    monkeypatch.setattr(ReadCost, "gap_bytes", 0)
    for kernels in (False, True):
        folder = tmp_path / str(kernels)
        folder.mkdir()
        if kernels:
            use_kernels(monkeypatch)
        yield kernels, folder


class Frames:
    """Both caches and a layer buffer, full of blocks that differ."""

    def __init__(self) -> None:
        size = FRAMES * BLOCK_BYTES
        self.cache = ChunkCache(
            BLOCK_BYTES, 1, LeastRecentlyUsed(), device=CPU, device_bytes=size, host_bytes=size
        )
        generator = torch.Generator().manual_seed(0)
        self.blocks = torch.randint(
            0, 256, (len(Tier), FRAMES, BLOCK_BYTES), dtype=torch.uint8, generator=generator
        )
        for tier in (Tier.DEVICE, Tier.HOST):
            self.cache.pages[tier].copy_(self.blocks[tier])
        self.memory = PooledMemory(size)
        self.memory.blocks.copy_(self.blocks[Tier.SSD])


TAKEN = {
    "device cache": [(Tier.DEVICE, 5), (Tier.DEVICE, 0), (Tier.DEVICE, 6)],
    "host cache": [(Tier.HOST, 2), (Tier.HOST, 3), (Tier.HOST, 4)],
    "neighbours in the buffer": [(Tier.SSD, 1), (Tier.SSD, 2), (Tier.SSD, 3)],
    "buffer": [(Tier.SSD, 6), (Tier.SSD, 1), (Tier.SSD, 2)],
    "as many as neighbours": [(Tier.SSD, 1), (Tier.SSD, 3), (Tier.SSD, 2), (Tier.SSD, 4)],
    "mixed": [
        (Tier.HOST, 6),
        (Tier.SSD, 0),
        (Tier.DEVICE, 6),
        (Tier.SSD, 6),
        (Tier.DEVICE, 1),
        (Tier.HOST, 0),
    ],
    "nothing": [],
}


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("name", TAKEN)
def test_blocks_are_taken_from_where_they_are(
    name: str, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, wanted = Frames(), TAKEN[name]
    held.cache.copier = PageCopier(BLOCK_BYTES, CPU, kernels=by_kernel)
    tiers = np.array([tier for tier, _ in wanted], np.uint8)
    frames = np.array([frame for _, frame in wanted], np.int64)
    memory = held.memory if Tier.SSD in tiers else None

    found = take_blocks(held.cache, tiers, frames, memory)

    assert found.dtype == torch.uint8 and found.shape == (len(wanted), BLOCK_BYTES)
    assert torch.equal(found, held.blocks[torch.from_numpy(tiers.astype(np.int64)), frames])


def test_a_buffer_is_fenced_while_a_kernel_reads_it(kernels: None) -> None:
    held, tiers = Frames(), np.array([Tier.SSD, Tier.DEVICE], np.uint8)
    found = take_blocks(held.cache, tiers, np.array([3, 4]), held.memory)

    assert held.memory.fence is not None
    # What it gave is its own: neither a buffer nor a cache.
    found.fill_(0)
    assert torch.equal(held.memory.blocks, held.blocks[Tier.SSD])
    pages = held.cache.pages[Tier.DEVICE]
    assert torch.equal(pages.view(torch.uint8), held.blocks[Tier.DEVICE])


PREFIXES = {
    "one": [CodedPart(130)],
    "several": [CodedPart(70, 41), CodedPart(64), CodedPart(70, 0, 57)],
}
# In pages of the first there is no padding, in 5 bits.
DIMS = [(64, 24), (80, 48)]


@pytest.mark.parametrize(
    ("name", "dims", "dtype", "bits", "pages"),
    [
        ("one", DIMS[1], torch.bfloat16, 6, (40, 60)),
        ("several", DIMS[1], torch.float32, 5, (9, 13)),
        ("one", DIMS[0], torch.bfloat16, 5, (0, 0)),
        ("several", DIMS[0], torch.bfloat16, 6, (0, 0)),
        ("several", DIMS[0], torch.float16, 5, (0, 400)),
    ],
)
def test_slots_get_what_codes_say_from_the_same_places(
    name: str,
    dims: tuple[int, int],
    dtype: torch.dtype,
    bits: int,
    pages: tuple[int, int],
    tmp_path: Path,
    reader: BlockReader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In three requests, of which the others find in the caches what the first has left there."""
    key_dim, value_dim = dims
    sizes = {"num_layers": 1, "raw_layers": 0, "key_dim": key_dim, "value_dim": value_dim}
    shape = dataclasses.replace(SHAPE, **sizes, dtype=dtype, code_bits=bits)
    stats = []
    for kernels, folder in both_ways(tmp_path, monkeypatch):
        case = CodedCase(
            folder, PREFIXES[name], reader, shape=shape, device_pages=pages[0], host_pages=pages[1]
        )
        for _ in range(3):
            case.request()
            for layer in range(shape.num_layers):
                case.load(layer, kernels=kernels)
                case.check(layer)
        stats.append(dataclasses.replace(case.source.stats, wait_ms=0.0))
        case.close()
    assert stats[1] == stats[0]


def loaded_layers(case: Case) -> list[LoadedLayer]:
    """Twice: the second finds in the caches what the first has left there."""
    layers = []
    for _ in range(2):
        case.request()
        request = request_of(case.shape, 0.01, case.source, 20)
        for layer in range(case.shape.num_layers):
            layers.append(load_layer(request, layer, asking(case.shape, layer)))
    return layers


def test_a_part_of_a_layer_is_loaded_alike(
    tmp_path: Path, reader: BlockReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probing, choosing and loading; what is cached meanwhile is the same."""
    shape = CUT_ROWS
    found, stats = [], []
    for _, folder in both_ways(tmp_path, monkeypatch):
        cache = make_cache(shape, device_chunks=2, host_chunks=3, rule=RULES["score"]())
        case = open_case(folder, shape, SEVERAL, reader, cache=cache, reordered=True)
        found.append(loaded_layers(case))
        stats.append(case.stats)
        case.close()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.selected, other.selected)
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
    assert stats[0] == stats[1]
