"""How SGLang's attention backends become ours; `interpreted_backends.py` has what they compute."""

from __future__ import annotations

import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from impress_sglang.errors import UnsupportedError
from impress_sglang.integration.attention import ADOPTED, PrefixAttention, adopt_backend
from impress_sglang.integration.paged import PagedPrefixAttention, _host_rows
from impress_sglang.integration.pass_clock import DeviceClock, HostClock, clock_for
from impress_sglang.integration.plugin import _after_batch
from impress_sglang.integration.row_starts import RowStarts

INTERPRETED = Path(__file__).with_name("interpreted_backends.py")


@pytest.mark.slow
def test_rows_in_the_interpreter() -> None:
    """Triton decides when it is imported whether it interprets, so this is another process."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED)]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        cwd=INTERPRETED.parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.returncode == 0, result.stdout[-8000:]
    assert "12 passed" in result.stdout


@pytest.mark.parametrize(("theirs", "ours"), ADOPTED.items())
def test_objects_can_change_their_class(theirs: str, ours: str) -> None:
    """Python refuses a class with another layout, and a method that moved would not be found."""
    stock = pkgutil.resolve_name(f"sglang.srt.layers.attention.{theirs}")
    adopted = pkgutil.resolve_name(f"impress_sglang.integration.{ours}")
    backend = object.__new__(stock)
    backend.__class__ = adopted
    assert isinstance(backend, stock) and isinstance(backend, PrefixAttention)
    for name in ("init_forward_metadata", "forward_extend", "forward_decode"):
        assert name in vars(stock), name
    if not theirs.startswith("torch_native"):
        assert "init_forward_metadata_out_graph" in vars(stock)
        assert "pack_read_stream" in vars(KVIndexTranslator)


@pytest.mark.parametrize("kind", [HybridAttnBackend, type("Own", (TorchNativeAttnBackend,), {})])
def test_other_kinds_are_refused(kind: type[Any]) -> None:
    with pytest.raises(UnsupportedError, match=f"{kind.__name__}; use .* triton, flashinfer or"):
        adopt_backend(object.__new__(kind), SimpleNamespace())


@pytest.mark.parametrize(("kind", "kept"), [(PagedPrefixAttention, True), (PrefixAttention, False)])
def test_rows_on_the_host_are_kept_for_planners(kind: type[Any], kept: bool) -> None:
    """As SGLang calls what is hooked to a class method: its result, the class, its arguments."""
    parameters = list(inspect.signature(inspect.unwrap(vars(ForwardBatch)["init_new"])).parameters)
    assert parameters[:3] == ["cls", "batch", "model_runner"]
    made = SimpleNamespace(kv_loc_plan=SimpleNamespace(), req_pool_indices=torch.tensor([3, 1]))
    batch = SimpleNamespace(req_pool_indices_cpu=torch.tensor([3, 1]))
    runner = SimpleNamespace(attn_backend=object.__new__(kind))
    assert _after_batch(made, ForwardBatch, batch, runner, some_option=True) is made
    assert (_host_rows(made, on_host=False) is batch.req_pool_indices_cpu) is kept
    assert _host_rows(made, on_host=True).tolist() == [3, 1]


def test_row_starts_are_the_same_on_host_and_device() -> None:
    starts = RowStarts(6, "cpu")
    assert not starts
    rows = torch.tensor([4, 1, 3])
    starts.set(rows, rows, [7, 0, 9])
    assert starts and starts.on_host.tolist() == [0, 0, 0, 9, 7, 0]
    # Rows are used again, by requests that start at 0.
    starts.set(rows[:2], rows[:2], [0, 0])
    assert starts.on_device.tolist() == starts.on_host.tolist() == [0, 0, 0, 9, 0, 0]
    starts.set(rows[2:], rows[2:], [0])
    assert not starts


class Event:
    """An event of a device that has not come as far yet."""

    now = 0.0

    def __init__(self) -> None:
        self.at: float | None = None
        self.done = False

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, later: Event) -> float:
        assert self.at is not None and later.at is not None and later.done
        return later.at - self.at


def test_passes_of_a_device_are_noted_when_it_is_done() -> None:
    events: list[Event] = []

    def new_event() -> Event:
        events.append(Event())
        return events[-1]

    clock, noted = DeviceClock(new_event), list[tuple[str, float]]()
    for name, start, stop in (("first", 0.0, 40.0), ("second", 50.0, 110.0)):
        Event.now = start
        clock.start()
        Event.now = stop
        clock.stop(lambda seconds, name=name: noted.append((name, seconds)))
    assert noted == []
    clock.start()
    assert noted == []
    events[1].done = True
    clock.start()
    assert noted == [("first", 0.04)]
    events[3].done = True
    clock.start()
    assert noted == [("first", 0.04), ("second", 0.06)]


def test_passes_on_a_cpu_are_noted_at_once() -> None:
    clock, noted = clock_for(torch.device("cpu")), list[float]()
    assert isinstance(clock, HostClock)
    clock.start()
    clock.stop(noted.append)
    assert len(noted) == 1 and noted[0] > 0
