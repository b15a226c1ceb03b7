"""SGLang with HiCache on a CPU, with its `file` backend or ours and the attention of all servers.

HiCache's tree, controller, policies, host pool and files are SGLang's own. Replaced is what only a
GPU has: streams and events (copies are made at once), pinned memory, the kernel that copies between
pools, and 10 GB that it leaves free in the host. `HICACHE_MBPS` slows reads of its files down,
which the kernel's page cache would otherwise serve.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import torch

import bench.core.stock_server
from bench.core.emulation import Drive
from bench.core.servers import HICACHE_MBPS

assert bench.core.stock_server


class _Event:
    """Has happened, whatever is asked of it."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def query(self, *_: Any) -> bool:
        return True

    record = wait = synchronize = query

    def elapsed_time(self, other: _Event) -> float:
        return 0.0


class _Stream(torch.cpu.Stream):
    """What is done in it is done at once."""

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def query(self, *_: Any) -> bool:
        return True

    synchronize = wait_event = wait_stream = query  # type: ignore[assignment]


def _without_pins(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, **how: Any) -> Any:
        return make(*args, **{**how, "pin_memory": False} if how.get("pin_memory") else how)

    return made


def _copy_rows(
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int = 1,
) -> None:
    """Rows of pools to rows of others, like `sgl_kernel.kvcacheio.transfer_kv_direct`."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.long()] = source[src_indices.long()]


def _on_a_cpu() -> None:
    from sglang.srt.mem_cache.pool_host import base, common, mha, mla

    for name in ("empty", "tensor", "zeros", "full", "ones", "arange"):
        setattr(torch, name, _without_pins(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    torch.cpu.Stream, torch.cpu.Event = _Stream, _Event  # type: ignore[misc, attr-defined]
    torch.cpu.current_stream = lambda *_: _Stream()  # type: ignore[assignment]
    common._cuda_host_register = lambda *_, **__: None
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    mha.transfer_kv_direct = mla.transfer_kv_direct = _copy_rows


def _slow_down(mbps: float) -> None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    drive, get = Drive(), HiCacheFile.get
    drive.set_rate(mbps * 1e6)

    def get_slowly(self: Any, key: str, target_location: torch.Tensor, *rest: Any) -> Any:
        # It comes when it has come from the real drive, and would have from the other.
        (end,) = drive.ask(np.array([target_location.nbytes]))
        found = get(self, key, target_location, *rest)
        drive.wait(int(end))
        return found

    HiCacheFile.get = get_slowly


_on_a_cpu()
if mbps := float(os.environ.get(HICACHE_MBPS, "0")):
    _slow_down(mbps)
