"""What the host can still give, what a store takes of it, and how what is there is copied."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import ConfigError
from impress_sglang.store import memory as memory_module
from impress_sglang.store.memory import MARGIN_BYTES, StoreMemory, available_bytes
from impress_sglang.tiers import copying
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.copying import CopyStream, Fence, PageCopier
from impress_sglang.tiers.placement import Tier
from impress_sglang.tiers.rules import LeastRecentlyUsed
from tests.unit.kv_factory import make_shape
from tests.unit.store_checks import check_placement

CPU = torch.device("cpu")
GIB = 1 << 30


def machine(root: Path, available: int, groups: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    kib = available // 1024
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:  {kib} kB\nBuffers: 1 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    return root


def group(folder: Path, limit: object, usage: int, cache: int, version: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = {
        2: ("memory.max", "memory.current", ""),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    }[version]
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    kinds = f"{names[2]}active_file {cache // 4}\n{names[2]}inactive_file {cache - cache // 4}\n"
    (folder / "memory.stat").write_text(f"anon 5\n{kinds}")


@pytest.mark.parametrize(
    ("version", "line", "mounted"),
    [(2, "0::/a/b\n", "sys/fs/cgroup"), (1, "4:cpu,memory:/a/b\n", "sys/fs/cgroup/memory")],
)
def test_the_tightest_limit_above_us_decides(
    tmp_path: Path, version: int, line: str, mounted: str
) -> None:
    root = machine(tmp_path, 50 * GIB, "9:cpu:/elsewhere\n" + line)
    base = root / mounted
    group(base / "a/b", 40 * GIB, 30 * GIB, 8 * GIB, version)
    assert available_bytes(root) == 18 * GIB - MARGIN_BYTES, "cached files are given up"
    group(base / "a", 20 * GIB, 17 * GIB, 0, version)
    assert available_bytes(root) == 3 * GIB - MARGIN_BYTES
    group(base / "other", GIB, GIB, 0, version)
    assert available_bytes(root) == 3 * GIB - MARGIN_BYTES


def test_in_a_container_the_limit_is_at_the_root(tmp_path: Path) -> None:
    """The path is the host's, and not there."""
    root = machine(tmp_path, 50 * GIB, "4:memory:/docker/0123\n0::/\n")
    group(root / "sys/fs/cgroup/memory", 8 * GIB, 2 * GIB, 0, 1)
    assert available_bytes(root) == 6 * GIB - MARGIN_BYTES


def allocate(**options: Any) -> StoreMemory:
    config = ImpressConfig(ssd_dir="unused", buffer_gb=0.1, **options)
    return StoreMemory.allocate(config, make_shape(probe=(), coded=True), CPU)


