"""Load jobs: a background thread loads stored tokens into slots while the model runs.

The scheduler's thread plans a job, allocates its slots, and finally inserts them into SGLang's
tree (`job_queue`). In between, the loader's thread reads, verifies and restores layer by layer.
No other thread uses read buffers or moves chunks between caches. Disk errors do not leave it as
exceptions: a job ends in one of a few states.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from impress_sglang.config import EXACT_BITS
from impress_sglang.cost import Estimate
from impress_sglang.errors import PrefixUnreadable
from impress_sglang.serving.kv_class import KVClass
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import StoredMatch, StoredSpan
from impress_sglang.threads import use_one_torch_thread
from impress_sglang.transfer.codecs import Codec
from impress_sglang.transfer.filling import StoredLayers, fill
from impress_sglang.transfer.sources import ReadStats, WholeSource

logger = logging.getLogger(__name__)


class JobState(enum.Enum):
    """State of a load job."""

    WAITING = "waiting"
    """It has no slots and locks nothing."""
    LOADING = "loading"
    """It has slots, which the loader fills."""
    LOADED = "loaded"
    """All layers are in its slots."""
    FAILED = "failed"
    """Something could not be read; its slots must not be used."""
    DROPPED = "dropped"
    """It was given up before all layers were loaded."""


KeyScope: TypeAlias = tuple[str | None, str | None]
AfterFill: TypeAlias = Callable[[Tensor], None]
"""Changes a layer's pool of keys, in slots that were just filled."""
Read: TypeAlias = tuple[WholeSource, Tensor, AfterFill | None]
"""A source, the slots it is read into, and the function that then changes their keys."""


class JobRevoked(Exception):
    """The slots of a job were taken away, so the loader stops working on it."""


