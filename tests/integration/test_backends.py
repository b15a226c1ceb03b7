"""How SGLang's attention backends become ours; `interpreted_backends.py` has what they compute."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import itertools
import pkgutil
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner import prefill_cuda_graph_runner as prefill_runner

from impress_sglang.cost import Estimator, RequestLengths, pairs_of
from impress_sglang.errors import UnsupportedError
from impress_sglang.integration.paper.attention import PrefixAttention, adopt_backend
from impress_sglang.integration.paper.hooks import _after_batch
from impress_sglang.integration.paper.judged_backends import BACKENDS
from impress_sglang.integration.paper.paged import PagedPrefixAttention, _host_rows
from impress_sglang.integration.paper.row_starts import RowStarts
from impress_sglang.management.policies import LoadOptions
from impress_sglang.management.stored import StoredMatch
from impress_sglang.serving import clocks
from impress_sglang.serving.clocks import Clock, HostEvent, clock_for
from impress_sglang.serving.paper.request import StoredRequest
from impress_sglang.serving.paper.runtime import ServingRuntime
from impress_sglang.serving.pool_reader import reading_stream
from tests.integration.worlds import make_runtime
from tests.unit.kv_factory import make_shape
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


def test_a_start_is_that_of_the_last_allocation() -> None:
    pool = ReqToTokenPool(1, 8, "cpu", enable_memory_saver=False)
    starts, row = RowStarts(pool), torch.tensor([1])
    for start in (6, 6, 4):
        assert pool.alloc_rows(1) == [1]
        starts.set(row, row, [start])
        starts.void_reallocated()
        assert starts.on_device[1] == starts.on_host[1] == start
        pool.free_rows([1])


class Device:
    """What is launched on it takes its time there, and is reached when a test says so."""

    def __init__(self) -> None:
        self.launched = 0.0
        self.reached = -1.0
        self.events: weakref.WeakSet[DeviceEvent] = weakref.WeakSet()

    def launch(self, milliseconds: float) -> None:
        self.launched += milliseconds

    def catch_up(self) -> None:
        self.reached = self.launched

    def event(self) -> DeviceEvent:
        event = DeviceEvent(self)
        self.events.add(event)
        return event


class DeviceEvent:
    """Who asks for a time that the device has not come to would wait, and fails."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.at: float | None = None

    def record(self) -> None:
        assert self.at is None
        self.at = self._device.launched

    def query(self) -> bool:
        assert self.at is not None
        return self.at <= self._device.reached

    def elapsed_time(self, later: DeviceEvent) -> float:
        assert self.query() and later.query()
        assert self.at is not None and later.at is not None
        return later.at - self.at


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture(params=["host", "device"])
def clock(request: Any, device: Device, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of both kinds; the host's shows the time of the device, as if it waited for each launch."""
    if request.param == "device":
        return Clock(device.event)
    host = SimpleNamespace(perf_counter=lambda: device.launched / 1e3)
    monkeypatch.setattr(clocks, "time", host)
    return clock_for(torch.device("cpu"))


def test_stopwatches_add_up_what_they_ran(clock: Clock, device: Device) -> None:
    whole, part, unused = clock.stopwatch(), clock.stopwatch(), clock.stopwatch()
    whole.begin()
    for milliseconds in (3.0, 5.0):
        device.launch(10.0)
        with part:
            assert part.running
            device.launch(milliseconds)
        assert not part.running
    device.launch(1.0)
    whole.end()
    device.launch(100.0)
    device.catch_up()
    noted = list[list[float]]()
    clock.when_known([whole, part, unused], noted.append)
    assert noted == [[pytest.approx(0.029), pytest.approx(0.008), 0]]
    with part:
        device.launch(2.0)
    device.catch_up()
    clock.when_known([part], noted.append)
    assert noted[1:] == [[pytest.approx(0.010)]]


def test_a_stopwatch_ends_with_what_fails(clock: Clock, device: Device) -> None:
    stopwatch = clock.stopwatch()
    with pytest.raises(ZeroDivisionError), stopwatch:
        device.launch(4.0)
        raise ZeroDivisionError
    device.launch(1.0)
    device.catch_up()
    assert stopwatch.seconds() == pytest.approx(0.004)


def test_a_device_is_not_waited_for() -> None:
    device, names = Device(), list[str]()
    clock = Clock(device.event)
    passed = list[float]()
    for name in ("first", "second", "third"):
        with (stopwatch := clock.stopwatch()):
            device.launch(10.0)
        passed.append(device.launched)
        clock.when_known([stopwatch], lambda _, name=name: names.append(name))
    assert names == []
    device.reached = passed[0] - 1.0
    clock.poll()
    assert names == []
    device.reached = passed[1]
    assert names == [], "only a later pass asks"
    clock.poll()
    assert names == ["first", "second"]
    device.catch_up()
    clock.when_known([], lambda _: names.append("nothing to wait for"))
    assert names == ["first", "second", "third", "nothing to wait for"]
    clock.poll()
    assert len(names) == 4


def test_notes_keep_their_order_and_wait_for_all_of_their_stopwatches() -> None:
    slow, fast, names = Device(), Device(), list[str]()
    clock, other = Clock(slow.event), Clock(fast.event)
    watches = clock.stopwatch(), other.stopwatch()
    for watch in watches:
        with watch:
            pass
    clock.when_known(watches, lambda _: names.append("both"))
    clock.when_known([watches[1]], lambda _: names.append("fast"))
    fast.catch_up()
    clock.poll()
    assert names == []
    slow.catch_up()
    clock.poll()
    assert names == ["both", "fast"]


def test_a_device_is_timed_by_its_own_events(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()

    def new_event(*, enable_timing: bool = False) -> DeviceEvent:
        assert enable_timing, "the event would have no time"
        return device.event()

    module = SimpleNamespace(Event=new_event)
    monkeypatch.setattr(torch, "get_device_module", {torch.device("cuda:1"): module}.__getitem__)
    with (stopwatch := clock_for(torch.device("cuda:1")).stopwatch()):
        device.launch(7.0)
    assert stopwatch.seconds() is None
    device.catch_up()
    assert stopwatch.seconds() == pytest.approx(0.007)
    assert not isinstance(next(iter(device.events)), HostEvent)


class Notes(Estimator):
    """Keeps what it is told; `passes` and `loads` in milliseconds."""

    def __init__(self) -> None:
        super().__init__(64)
        self.passes: list[tuple[int, float, float]] = []
        self.loads: list[tuple[RequestLengths, float, bool]] = []

    def note_forward(self, new: int, pairs: float, seconds: float) -> None:
        self.passes.append((new, pairs, round(seconds * 1e3, 6)))

    def note_load(self, work: RequestLengths, seconds: float, *, whole: bool, **_: float) -> None:
        self.loads.append((work, round(seconds * 1e3, 6), whole))


LAYERS, PLANNING, ATTENDING = 3, 0.5, 10.0


class Stock(AttentionBackend):
    """Of SGLang: planning and attention take their time on the device."""

    device: Device

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.device.launch(PLANNING)

    def forward_extend(self, q: Any, *_: Any, **__: Any) -> Any:
        self.device.launch(ATTENDING)
        return q


class Serving(PrefixAttention, Stock):
    """Loading takes what a test says, and ends after the device has come to its selection."""

    def __init__(self, device: Device, clock: Clock, runtime: ServingRuntime) -> None:
        pool = ReqToTokenPool(7, 512, "cpu", enable_memory_saver=False)
        self.begin_serving(SimpleNamespace(req_to_token_pool=pool))
        self.connect(runtime, SimpleNamespace(begin_saves=lambda rids, lengths: {}))
        self.device = device
        self._clock, runtime._clock = clock, Clock(clock._new_event)
        self.on_host = clock._new_event is HostEvent
        self.runtime = runtime
        self.notes = runtime.estimator = Notes()
        runtime.admission._clock, runtime.admission._estimator = runtime._clock, self.notes
        self.milliseconds: dict[str, float] = {}
        self.recomputed = ""
        self.fails_at = -1

    def _load_layer(self, row: Any, q: Any, k: Any, layer: Any, forward_batch: Any) -> None:
        self.device.catch_up()
        if layer.layer_id == self.fails_at:
            raise ZeroDivisionError
        self.device.launch(self.milliseconds[row.request.rid])
        row.request.recomputed |= row.request.rid == self.recomputed

    def admit(self, rid: str, m: int, k: int, new: int, loading: float) -> StoredRequest:
        """A request with a stored prefix, each of whose layers takes so many milliseconds."""
        tokens = torch.zeros(m, dtype=torch.int64)
        request = stored_request(tokens, tokens[:0], torch.arange(k), rid, new_tokens=new)
        self.runtime.live[rid] = request
        self.milliseconds[rid] = loading
        return request

    def begin(self, *rows: tuple[str, int, int]) -> Any:
        """A pass begins: of each request the id, the length after it and the new tokens."""
        rids, lengths, new = zip(*rows, strict=True)
        batch = self.batch(ForwardMode.EXTEND, rids, lengths, new)
        self.init_forward_metadata(batch)
        return batch

    def extend(self, *rows: tuple[str, int, int]) -> None:
        """A whole pass."""
        batch = self.begin(*rows)
        hidden = torch.zeros(1)
        for layer in range(LAYERS):
            self.forward(hidden, hidden, hidden, SimpleNamespace(layer_id=layer), batch)

    def catch_up(self) -> None:
        """The device does, and both clocks are asked."""
        self.device.catch_up()
        self._clock.poll()
        self.runtime._clock.poll()

    def decode(self) -> None:
        self.init_forward_metadata(self.batch(ForwardMode.DECODE, ["any"], [1], [1]))

    def batch(
        self, mode: ForwardMode, rids: Sequence[str], lengths: Sequence[int], new: Sequence[int]
    ) -> Any:
        indices = torch.arange(1, 1 + len(rids))
        return SimpleNamespace(
            forward_mode=mode,
            rids=list(rids),
            batch_size=len(rids),
            seq_lens_cpu=torch.tensor(lengths),
            extend_seq_lens_cpu=list(new),
            req_pool_indices=indices,
            req_pool_indices_cpu=indices,
        )


@pytest.fixture
def serving(clock: Clock, device: Device, tmp_path: Path) -> Iterator[Serving]:
    runtime = make_runtime(tmp_path, make_shape(layers=LAYERS))
    yield Serving(device, clock, runtime)
    runtime.close()


COMPUTING = PLANNING + LAYERS * ATTENDING


def test_passes_are_noted_without_what_they_load(serving: Serving, device: Device) -> None:
    part = serving.admit("part", m=30, k=10, new=70, loading=3.0)
    whole = serving.admit("whole", m=20, k=20, new=8, loading=5.0)
    part.reads.wait_ms, whole.reads.wait_ms = 2.0, 16.0
    passes = [(178, pairs_of(10, 70) + pairs_of(20, 8) + pairs_of(0, 100), COMPUTING)]
    loads = [
        (RequestLengths(0, 30, 70), LAYERS * 3.0 - 2.0, False),
        # The host waited longer than the device, which computed meanwhile.
        (RequestLengths(0, 20, 8), 0.0, True),
    ]
    serving.extend(("part", 100, 70), ("whole", 28, 8), ("computed", 100, 100))
    assert serving.notes.passes == (passes if serving.on_host else [])
    device.catch_up()
    serving.begin(("other", 64, 64))
    assert serving.notes.passes == passes
    serving.extend(("computed", 164, 64))
    serving.catch_up()
    assert serving.notes.loads == loads
    # What was loaded is not loaded again, and says nothing more of loading.
    serving.extend(("part", 170, 70))
    serving.catch_up()
    passes += [(64, pairs_of(100, 64), COMPUTING), (70, pairs_of(80, 70), COMPUTING)]
    assert serving.notes.passes == passes and serving.notes.loads == loads


def test_passes_that_load_are_no_graphs(serving: Serving) -> None:
    """The runner of SGLang's graphs asks the backend, by this name, before each pass."""
    assert '.attn_backend, "can_run_prefill_cuda_graph"' in inspect.getsource(prefill_runner)
    batch = serving.batch(ForwardMode.EXTEND, ["other", "own"], [9, 9], [9, 9])
    assert serving.can_run_prefill_cuda_graph(batch)
    request = serving.admit("own", m=4, k=4, new=5, loading=1.0)
    assert not serving.can_run_prefill_cuda_graph(batch)
    request.layers_loaded = LAYERS
    assert serving.can_run_prefill_cuda_graph(batch), "a later part of its prompt"
    request.failed = True
    assert not serving.can_run_prefill_cuda_graph(batch)
    request.layers_loaded, request.failed, request.adopted = 0, False, True
    assert serving.can_run_prefill_cuda_graph(batch)
    batch.rids = None
    assert serving.can_run_prefill_cuda_graph(batch), "a pass of SGLang's warm-up"


def test_a_pass_with_a_recompute_is_not_noted(serving: Serving) -> None:
    serving.admit("damaged", m=30, k=10, new=70, loading=500.0)
    serving.admit("intact", m=20, k=5, new=8, loading=5.0)
    serving.recomputed = "damaged"
    serving.extend(("damaged", 100, 70), ("intact", 28, 8))
    serving.extend(("computed", 64, 64))
    serving.catch_up()
    assert serving.notes.passes == [(64, pairs_of(0, 64), COMPUTING)]
    assert serving.notes.loads == [(RequestLengths(0, 20, 8), LAYERS * 5.0, False)]


def test_a_pass_that_fails_leaves_nothing_behind(serving: Serving, device: Device) -> None:
    serving.admit("request", m=30, k=10, new=70, loading=3.0)
    serving.fails_at = 2
    with pytest.raises(ZeroDivisionError):
        serving.extend(("request", 100, 70))
    assert serving.on_host or device.events
    serving.decode()
    del serving.runtime.live["request"]
    gc.collect()
    assert not device.events
    serving.catch_up()
    assert not serving.notes.passes and not serving.notes.loads


def test_loading_is_noted_only_if_one_pass_loads_all(serving: Serving) -> None:
    request = serving.admit("request", m=30, k=10, new=70, loading=3.0)
    serving.fails_at = 2
    with pytest.raises(ZeroDivisionError):
        serving.extend(("request", 100, 70))
    assert request.layers_loaded == 2
    serving.fails_at = -1
    serving.extend(("request", 100, 70))
    serving.catch_up()
    assert request.layers_loaded == LAYERS
    assert serving.notes.passes == [(70, pairs_of(10, 70), COMPUTING)]
    assert not serving.notes.loads


def test_estimates_count_what_the_device_has_passed(serving: Serving, device: Device) -> None:
    serving.admit("request", m=30, k=10, new=70, loading=3.0)
    serving.extend(("request", 100, 70))
    assert serving.on_host or not serving.notes.loads
    device.catch_up()
    work, wanted = RequestLengths(0, 0, 70), LoadOptions(0.25)
    serving.runtime.admission.decide(StoredMatch(), work, wanted)
    assert serving.notes.loads == [(RequestLengths(0, 30, 70), LAYERS * 3.0, False)]


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
