"""The memory of a store is taken when a server starts, or it does not start."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import ConfigError
from impress_sglang.store import memory as memory_module
from impress_sglang.store.memory import StoreMemory
from impress_sglang.tiers.placement import Tier
from tests.unit.kv_factory import make_shape

CPU = torch.device("cpu")


def allocate(**options: Any) -> StoreMemory:
    config = ImpressConfig(ssd_dir="unused", buffer_gb=0.1, **options)
    return StoreMemory.allocate(config, make_shape(probe=(), coded=True), CPU)


@pytest.fixture
def gigabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that has one."""
    monkeypatch.setattr(memory_module, "available_bytes", lambda: 10**9)


def test_caches_that_the_host_cannot_hold_are_refused(gigabyte: None) -> None:
    """Before anything is touched, however much it is."""
    with pytest.raises(ConfigError, match=r"600 GB .* 1\.0 GB .* lower --impress-host-gb$"):
        allocate(host_gb=600, device_gb=0)
    with pytest.raises(ConfigError, match=r"1\.1 GB .*--impress-host-gb or --impress-device-gb"):
        allocate(host_gb=0.6, device_gb=0.5)


@pytest.mark.parametrize("known", [True, False])
def test_caches_have_what_options_say(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def available() -> int:
        if known:
            return 10**9
        raise OSError("no /proc")

    monkeypatch.setattr(memory_module, "available_bytes", available)
    memory = allocate(host_gb=0.002, device_gb=0.001)
    capacity = memory.cache.placement.capacity
    assert capacity[Tier.HOST] == 2 * 10**6 // 4096 and capacity[Tier.DEVICE] == 10**6 // 4096
    memory.close()
