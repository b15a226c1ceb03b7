"""What is copied beside computing comes in the right order, however late or early it is done.

On a CPU all is done at once, and a missing wait would not be seen. Here kernels that a GPU would
run on one of two streams are kept back, and run at the last or at the first moment that the waits
allow; meanwhile all memory that is said to be free is overwritten.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from impress_sglang.storage.reader import BlockReader
from impress_sglang.tiers import cache as cache_module
from impress_sglang.tiers import page_copies
from impress_sglang.tiers import staging as staging_module
from impress_sglang.tiers.staging import Staging
from impress_sglang.transfer import coded_slots
from impress_sglang.triton import codes as code_kernels
from impress_sglang.triton import pages as page_kernels
from tests.unit.coded_factory import SHAPE, CodedCase, CodedPart

Action = Callable[[], None]


class Stream:
    """What was launched, in order; the first `done` of it have run."""

    def __init__(self) -> None:
        self.launched: list[Action] = []
        self.done = 0

    def run(self, until: int | None = None) -> None:
        stop = len(self.launched) if until is None else until
        while self.done < stop:
            self.done += 1
            self.launched[self.done - 1]()

    def wait_for(self, other: Stream) -> None:
        """What is launched here from now on comes after what was launched there."""
        until = len(other.launched)
        self.launched.append(lambda: other.run(until))


class Device:
    """Two streams, of which one runs as late as the waits allow and the other at once."""

    def __init__(self, *, late_copies: bool) -> None:
        self.computing, self.copies = Stream(), Stream()
        self.current = self.computing
        self.last_read = 0
        # Launches know addresses; a device gives memory to others only in the order of a stream.
        self.memory: list[Tensor] = []
        self.eager = self.computing if late_copies else self.copies

    def launch(self, action: Action) -> None:
        self.current.launched.append(action)
        self.eager.run()


class FakeCopyStream:
    """`CopyStream` on such a device."""

    device: Device

    def __init__(self, device: torch.device) -> None:
        pass

    @contextmanager
    def after_reading(self) -> Iterator[None]:
        until = self.device.last_read
        self.device.copies.launched.append(lambda: self.device.computing.run(until))
        self.device.current = self.device.copies
        try:
            yield
        finally:
            self.device.current = self.device.computing

    def note_reading(self, fence: FakeFence) -> None:
        self.device.last_read = len(self.device.computing.launched)

    def join(self) -> None:
        self.device.computing.wait_for(self.device.copies)


class FakeFence:
    """`Fence` on such a device."""

    device: Device

    def __init__(self, device: torch.device) -> None:
        self._stream = self.device.current
        self._place = len(self._stream.launched)

    @property
    def done(self) -> bool:
        return self._stream.done >= self._place

    def wait(self) -> None:
        self._stream.run(self._place)


@pytest.fixture(params=[True, False], ids=["late copies", "early copies"])
def fake(kernels: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """What kernels do is done on it."""
    fake = Device(late_copies=request.param)
    stream = type("OwnStream", (FakeCopyStream,), {"device": fake})
    fence = type("OwnFence", (FakeFence,), {"device": fake})
    empty = torch.empty

    def kept(*args: Any, **options: Any) -> Tensor:
        fake.memory.append(empty(*args, **options))
        return fake.memory[-1]

    def launched(kernel: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **options: fake.launch(lambda: kernel(*args, **options))

    for module, name in (
        (page_kernels, "copy_pages"),
        (code_kernels, "restore"),
        (coded_slots, "put_sinks"),
    ):
        monkeypatch.setattr(module, name, launched(getattr(module, name)))
    monkeypatch.setattr(torch, "empty", kept)
    monkeypatch.setattr(cache_module, "CopyStream", stream)
    # A ring that is full after few launches.
    monkeypatch.setattr(cache_module, "Staging", functools.partial(Staging, num_bytes=8))
    for own in (page_copies, staging_module):
        monkeypatch.setattr(own, "Fence", fence)
    return fake


def overwrite_free_memory(case: CodedCase) -> None:
    case.pool._collect()
    for memory in case.pool._free:
        memory.view[:] = b"\xff" * len(memory)


def test_each_layer_has_its_codes(fake: Device, tmp_path: Path, reader: BlockReader) -> None:
    """Blocks that are taken are in slots later; meanwhile they move, and buffers are used again."""
    parts = [CodedPart(100, 17), CodedPart(64)]
    # In its pages there is no padding, for the copy without it would be made at once.
    shape = dataclasses.replace(SHAPE, num_layers=2, value_dim=24, code_bits=5.0)
    case = CodedCase(tmp_path, parts, reader, shape=shape, device_pages=9, host_pages=13)
    layout = case.spans[0].layout
    assert layout.page_groups * layout.group_bytes == layout.page_bytes
    found = []
    for _ in range(2):
        case.request()
        case.pools = [torch.full_like(pool, -77.0) for pool in case.pools]
        found.append(case.pools)
        for layer in range(case.shape.num_layers):
            overwrite_free_memory(case)
            case.load(layer, code_kernels.restore)
    case.source.close()
    overwrite_free_memory(case)
    fake.computing.run()
    for case.pools in found:
        for layer in range(case.shape.num_layers):
            case.check(layer)
    assert fake.copies.launched
    case.close()
