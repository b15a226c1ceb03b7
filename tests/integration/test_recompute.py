"""A prefix that cannot be read is computed again: what that takes, gives, and how it fails."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from impress_sglang.errors import SegmentUnreadable
from impress_sglang.integration.paper import attention, recompute
from impress_sglang.integration.paper.attention import PrefixAttention
from impress_sglang.integration.paper.radix_cache import ImpressRadixCache
from impress_sglang.integration.paper.recompute import PrefixCapture, host_shortage
from impress_sglang.serving.paper.loading import RecomputedLoading
from impress_sglang.serving.paper.request import StoredRequest
from impress_sglang.serving.paper.runtime import ServingRuntime
from impress_sglang.serving.report import RequestTotals
from impress_sglang.storage.layout import KVShape
from tests.integration.tiny_model import HIDDEN, Model, Pool, layer_of, tokens_of
from tests.integration.worlds import make_runtime
from tests.unit.kv_factory import make_shape
from tests.unit.request_factory import stored_request


def request_of(
    tokens: Tensor, resident: int, slots: Tensor | None = None, rid: str = "r"
) -> StoredRequest:
    """A request whose prefix of these tokens is resident up to `resident`, and stored after it."""
    m = len(tokens) - resident
    slots = torch.arange(100, 100 + m) if slots is None else slots
    return stored_request(tokens, torch.arange(1, 1 + resident), slots, rid)


@pytest.fixture(autouse=True)
def _in_a_pass() -> Iterator[None]:
    with forward_context(ForwardContext(attn_backend=SimpleNamespace())):
        yield


@pytest.mark.parametrize("resident", [0, 1, 17])
@pytest.mark.parametrize("size", [1, 7, 40, 100])
def test_blocks_give_the_kvs_of_the_whole_at_once(size: int, resident: int) -> None:
    shape = make_shape(layers=3, probe=())
    model, pool = Model(shape), Pool(shape, 64, 7.0)
    tokens = tokens_of(1, 57)
    expected = model.kvs(tokens)
    for layer, (keys, values) in enumerate(expected):
        pool.keys[layer][1 : 1 + resident] = keys[:resident]
        pool.values[layer][1 : 1 + resident] = values[:resident]
    request = request_of(tokens, resident)
    capture = PrefixCapture(pool, request.resident_slots, shape, request.num_tokens)
    model.attend = capture.attend

    assert recompute.recompute_prefix(model, request, torch.device("cpu"), size, math.inf)
    source = capture.source(0)

    m = request.num_tokens
    blocks = [count for layer, count in model.computed if layer == 0]
    assert blocks == [size] * (m // size) + ([m % size] if m % size else [])
    assert model.logits == 0, "nothing is computed after the last layer's KVs"
    assert source.num_tokens == m
    for layer, (keys, values) in enumerate(expected):
        found_keys, found_values = source._take(layer)
        assert torch.allclose(found_keys, keys[resident:], rtol=1e-4, atol=1e-5)
        assert torch.allclose(found_values, values[resident:], rtol=1e-4, atol=1e-5)


class DeviceBytes(TorchDispatchMode):
    """Bytes of tensors on an accelerator, beside those that are given: now, and at most."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cuda":
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        self.live += (size := storage.nbytes())
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, size)

    def _gone(self, size: int) -> None:
        self.live -= size


def peak_on_device(m: int, resident: int, layers: int) -> int:
    """Device bytes of recomputing m tokens of a model with the heads of Llama-3.1-8B.

    No memory is taken: tensors have sizes and devices, and no content.
    """
    shape = KVShape(layers, 32, 8, 128, 128, torch.bfloat16, ())
    with FakeTensorMode():
        pool = Pool(shape, 8192, device="cuda")
        request = request_of(torch.zeros(resident + m, dtype=torch.int64), resident)
        request = dataclasses.replace(request, resident_slots=request.resident_slots.to("cuda"))
        with DeviceBytes(request.resident_slots) as used:
            capture = PrefixCapture(pool, request.resident_slots, shape, m)
            model = SimpleNamespace(forward=lambda ids, *_: attend_all(capture, shape, len(ids)))
            size = recompute.BLOCK_TOKENS
            assert recompute.recompute_prefix(model, request, torch.device("cuda"), size, math.inf)
            peak = used.peak
            source = capture.source(0)
            assert source.num_tokens == m and used.live < 1e6
        return peak


def attend_all(capture: PrefixCapture, shape: KVShape, count: int) -> None:
    for index in range(shape.num_layers):
        q, k, v = (
            torch.empty(count, heads * 128, dtype=torch.bfloat16, device="cuda")
            for heads in (32, 8, 8)
        )
        capture.attend(q, k, v, layer_of(shape, index))


