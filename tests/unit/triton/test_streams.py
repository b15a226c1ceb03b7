"""What is copied beside computing comes in the right order, however late or early it is done.

On a CPU all is done at once, and a missing wait would not be seen. Here kernels that a GPU would
run on one of two streams are kept back, and run at the last or at the first moment that the waits
allow; meanwhile all memory that is said to be free is overwritten.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from impress_sglang.codes.planes.codec import NUM_PLANES
from impress_sglang.importance.selection import top_tokens, vote
from impress_sglang.importance.selectors import PaperSelector
from impress_sglang.storage.reader import BlockReader
from impress_sglang.tiers import cache as cache_module
from impress_sglang.tiers import page_copies
from impress_sglang.tiers import staging as staging_module
from impress_sglang.tiers.staging import Staging
from impress_sglang.transfer import coded_slots
from impress_sglang.transfer import gather as gather_module
from impress_sglang.transfer.coded_slots import KernelCodeWriter
from impress_sglang.transfer.loader import LayerInputs, LoadStats, PrefixLoader
from impress_sglang.transfer.scoring import TorchScorer, kernel_scorer
from impress_sglang.transfer.slots import LayerSlots
from impress_sglang.triton import chunk_rows as chunk_kernels
from impress_sglang.triton import codes as code_kernels
from impress_sglang.triton import gather as gather_kernels
from impress_sglang.triton import pages as page_kernels
from impress_sglang.triton import scores as score_module
from tests.unit.coded_factory import SHAPE, CodedCase, CodedPart
from tests.unit.reading import ScatteredSlots, layer_inputs
from tests.unit.source_factory import Case, opened

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
    """What kernels do is done on it; the host waits for it before it looks at scores."""
    fake = Device(late_copies=request.param)
    stream = type("OwnStream", (FakeCopyStream,), {"device": fake})
    fence = type("OwnFence", (FakeFence,), {"device": fake})
    score, empty = score_module.column_sums, torch.empty

    def kept(*args: Any, **options: Any) -> Tensor:
        fake.memory.append(empty(*args, **options))
        return fake.memory[-1]

    def launched(kernel: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **options: fake.launch(lambda: kernel(*args, **options))

    def waited_for(*args: Any, **options: Any) -> Tensor:
        assert fake.current is fake.computing
        fake.computing.run()
        return score(*args, **options)

    for module, name in (
        (gather_kernels, "gather"),
        (chunk_kernels, "gather_chunks"),
        (page_kernels, "copy_pages"),
        (code_kernels, "restore_base"),
        (code_kernels, "raise_units"),
        (coded_slots, "put_sinks"),
    ):
        monkeypatch.setattr(module, name, launched(getattr(module, name)))
    monkeypatch.setattr(torch, "empty", kept)
    monkeypatch.setattr(score_module, "column_sums", waited_for)
    monkeypatch.setattr(cache_module, "CopyStream", stream)
    # A ring that is full after few launches.
    monkeypatch.setattr(cache_module, "Staging", functools.partial(Staging, num_bytes=8))
    for own in (gather_module, page_copies, staging_module):
        monkeypatch.setattr(own, "Fence", fence)
    return fake


def overwrite_free_memory(case: Case | CodedCase) -> None:
    case.pool._collect()
    for memory in case.pool._free:
        memory.view[:] = b"\xff" * len(memory)


def new_slots(case: Case, k: int) -> tuple[ScatteredSlots, ScatteredSlots]:
    shape = case.shape
    keys, values = (
        ScatteredSlots(k, shape.num_kv_heads, dim, shape.dtype)
        for dim in (shape.key_dim, shape.value_dim)
    )
    return keys, values


def chosen(case: Case, layer: int, inputs: LayerInputs, k: int) -> Tensor:
    """What the rule chooses, by the references."""
    if k == case.num_tokens:
        return torch.arange(k).expand(case.shape.num_head_groups, -1)
    heads, size = case.shape.probe_kv_heads, case.shape.group_size
    sums = TorchScorer().column_sums(
        torch.cat([inputs.queries[:, head * size : (head + 1) * size] for head in heads], 1),
        case.keys[layer][:, list(heads)],
        inputs.resident_keys,
        inputs.new_keys,
        heads,
        inputs.scaling,
    )
    return vote(sums, top_tokens(sums, k), k)[None]


def load_request(case: Case, fake: Device, k: int, seed: int, *, neighbour: bool) -> None:
    """Load all layers, each while others are copied.

    A neighbour reads the same rows right after, from where they have moved.
    """
    found = []
    case.request()
    source, other = case.segment_source, case.make_source()
    # Its threshold is never reached: one set serves all heads.
    loader = PrefixLoader(case.shape, PaperSelector(100.0), kernel_scorer())
    apart, everything = case.shape.other_kv_heads, range(case.shape.num_kv_heads)
    for layer in range(case.shape.num_layers):
        inputs, pools = layer_inputs(case.shape, seed + layer), new_slots(case, k)
        overwrite_free_memory(case)
        slots = LayerSlots(pools[0].whole, pools[1].whole)
        selected = loader.load(layer, source, inputs, slots, LoadStats())
        assert torch.equal(selected, chosen(case, layer, inputs, k))
        found.append((layer, selected, pools, tuple(everything)))
        if neighbour:
            others = new_slots(case, k)
            keys = others[0].whole.only(apart)
            other.read(layer, selected, keys=keys, values=others[1].whole)
            found.append((layer, selected, others, apart))
        while source.next_ahead < source.num_layers:
            source.read_ahead(1.0)
        while source.is_reading:
            time.sleep(0.001)
        overwrite_free_memory(case)
    for own in (source, other):
        own.close()
    overwrite_free_memory(case)
    fake.computing.run()
    for layer, (tokens, *_), (own_keys, own_values), heads in found:
        for head in heads:
            assert torch.equal(own_keys.rows()[:, head], case.keys[layer][tokens, head])
        assert torch.equal(own_values.rows(), case.values[layer][tokens])


@pytest.mark.parametrize(
    ("name", "k"),
    [
        ("tiny score, reordered: gqa-float32", 20),
        ("room on both, reordered: gqa-float32", 20),
        ("tiny score, logical: no-probe-float32", 77),
    ],
)
def test_each_layer_has_its_tokens(
    fake: Device, name: str, k: int, tmp_path: Path, reader: BlockReader
) -> None:
    """Chunks move through the same pages from request to request, behind what reads them."""
    case = opened(f"one-segment, {name}", tmp_path, reader)
    for n in range(4):
        load_request(case, fake, k, 10 * n, neighbour=n % 2 == 1)
    assert fake.copies.launched
    case.close()


def test_each_layer_has_its_codes(fake: Device, tmp_path: Path, reader: BlockReader) -> None:
    """Blocks that are taken are in slots later; meanwhile they move, and buffers are used again."""
    parts = [CodedPart(100, 17), CodedPart(64)]
    # In its pages there is no padding, for the copy without it would be made at once.
    shape = dataclasses.replace(SHAPE, num_layers=2, value_dim=24)
    case = CodedCase(tmp_path, parts, reader, shape=shape, device_pages=9, host_pages=13)
    layout = case.spans[0].layout
    assert layout.page_groups * layout.group_bytes == layout.page_bytes
    writer = KernelCodeWriter(torch.device("cpu"))
    found = []
    for planes in (1, NUM_PLANES):
        case.request(planes)
        case.pools = [torch.full_like(pool, -77.0) for pool in case.pools]
        found.append((case.pools, planes))
        for layer in range(case.shape.num_layers):
            overwrite_free_memory(case)
            case.load(layer, writer)
    case.source.close()
    overwrite_free_memory(case)
    fake.computing.run()
    for case.pools, case.source.planes in found:
        for layer in range(case.shape.num_layers):
            case.check(layer)
    assert fake.copies.launched
    case.close()