def test_caches_that_the_host_cannot_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is touched, however much it is."""
    monkeypatch.setattr(memory_module, "available_bytes", lambda: 10**9)
    with pytest.raises(ConfigError, match=r"600 GB .* 1\.0 GB .* lower --impress-host-gb$"):
        allocate(host_gb=600, device_gb=0)
    with pytest.raises(ConfigError, match=r"1\.1 GB .*--impress-host-gb or --impress-device-gb"):
        allocate(host_gb=0.6, device_gb=0.5)


@pytest.mark.parametrize("known", [{"return_value": 10**9}, {"side_effect": OSError}], ids=str)
def test_caches_have_what_options_say(
    known: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "available_bytes", mock.Mock(**known))
    memory = allocate(host_gb=0.002, device_gb=0.001)
    capacity = memory.cache.placement.capacity
    assert capacity[Tier.HOST] == 2 * 10**6 // 4096 and capacity[Tier.DEVICE] == 10**6 // 4096
    memory.close()


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_cache_that_does_not_fit_is_a_config_error_that_names_size_and_option(tier: str) -> None:
    sizes = {"device_bytes": 0, "host_bytes": 0, f"{tier}_bytes": 1 << 50}
    # Large pages: the table of free ones must not be what does not fit.

    with pytest.raises(ConfigError, match=rf"1125899\.9 GB.*--impress-{tier}-gb"):
        ChunkCache(1 << 38, 1, LeastRecentlyUsed(), device=CPU, **sizes)


def load_all(cache: ChunkCache, chunks: Tensor) -> list[int]:
    """Access chunks of a page each, whose ids begin at 0; the tiers in which they were found."""
    ids = np.arange(len(chunks))
    cache.placement.advance()
    found = cache.placement.access(ids, np.ones(len(ids)))
    for chunk in np.flatnonzero(found.tiers != Tier.SSD):
        pages = cache.pages[found.tiers[chunk]]
        assert torch.equal(pages[found.pages[chunk]], chunks[chunk])
    read = chunks.data_ptr() + ids[found.kept] * chunks.shape[1]
    cache.apply_moves(found, ids[found.kept], read)
    check_placement(cache.placement)
    return sorted(found.tiers.tolist())


def test_an_emptied_cache_has_the_pages_and_no_chunks() -> None:
    size = {"device_bytes": 2 * 64, "host_bytes": 3 * 64}
    old = ChunkCache(64, 1, LeastRecentlyUsed(), device=CPU, **size)
    chunks = torch.randint(0, 256, (5, 64), dtype=torch.uint8)
    assert old.placement.attach(np.ones(5, np.uint16)) == 0
    cached = [[Tier.SSD] * 5, sorted([Tier.DEVICE] * 2 + [Tier.HOST] * 3)]
    assert [load_all(old, chunks) for _ in range(2)] == cached

    new = old.emptied(LeastRecentlyUsed())

    assert new.placement.capacity == old.placement.capacity
    summary = new.summary()
    assert summary["device"]["used_bytes"] == summary["host"]["used_bytes"] == 0
    assert summary["dropped"] == 0
    assert new.placement.attach(np.ones(5, np.uint16)) == 0
    assert [load_all(new, chunks.flip(0)) for _ in range(2)] == cached
    old.placement.detach(0, 5)
    assert load_all(new, chunks.flip(0)) == cached[1], "the old one does not matter"


class Reading(Fence):
    """A launch that may read its addresses until it is done, or somebody waited for it."""

    def __init__(self, numbers: np.ndarray, *, over: bool) -> None:
        super().__init__(CPU)
        self._numbers, self._expected, self.over = numbers, numbers.copy(), over

    @property
    def done(self) -> bool:
        assert self.over or (self._numbers == self._expected).all()
        return self.over

    def wait(self) -> None:
        self.over = self.done or True


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=60), st.integers(1, 20))
def test_addresses_stay_until_they_are_read(steps: list[tuple[int, bool]], min_count: int) -> None:
    """Tables are used again, and there are no more than may be."""
    copier, readings, pages = PageCopier(8, CPU, kernels=False), list[Reading](), mock.Mock()
    limits = {"MAX_TABLES": 5, "MIN_NUMBERS": min_count}
    with mock.patch.multiple(copying, copies=pages, **limits):
        for number, (count, over) in enumerate(steps):
            numbers = copier.begin(count)
            assert numbers.shape == (2 * count,)
            numbers[:] = number
            readings.append(Reading(numbers, over=over))
            with mock.patch.object(copying, "Fence", lambda _: readings[-1]):
                assert copier.launch() is readings[-1]
            assert len(copier._read) <= 5 and sum(not reading.done for reading in readings) <= 5


CUDA = torch.device("cuda")


class FakeStream:
    """Its events come after its work until now, and have not passed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events: list[mock.Mock] = []
        self.awaited: list[mock.Mock] = []
        self.wait_event = self.awaited.append

    def record_event(self) -> mock.Mock:
        self.events.append(mock.Mock(**{"query.return_value": False}))
        return self.events[-1]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    """The current stream, the last one."""
    streams = [FakeStream(CUDA)]

    @contextlib.contextmanager
    def switched(stream: FakeStream) -> Any:
        streams.append(stream)
        try:
            yield
        finally:
            assert streams.pop() is stream

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", switched)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams[-1])
    return streams


def test_copies_wait_for_reads_and_readers_for_copies(streams: list[FakeStream]) -> None:
    (computing,), stream = streams, CopyStream(CUDA)
    stream.join()
    assert not computing.awaited

    stream.record_reading(Fence(CUDA))
    with stream.after_reading():
        copying = streams[-1]
        assert copying is not computing
        assert copying.awaited == computing.events
    # What was copied last, even if the next reader is on another stream.
    for reader in (computing, FakeStream(CUDA)):
        streams[0] = reader
        stream.join()
        assert reader.awaited == copying.events

    with pytest.raises(ValueError, match="failed"), stream.after_reading():
        raise ValueError("failed")
    stream.join()
    assert streams[0].awaited[-1] is copying.events[-1] is not copying.events[0]


def test_nobody_waits_for_what_has_passed(streams: list[FakeStream]) -> None:
    (computing,), stream = streams, CopyStream(CUDA)
    stream.record_reading(Fence(CUDA))
    computing.events[0].query.return_value = True
    with stream.after_reading():
        copying = streams[-1]
    assert not copying.awaited
    copying.events[0].query.return_value = True
    stream.join()
    assert not computing.awaited