@dataclasses.dataclass(eq=False)
class LoadJob:
    """Loads the stored tokens [start, stop) of a prompt into slots.

    Attributes:
        store: the store with the tokens.
        kv_class: class of the loaded KVs.
        key_scope: `extra_key`, with the mark of the class, and `cache_salt`, which keep prompts
            apart.
        tokens: int32 [stop + draft_offset], the prompt up to the last loaded token.
        match: stored spans of these tokens, from the first token of the prompt.
        state_spans: the stored state at `stop`, if the model has states.
        start: the first token; until the job is loading, the resident length when it was planned.
        estimate: estimated times, as planned.
        worthwhile: whether loading is no slower than computing.
        draft_offset: number of additional tokens in its key in SGLang's tree.
        waiters: requests that wait for it, as in `job_queue`; the one that started it is first.
        target_slots: int64 [stop - start], the slots to fill.
        aux_slots: int64, slots of the last tokens in pools of layers with windows, or of the state.
        owned_slots: `target_slots` while the job owns them: neither freed nor in SGLang's tree.
        lock: the lock on the tokens before `start`, as returned by the owner of the pool.
        writable_event: on an accelerator, the event after which slots may be written.
    """

    store: PrefixStore
    kv_class: KVClass
    key_scope: KeyScope
    tokens: Tokens
    match: StoredMatch
    start: int
    estimate: Estimate
    draft_offset: int = 0
    state_spans: tuple[StoredSpan, ...] = ()
    worthwhile: bool = True
    waiters: list[Any] = dataclasses.field(default_factory=list)
    target_slots: Tensor | None = None
    aux_slots: Tensor | None = None
    owned_slots: Tensor | None = None
    lock: Any = None
    writable_event: Any = None
    state: JobState = JobState.WAITING
    reads_reported: bool = False
    """Whether its reads are in the report of a request."""
    inserted_early: bool = False
    """Whether its slots were inserted into SGLang's tree before they were filled."""
    pass_deadline: float = 0.0
    """Time until which a pass waits for its layers, by `time.monotonic`."""
    pass_wait_seconds: float = 0.0
    """Seconds that passes have waited for its layers."""
    error: BaseException | None = None
    layers_loaded: int = 0
    """Number of layers in the slots, including those of a state."""
    planned_at: float = dataclasses.field(default_factory=time.monotonic)
    started_at: float = 0.0
    read_stats: ReadStats = dataclasses.field(default_factory=ReadStats)
    fill_seconds: float = 0.0
    """Seconds spent on reading and restoring, including the wait for the drive."""
    bits: float = EXACT_BITS
    """Bits per element of the KVs that were filled in."""
    layer_events: list[Any] = dataclasses.field(default_factory=list)
    """On an accelerator, an event after each layer."""
    stream: Any = None
    computes_after_reads: ClassVar[bool] = False
    """Whether the scheduler's thread has to compute something after all reads."""

    def __post_init__(self) -> None:
        self.revoked = False
        """Whether its slots were taken away."""
        self._writing = threading.Lock()
        self._written: Any = None
        self._changed = threading.Condition()
        self.done = threading.Event()
        """Set when the loader no longer works on it."""

    @property
    def stop(self) -> int:
        return len(self.tokens) - self.draft_offset

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def spans(self) -> tuple[StoredSpan, ...]:
        return self.match.slice(self.start, self.stop)

    def tokens_by_origin(self, stop: int) -> tuple[int, int, int]:
        """Numbers of its tokens before token `stop` that are stored after the same tokens, stored
        after others, and not stored."""
        return stop - self.start, 0, 0

    def revoke(self) -> None:
        """Take its slots away; nothing is written to them afterwards.

        Waits for a layer that is being written, never for the drive.
        """
        with self._writing:
            self.revoked = True
            self._synchronize()
        with self._changed:
            self._changed.notify_all()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Keep its slots while the loader writes to them, or raise `JobRevoked`."""
        with self._writing:
            if self.revoked:
                raise JobRevoked
            try:
                yield
            finally:
                if self.stream is not None:
                    self._written = self.stream.record_event()

    def _synchronize(self) -> None:
        # The slots may be reused from now on, while an accelerator still writes to them.
        if self._written is not None:
            self._written.synchronize()

    def count_layer(self) -> None:
        """Count a layer that is in the slots, or will be once the device has written it."""
        with self._changed:
            if self._written is not None:
                self.layer_events.append(self._written)
            self.layers_loaded += 1
            self._changed.notify_all()

    def end(self, state: JobState, error: BaseException | None = None) -> None:
        """Set its final state, and wake the threads that wait for it."""
        self._synchronize()
        with self._changed:
            self.state, self.error = state, error
            self._changed.notify_all()
        self.done.set()

    def wait_for_layer(self, layer: int) -> bool:
        """Wait until a layer is in the slots; False if the job or `pass_deadline` ends first."""
        with self._changed:
            began = time.monotonic()
            left = self.pass_deadline - began
            self._changed.wait_for(lambda: self.layers_loaded > layer or self.done.is_set(), left)
            self.pass_wait_seconds += time.monotonic() - began
            return self.layers_loaded > layer

    def set_start(self, start: int) -> None:
        """Set the first token: the one after those that are resident when slots are allocated."""
        self.start = start

    def open(self) -> WholeSource:
        """Open its first source. Thread: loader.

        Raises:
            PrefixUnreadable: it cannot be opened.
        """
        return self.store.readers.open(self.spans, exact=self.kv_class.exact)

    def sources(self, opened: WholeSource, rows_from: int | None) -> Generator[Read, None, None]:
        """Yield the sources to read, in order, beginning with the one that was `opened`.

        The last one has the layers from `rows_from` on of its last tokens (windows), or its state.
        Raises `PrefixUnreadable` if a source cannot be opened. The caller closes each source.
        """
        assert self.target_slots is not None
        yield opened, self.target_slots, None
        if rows_from is None:
            return
        assert self.aux_slots is not None
        spans = self.state_spans or self.match.slice(self.stop - len(self.aux_slots), self.stop)
        if any(span.segment.info.windows_from > span.start for span in spans):
            # Another rank can continue after fewer tokens than this one.
            raise PrefixUnreadable("", "its windows are gone")
        source = self.store.readers.open(spans, exact=self.kv_class.exact)
        source.layer, source.next_ahead = rows_from - 1, rows_from
        yield source, self.aux_slots, None

    def unread_fraction(self, num_layers: int) -> float:
        """Fraction of its reads that is not done yet."""
        return max(1.0 - self.layers_loaded / num_layers, 0.0)

    def seconds_left(self, num_layers: int, now: float) -> float | None:
        """Estimate the remaining seconds from its layers so far; None before the first."""
        if not self.layers_loaded or not self.started_at:
            return None
        per_layer = (now - self.started_at) / self.layers_loaded
        return max(num_layers - self.layers_loaded, 0) * per_layer


_Opened: TypeAlias = collections.deque[tuple[LoadJob, WholeSource]]


class JobLoader:
    """Runs jobs, one after the other, on a thread of its own."""

    def __init__(
        self, device: torch.device, layers: StoredLayers, codec: Codec | None = None
    ) -> None:
        """`device`: device of the pools; `codec` restores codes, if any."""
        self.wake = threading.Event()
        """Set when a job has ended."""
        self._layers, self._codec = layers, codec
        packed = layers.packed
        # Layers with windows are read separately, and states after all others.
        self._windows_from = packed.first if packed is not None and packed.window else None
        self._rows_from = self._windows_from if layers.states is None else 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._accepting = True
        self._measuring = False
        # Jobs, functions that measure reads, and None at the end.
        self._tasks: queue.SimpleQueue[LoadJob | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="impress-load", daemon=True)
        self._thread.start()

    def begin(self, job: LoadJob) -> None:
        """Queue a job, whose state is LOADING, to be loaded after earlier ones."""
        self._tasks.put(job)

    def measure(self, store: PrefixStore, spans: Sequence[StoredSpan], *, exact: bool) -> None:
        """Measure the current read speed on a layer of one of some spans, unless there are jobs."""
        if not self._measuring:
            self._measuring = True
            self._tasks.put(lambda: _measure(store, spans, exact=exact))

    def close(self, seconds: float) -> bool:
        """End the thread after all jobs; returns False if that takes more than `seconds`."""
        self._tasks.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        use_one_torch_thread()
        opened = _Opened()
        # Read buffers are pinned for the current device of a thread, at first that with number 0.
        with torch.cuda.stream(self._stream):
            while self._accepting or opened:
                self._open(opened, wait=not opened)
                if opened:
                    self._load(*opened.popleft(), opened)

    def _open(self, opened: _Opened, *, wait: bool = False) -> None:
        """Open the jobs queued meanwhile, so that they are read ahead.

        `wait` for one if none is being loaded.
        """
        idle = wait
        while self._accepting and (wait or not self._tasks.empty()):
            job, wait = self._tasks.get(), False
            if job is None:
                self._accepting = False
            elif isinstance(job, LoadJob):
                with self._failing(job):
                    job.started_at = time.monotonic()
                    if job.revoked:
                        # Opening its files may take as long as the drive is waited for.
                        raise JobRevoked
                    if self._layers.states is not None and not job.state_spans:
                        # Another rank has a state where this one has none.
                        raise PrefixUnreadable("", "its state is gone")
                    source = job.open()
                    if self._windows_from is not None:
                        source.num_layers = self._windows_from
                    try:
                        job.store.ahead.add_waiting(source)
                    except BaseException:
                        job.store.close_source(source)
                        raise
                    opened.append((job, source))
            else:
                try:
                    if idle and not opened:
                        job()
                except Exception:
                    logger.exception("reading could not be measured")
                self._measuring = False

    def _load(self, job: LoadJob, source: WholeSource, others: _Opened) -> None:
        with self._failing(job):
            with contextlib.closing(job.sources(source, self._rows_from)) as reads:
                if self._stream is not None:
                    self._stream.wait_event(job.writable_event)
                job.stream = self._stream
                for source, slots, after in reads:
                    try:
                        job.store.ahead.add_running(source)
                        for layer in range(source.layer + 1, source.num_layers):
                            self._load_layer(layer, job, source, slots, after)
                            self._open(others)
                    finally:
                        job.store.close_source(source)
                        job.read_stats.add(source.stats)
            self._end(job, JobState.LOADED)

    @contextlib.contextmanager
    def _failing(self, job: LoadJob) -> Iterator[None]:
        """End a job in the state that belongs to an exception inside."""
        try:
            yield
        except JobRevoked:
            self._end(job, JobState.DROPPED)
        except PrefixUnreadable as error:
            self._end(job, JobState.FAILED, error)
        except BaseException as bug:
            # Answers are correct without the job.
            logger.exception("a stored prefix could not be loaded")
            self._end(job, JobState.FAILED, bug)

    def _load_layer(
        self, layer: int, job: LoadJob, source: WholeSource, slots: Tensor, after: AfterFill | None
    ) -> None:
        if job.revoked:
            raise JobRevoked
        states, began = self._layers.states, time.perf_counter()
        into = self._layers if states is None or slots is not job.aux_slots else states
        pieces = source.read(layer)
        with job.writing(), into.into(layer, slots) as rows:
            fill(layer, source, pieces, rows, self._codec)
            if after is not None:
                after(rows.keys)
        job.fill_seconds += time.perf_counter() - began
        if source.codes:
            job.bits = source.shape.code_bits
        job.count_layer()
        source.end_layer(layer)
        job.store.ahead.top_up()

    def _end(self, job: LoadJob, state: JobState, error: BaseException | None = None) -> None:
        job.end(state, error)
        self.wake.set()


def _measure(store: PrefixStore, spans: Sequence[StoredSpan], *, exact: bool) -> None:
    span = store.readers.least_cached(spans, codes=not exact)
    try:
        source = store.readers.open([span], exact=exact)
        try:
            source.read_some()
            if not source.wait_idle():
                late = TimeoutError("the device does not answer")
                store.health.report_failure("reading could not be measured", late, reading=True)
        finally:
            store.close_source(source)
    except PrefixUnreadable as error:
        logger.warning("reading cannot be measured: %s", error)