def test_memory_on_the_device_does_not_grow_with_the_prefix() -> None:
    short = peak_on_device(4096, 0, 3)
    assert peak_on_device(12 * 1024, 0, 3) == short
    assert peak_on_device(4096, 4096, 3) == short, "resident keys come in tiles, too"
    assert peak_on_device(4096, 0, 6) == short, "layers are not kept there"
    assert short < 200e6


def test_torch_says_on_a_cpu_that_memory_ran_out() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert recompute.is_out_of_memory(caught.value)


def test_host_memory_is_asked_for_before(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = make_shape(layers=3, probe=())
    each = token_bytes(shape)
    assert host_shortage(shape, 100, 100 * each) is None
    assert "--impress-recompute-gb" in (host_shortage(shape, 101, 100 * each) or "")
    assert host_shortage(shape, 1, 0) is not None
    monkeypatch.setattr(recompute, "available_bytes", lambda: 50 * each)
    assert host_shortage(shape, 50, 100 * each) is None
    assert "are left" in (host_shortage(shape, 51, 100 * each) or "")
    assert host_shortage(shape, 40, 100 * each, 60 * each) is None
    assert "of which others have" in (host_shortage(shape, 41, 100 * each, 60 * each) or "")

    def unknown() -> int:
        raise OSError("no such file")

    monkeypatch.setattr(recompute, "available_bytes", unknown)
    assert "not known: no such file" in (host_shortage(shape, 1, 100 * each) or "")


def token_bytes(shape: KVShape) -> int:
    each = shape.num_kv_heads * (shape.key_dim + shape.value_dim) * shape.dtype.itemsize
    return shape.num_layers * each


class Unreadable:
    """A source that breaks at a layer."""

    held_bytes = 0

    def __init__(self, num_tokens: int, layer: int, values: float) -> None:
        self.num_tokens, self.layer, self.value = num_tokens, layer, values

    def read_probe(self, layer: int) -> Tensor:
        raise SegmentUnreadable("ab12", "test")

    def read(self, layer: int, tokens: Any, *, keys: Any = None, values: Any = None) -> None:
        if layer >= self.layer:
            raise SegmentUnreadable("ab12", "test")
        for slots in (keys, values):
            slots.put(torch.full_like(slots.pool[slots.rows], self.value))

    def note_whole(self, layer: int) -> None: ...


class Stock(AttentionBackend):
    def forward_extend(self, q: Tensor, *_: Any, **__: Any) -> Tensor:
        return q


class Backend(PrefixAttention, Stock):
    """Of one pass over all layers, with a model behind it that it may run again."""

    def __init__(self, runtime: ServingRuntime, model: Model, pool: Pool, aborted: Any) -> None:
        table = torch.zeros(8, 512, dtype=torch.int32)
        rows = SimpleNamespace(req_to_token=table)
        self.begin_serving(
            SimpleNamespace(req_to_token_pool=rows, token_to_kv_pool=pool, model=model)
        )
        self.connect(runtime, SimpleNamespace(abort=aborted))
        model.attend = lambda q, k, v, layer: self.forward(q, k, v, layer, None)

    def extend(
        self, runtime: ServingRuntime, requests: list[StoredRequest], *, keys_in_pool: bool = False
    ) -> None:
        """A pass of one new token per request."""
        shape = runtime.shape
        self._rows = [
            attention._BatchRow(i, own, slice(i, i + 1)) for i, own in enumerate(requests)
        ]
        new = torch.ones(len(requests), shape.num_query_heads * shape.key_dim)
        keys = torch.ones(len(requests), shape.num_kv_heads * shape.key_dim)
        given = None if keys_in_pool else keys
        batch = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND, out_cache_loc=torch.arange(len(requests))
        )
        for index in range(shape.num_layers):
            self.forward(new, given, given, layer_of(shape, index), batch)


