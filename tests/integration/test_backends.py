"""How SGLang's attention backends become ours; `interpreted_backends.py` has what they compute."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.runner import prefill_cuda_graph_runner as prefill_runner

from impress_sglang.errors import UnsupportedError
from impress_sglang.paper.plugin.attention import PrefixAttention, adopt_backend
from impress_sglang.paper.plugin.hooks import _after_batch
from impress_sglang.paper.plugin.judged_backends import BACKENDS
from impress_sglang.paper.plugin.paged import PagedPrefixAttention, _host_rows
from impress_sglang.paper.plugin.row_starts import RowStarts
from impress_sglang.serving.pool_reader import reading_stream
from tests.unit.request_factory import stored_request


@pytest.mark.parametrize("name", BACKENDS)
def test_objects_can_change_their_class(name: str) -> None:
    """Python refuses a class with another layout, and a method that moved would not be found."""
    stock = pkgutil.resolve_name(f"sglang.srt.layers.attention.{BACKENDS[name].kind}")
    backend = object.__new__(stock)
    pool = SimpleNamespace(
        req_to_token=torch.zeros(2, 2), req_generation=torch.zeros(2, dtype=torch.int64)
    )
    adopt_backend(backend, SimpleNamespace(req_to_token_pool=pool))
    assert isinstance(backend, stock) and isinstance(backend, PrefixAttention)
    # What loads comes first, and goes on where SGLang would.
    assert type(backend).forward is PrefixAttention.forward
    assert "forward" not in vars(stock)
    for method in ("init_forward_metadata", "forward_extend", "forward_decode"):
        assert method in vars(stock), method


def test_paged_backends_ask_the_translator() -> None:
    """What `paged.py` goes by: each of them asks the translator once for a batch."""
    for name in set(BACKENDS) - {"torch_native"}:
        stock = pkgutil.resolve_name(f"sglang.srt.layers.attention.{BACKENDS[name].kind}")
        assert "init_forward_metadata_out_graph" in vars(stock)
    assert "pack_read_stream" in vars(KVIndexTranslator)


def test_other_kinds_are_refused() -> None:
    """Also a subclass of a judged one, which may read rows in its own way."""
    kind = type("Own", (TorchNativeAttnBackend,), {})
    with pytest.raises(UnsupportedError, match=r"how Own attends; use .* torch_native, triton"):
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
    starts = RowStarts(ReqToTokenPool(5, 8, "cpu", enable_memory_saver=False))
    assert not starts
    rows = torch.tensor([4, 1, 3])
    starts.set(rows, rows, [7, 0, 9])
    assert starts and starts.on_host.tolist() == [0, 0, 0, 9, 7, 0]
    # Rows are used again, by requests that start at 0.
    starts.set(rows[:2], rows[:2], [0, 0])
    assert starts.on_device.tolist() == starts.on_host.tolist() == [0, 0, 0, 9, 0, 0]
    starts.set(rows[2:], rows[2:], [0])
    assert not starts


def test_a_start_is_void_once_its_row_is_allocated_again() -> None:
    """Whoever has the row then, and whether or not that ever passes through extend."""
    pool = ReqToTokenPool(5, 8, "cpu", enable_memory_saver=False)
    starts = RowStarts(pool)
    taken = pool.alloc_rows(3)
    rows = torch.tensor(taken)
    starts.set(rows, rows, [7, 5, 9])
    starts.void_reallocated()
    assert starts.on_host[rows].tolist() == [7, 5, 9], "chunks of one request keep their start"
    pool.free_rows(taken[:2])
    starts.void_reallocated()
    assert starts.on_host[rows].tolist() == [7, 5, 9], "a step that overshoots reads a freed row"
    assert pool.alloc_rows(1) == [taken[1]]
    starts.void_reallocated()
    assert starts.on_device[rows].tolist() == starts.on_host[rows].tolist() == [7, 0, 9]
    # A flush gives all rows back, and their numbers of allocations stay.
    pool.clear()
    pool.alloc_rows(5)
    starts.void_reallocated()
    assert not starts and not starts.on_device.any() and not starts.on_host.any()


def test_passes_that_load_are_no_graphs() -> None:
    """The runner of SGLang's graphs asks the backend, by this name, before each pass."""
    assert '.attn_backend, "can_run_prefill_cuda_graph"' in inspect.getsource(prefill_runner)
    runtime: Any = SimpleNamespace(live={}, shape=SimpleNamespace(num_layers=3))
    passes: Any = None
    backend = PrefixAttention()
    backend.begin_serving(SimpleNamespace(req_to_token_pool=ReqToTokenPool(7, 9, "cpu", False)))
    backend.connect(runtime, passes)
    batch = SimpleNamespace(rids=["other", "own"])
    assert backend.can_run_prefill_cuda_graph(batch)
    tokens = torch.zeros(4, dtype=torch.int64)
    request = runtime.live["own"] = stored_request(tokens, tokens[:0], torch.arange(4), "own")
    assert not backend.can_run_prefill_cuda_graph(batch)
    request.layers_loaded = 3
    assert backend.can_run_prefill_cuda_graph(batch), "a later part of its prompt"
    request.failed = True
    assert not backend.can_run_prefill_cuda_graph(batch)
    request.layers_loaded, request.failed, request.adopted = 0, False, True
    assert backend.can_run_prefill_cuda_graph(batch)
    batch.rids = None
    assert backend.can_run_prefill_cuda_graph(batch), "a pass of SGLang's warm-up"


def test_pools_are_read_on_a_stream_that_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of a process come round: a new one may be the model's."""
    numbers = itertools.chain([7, 3, 7, 5], itertools.repeat(9))

    def new_stream(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=next(numbers))

    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    reading_stream.cache_clear()
    model, scheduler = Handle(7), Handle(3)
    found = reading_stream(torch.device("cuda", 0), model, scheduler)
    assert found.cuda_stream == 5
    assert reading_stream(torch.device("cuda", 0), model, scheduler) is found, "one for all writes"
    reading_stream.cache_clear()


@dataclasses.dataclass(frozen=True)
class Handle:
    """A stream, as far as it is looked at."""

    cuda_stream: int
