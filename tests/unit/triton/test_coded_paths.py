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
from impress_sglang.tiers.copying import CopyStream, Fence
from impress_sglang.tiers.placement import Tier
from impress_sglang.tiers.rules import LeastRecentlyUsed
from impress_sglang.transfer.buffers import PooledMemory
from impress_sglang.transfer.sources import ReadStats, take_blocks
from impress_sglang.triton import groups as codes
from impress_sglang.triton import pages, scores
from tests.unit.reading import LoadedLayer, asking, load_layer, request_of
from tests.unit.source_factory import CODED, CUT_ROWS, RULES, SEVERAL, CodedCase, Part, PartCase
from tests.unit.triton.conftest import use_kernels

# Kernels are interpreted only in modules that were imported before.
KERNELS = (codes, pages, scores)

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


def test_blocks_are_taken_from_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffer and caches are fenced while a kernel reads them, and what it gave is its own."""
    use_kernels(monkeypatch)
    read = list[Fence]()
    monkeypatch.setattr(CopyStream, "record_reading", lambda _, fence: read.append(fence))
    size = 7 * BLOCK_BYTES
    sizes = {"device": torch.device("cpu"), "device_bytes": size, "host_bytes": size}
    cache, memory = ChunkCache(BLOCK_BYTES, 1, LeastRecentlyUsed(), **sizes), PooledMemory(size)
    places = {Tier.SSD: memory.blocks, **cache.pages}
    for blocks in places.values():
        blocks.copy_(torch.randint(0, 256, blocks.shape, dtype=torch.uint8))
    wanted = [(Tier.HOST, 6), (Tier.SSD, 0), (Tier.DEVICE, 6), (Tier.SSD, 6), (Tier.DEVICE, 1)]
    right = torch.stack([places[tier][frame] for tier, frame in wanted])
    tiers, frames = np.array(wanted, np.int64).T

    found = take_blocks(cache, tiers.astype(np.uint8), frames, memory)

    assert read == [memory.fence] and torch.equal(found, right)
    found.fill_(0)
    assert torch.equal(torch.stack([places[tier][frame] for tier, frame in wanted]), right)


PREFIXES = {"one": [Part(130)], "several": [Part(70, 41), Part(64), Part(70, 0, 57)]}
# In pages of the first there is no padding, in 5 bits.
SMALL, LARGE = (64, 24), (80, 48)


@pytest.mark.parametrize(
    ("name", "dims", "dtype", "bits", "pages"),
    [
        ("one", LARGE, torch.bfloat16, 6, (40, 60)),
        ("several", LARGE, torch.float32, 5, (9, 13)),
        ("one", SMALL, torch.bfloat16, 5, (0, 0)),
        ("several", SMALL, torch.bfloat16, 6, (0, 0)),
        ("several", SMALL, torch.float16, 5, (0, 400)),
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
    shape = dataclasses.replace(CODED, **sizes, dtype=dtype, code_bits=bits)
    stats = []
    for kernels, folder in both_ways(tmp_path, monkeypatch):
        caches = {"device_pages": pages[0], "host_pages": pages[1]}
        case = CodedCase(folder, PREFIXES[name], reader, shape, **caches)
        for _ in range(3):
            case.request()
            case.load(0, kernels=kernels)
            case.check(0)
        stats.append(dataclasses.replace(case.source.stats, wait_ms=0.0))
        case.close()
    assert stats[1] == stats[0]


def test_a_part_of_a_layer_is_loaded_alike(
    tmp_path: Path, reader: BlockReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probing, choosing and loading; what is cached meanwhile is the same.

    In two requests, of which the second finds in the caches what the first has left there.
    """
    found: list[list[tuple[LoadedLayer, ReadStats]]] = []
    for _, folder in both_ways(tmp_path, monkeypatch):
        caches = {"device_pages": 8, "host_pages": 12, "rule": RULES["score"]()}
        case = PartCase(folder, SEVERAL, reader, CUT_ROWS, reordered=True, **caches)
        found.append([])
        for layer in (0, 1, 0, 1):
            if not layer:
                case.request()
                request = request_of(case.shape, 0.01, case.source, 20)
            loaded = load_layer(request, layer, asking(case.shape, layer))
            found[-1].append((loaded, dataclasses.replace(case.source.stats, wait_ms=0.0)))
        case.close()
    for (one, stats), (other, other_stats) in zip(*found, strict=True):
        assert torch.equal(one.selected, other.selected)
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
        assert stats == other_stats