@dataclasses.dataclass
class Serving:
    runtime: ServingRuntime
    model: Model
    pool: Pool
    backend: Backend
    aborted: list[tuple[str, str]]

    def request(
        self, rid: str, m: int, broken_at: int = 1, k: int | None = None
    ) -> tuple[StoredRequest, Tensor]:
        first = 100 * (1 + len(self.runtime.live))
        tokens = tokens_of(m, m)
        request = request_of(tokens, 0, torch.arange(first, first + (k or m)), rid)
        source: Any = Unreadable(m, broken_at, 3.0)
        request.loading = RecomputedLoading(self.runtime._loader, source)
        self.runtime.live[rid] = request
        return request, tokens

    def allow(self, tokens: float) -> None:
        """Memory for so many tokens of all layers."""
        limit = tokens * token_bytes(self.runtime.shape) / 1e9
        self.runtime.config = dataclasses.replace(self.runtime.config, recompute_gb=limit)

    def kvs_in(self, request: StoredRequest, layer: int) -> tuple[Tensor, Tensor]:
        slots = request.slots
        return self.pool.keys[layer][slots], self.pool.values[layer][slots]


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    monkeypatch.setattr(attention, "block_tokens", lambda: 16)
    monkeypatch.setattr(attention, "pass_seconds", lambda: 100.0)
    shape = make_shape(layers=3, probe=())
    runtime = make_runtime(tmp_path, shape, hidden_size=HIDDEN, policy="as+h2o+lru")
    aborted: list[tuple[str, str]] = []
    model, pool = Model(shape), Pool(shape, 512, 7.0)
    backend = Backend(runtime, model, pool, lambda rid, why: aborted.append((rid, why)))
    serving = Serving(runtime, model, pool, backend, aborted)
    serving.allow(100)
    yield serving
    runtime.live.clear()
    runtime.close()


def assert_computed(serving: Serving, request: StoredRequest, tokens: Tensor, since: int) -> None:
    for layer, kvs in enumerate(serving.model.kvs(tokens)):
        for found, want in zip(serving.kvs_in(request, layer), kvs, strict=True):
            if layer < since:
                assert bool((found == 3.0).all()), "what was loaded stays"
            else:
                assert torch.allclose(found, want, rtol=1e-4, atol=1e-5)


def assert_zeros(serving: Serving, request: StoredRequest, since: int) -> None:
    for layer in range(since, 3):
        for found in serving.kvs_in(request, layer):
            assert not found.any()


def test_two_requests_that_break_in_the_same_layer_and_one_later(serving: Serving) -> None:
    requests = [serving.request("a", 40), serving.request("b", 33), serving.request("c", 50, 2)]

    serving.backend.extend(serving.runtime, [request for request, _ in requests])

    for since, (request, tokens) in zip((1, 1, 2), requests, strict=True):
        assert request.recomputed and not request.failed and request.loading is None
        assert request.layers_loaded == 3
        assert_computed(serving, request, tokens, since)
    assert serving.aborted == [] and serving.backend._capture is None


def test_a_part_is_chosen_from_what_is_computed(serving: Serving) -> None:
    """Each layer has 10 tokens of 50: keys and values of the same ones, in their order."""
    request, tokens = serving.request("part", 50, broken_at=0, k=10)

    serving.backend.extend(serving.runtime, [request])

    assert request.recomputed and request.stats.layers_by_fallback == 3
    for layer, (keys, values) in enumerate(serving.model.kvs(tokens)):
        found_keys, found_values = serving.kvs_in(request, layer)
        for head in range(keys.shape[1]):
            distance = (found_keys[:, None, head] - keys[None, :, head]).abs().amax(-1)
            chosen = distance.argmin(1)
            assert distance.amin(1).max() < 1e-3 and bool((chosen.diff() > 0).all())
            assert torch.allclose(found_values[:, head], values[chosen, head], rtol=1e-4, atol=1e-5)


def test_keys_that_were_written_with_their_rotation(serving: Serving) -> None:
    """A recompute would have to find them in the pool, where its tokens have no slots."""
    request, _ = serving.request("fused", 40)
    serving.backend.extend(serving.runtime, [request], keys_in_pool=True)
    ((rid, message),) = serving.aborted
    assert rid == "fused" and "keeps no new keys outside its pool" in message
    assert_zeros(serving, request, since=1)


def test_one_without_room_fails_alone(serving: Serving) -> None:
    serving.allow(60)
    (large, _), (small, tokens) = serving.request("large", 61), serving.request("small", 60)

    serving.backend.extend(serving.runtime, [large, small])

    assert large.failed and large.loading is None and large.layers_loaded == 3
    assert_zeros(serving, large, 1)
    ((rid, message),) = serving.aborted
    assert rid == "large" and "--impress-recompute-gb" in message
    assert not small.failed
    assert_computed(serving, small, tokens, 1)
    assert bool((serving.pool.keys[1][:100] == 7.0).all()), "other slots are as they were"


def test_requests_of_a_pass_have_one_limit(serving: Serving) -> None:
    """The second one breaks when the first holds 2 of 3 layers; later there is room again."""
    (first, _), (second, _), (late, tokens) = (
        serving.request("first", 60, 0),
        serving.request("second", 60, 1),
        serving.request("late", 60, 2),
    )
    serving.allow(60 + 60 * 2 / 3 - 1)

    serving.backend.extend(serving.runtime, [first, second, late])

    assert [first.failed, second.failed, late.failed] == [False, True, False]
    ((rid, message),) = serving.aborted
    assert rid == "second" and "of which others have" in message
    assert_computed(serving, late, tokens, 2)
    assert recompute.held_by(serving.runtime.live.values()) == 0


def fail_passes(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, *, number: int, error: Exception
) -> None:
    """The pass of this number over the model fails."""
    forward, passes = serving.model.forward, itertools.count()

    def run_out(*arguments: Any) -> None:
        if next(passes) == number:
            raise error
        forward(*arguments)

    monkeypatch.setattr(serving.model, "forward", run_out)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
    ],
)
@pytest.mark.parametrize("block", [0, 2, None])
def test_memory_that_runs_out_fails_one_request(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, error: Exception, block: int | None
) -> None:
    """While it is computed again, or before that while it is loaded."""
    (first, _), (second, tokens) = serving.request("first", 50), serving.request("second", 45)
    if block is None:
        monkeypatch.setattr(first.loading, "load", mock.Mock(side_effect=error))
    else:
        fail_passes(serving, monkeypatch, number=block, error=error)
    serving.backend.extend(serving.runtime, [first, second])

    assert [rid for rid, _ in serving.aborted] == ["first"]
    assert first.failed and first.loading is None
    assert_zeros(serving, first, 0 if block is None else 1)
    assert serving.backend._capture is None
    assert not second.failed
    assert_computed(serving, second, tokens, 1)


@pytest.mark.parametrize(
    "error", [RuntimeError("an illegal memory access"), ValueError("DefaultCPUAllocator")]
)
def test_another_error_is_not_hidden(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    request, _ = serving.request("request", 50)
    fail_passes(serving, monkeypatch, number=0, error=error)
    with pytest.raises(type(error), match=str(error)):
        serving.backend.extend(serving.runtime, [request])
    assert serving.aborted == [] and serving.backend._capture is None


def test_a_pass_gives_up_in_time(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all of its requests together: each block takes 30 of 100 seconds."""
    (first, tokens), (second, _) = serving.request("first", 40), serving.request("second", 45)
    forward, clock = serving.model.forward, SimpleNamespace(now=5.0)

    def slowly(*arguments: Any) -> None:
        clock.now += 30.0
        forward(*arguments)

    monkeypatch.setattr(serving.model, "forward", slowly)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    serving.backend.extend(serving.runtime, [first, second])
    monkeypatch.undo()

    assert not first.failed
    assert_computed(serving, first, tokens, 1)
    ((rid, message),) = serving.aborted
    assert rid == "second" and "too long" in message
    assert_zeros(serving, second, 1)


@pytest.mark.parametrize(("watchdog", "seconds"), [(300.0, 60.0), (20.0, 10.0)])
def test_a_pass_ends_before_the_watchdog_does(
    monkeypatch: pytest.MonkeyPatch, watchdog: float, seconds: float
) -> None:
    device = SimpleNamespace(watchdog_timeout=watchdog)
    monkeypatch.setattr(recompute, "get_device", lambda: device)
    assert recompute.pass_seconds() == seconds


@pytest.mark.parametrize(("chunk", "size"), [(None, 2048), (-1, 2048), (8192, 2048), (512, 512)])
def test_a_block_is_no_longer_than_a_chunk_of_prefill(
    monkeypatch: pytest.MonkeyPatch, chunk: int | None, size: int
) -> None:
    schedule = SimpleNamespace(chunked_prefill_size=chunk)
    monkeypatch.setattr(recompute, "get_schedule", lambda: schedule)
    assert recompute.block_tokens() == size


@pytest.mark.parametrize("finished", [True, False])
def test_a_failed_request_that_is_put_back_may_try_again(finished: bool) -> None:
    """SGLang may retract it before it has seen its result; only an end is counted."""
    request = request_of(torch.zeros(9, dtype=torch.int64), 0)
    request.failed = True
    reason = FINISH_ABORT("no room")
    req = SimpleNamespace(finished=lambda: finished, discard_output_reason=reason)
    totals = RequestTotals()
    cache = SimpleNamespace(runtime=SimpleNamespace(totals=totals))
    ImpressRadixCache._end_failed(cache, req, request)  # type: ignore[arg-type]
    assert totals.requests_failed == finished
    assert req.discard_output_reason is (reason if finished else None)
