"""Load jobs: stored tokens that a background thread brings into slots, beside the model's passes.

The scheduler's thread plans a job, gives it slots, and in the end inserts them into SGLang's tree
(`job_queue`). In between, the loader's thread reads, verifies and restores, layer by layer. It
alone uses read buffers and moves chunks between caches. Nothing that a disk does leaves it as an
exception: a job ends in one of a few states.
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
from impress_sglang.threads import compute_alone
from impress_sglang.transfer.codecs import Codec
from impress_sglang.transfer.filling import StoredLayers, fill
from impress_sglang.transfer.sources import ReadStats, WholeSource

logger = logging.getLogger(__name__)


class JobState(enum.Enum):
    """How far a job is."""

    WAITING = "waiting"
    """It has no slots, and holds nothing."""
    LOADING = "loading"
    """It has slots, which the loader fills."""
    LOADED = "loaded"
    """All layers are in its slots."""
    FAILED = "failed"
    """Something could not be read; nobody may use its slots."""
    DROPPED = "dropped"
    """It was given up before all layers were there."""


Space: TypeAlias = tuple[str | None, str | None]
AfterFill: TypeAlias = Callable[[Tensor], None]
"""Changes a layer's pool of keys, in slots that were just filled."""
Read: TypeAlias = tuple[WholeSource, Tensor, AfterFill | None]
"""What is read, the slots that get it, and what changes their keys then."""


class JobRevoked(Exception):
    """The slots of a job were taken away: leaves the loader's work on it."""


@dataclasses.dataclass(eq=False)
class LoadJob:
    """The tokens [start, stop) of a prompt, which are stored and to be brought into slots.

    Attributes:
        store: has the tokens.
        kv_class: of the KVs that are brought.
        space: what keeps prompts apart: `extra_key`, with the mark of the class, and `cache_salt`.
        tokens: int32 [stop + beyond], the prompt up to the last of them.
        match: what is stored of these tokens, from the first.
        behind: the stored state where they end, if there are states.
        start: the first token; until the job is loading, what was resident when it was planned.
        estimate: what it takes, as planned; `loads`: that is not slower than computing.
        beyond: how many more tokens its key in SGLang's tree has.
        waiters: requests that wait for it, as in `job_queue`; who began it comes first.
        target: int64 [stop - start], the slots that are filled.
        rows: int64, where pools of layers with windows have the last of them, or a state is.
        slots: the same as `target` while they belong to the job: neither given back nor in SGLang's
            tree.
        hold: what keeps the tokens before `start` resident, in the terms of the pool's owner.
        after: on an accelerator, the event after which slots may be written to.
    """

    store: PrefixStore
    kv_class: KVClass
    space: Space
    tokens: Tokens
    match: StoredMatch
    start: int
    estimate: Estimate
    beyond: int = 0
    behind: tuple[StoredSpan, ...] = ()
    loads: bool = True
    waiters: list[Any] = dataclasses.field(default_factory=list)
    target: Tensor | None = None
    rows: Tensor | None = None
    slots: Tensor | None = None
    hold: Any = None
    after: Any = None
    state: JobState = JobState.WAITING
    told: bool = False
    """Whether its reads are in the report of a request."""
    early: bool = False
    """Whether its slots were inserted into SGLang's tree before they were filled."""
    deadline: float = 0.0
    """Until when a pass waits for its layers, by `time.monotonic`."""
    gated: float = 0.0
    """For how many seconds passes have waited for its layers."""
    error: BaseException | None = None
    layers: int = 0
    """How many layers are in the slots, and those of a state."""
    planned_at: float = dataclasses.field(default_factory=time.monotonic)
    began_at: float = 0.0
    reads: ReadStats = dataclasses.field(default_factory=ReadStats)
    fill_seconds: float = 0.0
    """How long reading and restoring took, with the wait for the drive."""
    bits: float = EXACT_BITS
    """Of an element of what was filled in."""
    events: list[Any] = dataclasses.field(default_factory=list)
    """On an accelerator, an event after each layer."""
    stream: Any = None
    computes: ClassVar[bool] = False
    """Whether the scheduler's thread has something to compute when all was read."""

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
        """Where it ends."""
        return len(self.tokens) - self.beyond

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def spans(self) -> tuple[StoredSpan, ...]:
        """What it reads."""
        return self.match.slice(self.start, self.stop)

    @property
    def parts(self) -> tuple[int, int, int]:
        """How many of its tokens are stored behind the same tokens, behind others, and nowhere."""
        return len(self), 0, 0

    def revoke(self) -> None:
        """Take its slots away: from now on nothing is written to them.

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
        # Slots may be others' from now on, and an accelerator still write to them.
        if self._written is not None:
            self._written.synchronize()

    def note_layer(self) -> None:
        """Note that another layer is in the slots, or will be when the device has written it."""
        with self._changed:
            if self._written is not None:
                self.events.append(self._written)
            self.layers += 1
            self._changed.notify_all()

    def end(self, state: JobState, error: BaseException | None = None) -> None:
        """Note how the loader's work on it ended."""
        self._synchronize()
        with self._changed:
            self.state, self.error = state, error
            self._changed.notify_all()
        self.done.set()

    def wait_for_layer(self, layer: int) -> bool:
        """Wait until a layer is in the slots; False if it never will be, or not in time."""
        with self._changed:
            began = time.monotonic()
            left = self.deadline - began
            self._changed.wait_for(lambda: self.layers > layer or self.done.is_set(), left)
            self.gated += time.monotonic() - began
            return self.layers > layer

    def begin_at(self, start: int) -> None:
        """Note where it begins: behind the tokens that are resident when it gets its slots."""
        self.start = start

    def open(self) -> WholeSource:
        """Open what is read first, on the loader's thread.

        Raises:
            PrefixUnreadable: it cannot be opened.
        """
        return self.store.segments.open(self.spans, exact=self.kv_class.exact)

    def sources(self, opened: WholeSource, rows_from: int | None) -> Generator[Read, None, None]:
        """What is read, one after the other, beginning with the source that was opened.

        Last come the layers from `rows_from` on of its last tokens (windows), or its state. Raises
        `PrefixUnreadable` if something cannot be opened. Who takes a source closes it.
        """
        assert self.target is not None
        yield opened, self.target, None
        if rows_from is None:
            return
        assert self.rows is not None
        spans = self.behind or self.match.slice(self.stop - len(self.rows), self.stop)
        if any(span.segment.info.windows_from > span.start for span in spans):
            # Another rank can go on behind fewer tokens than this one.
            raise PrefixUnreadable("", "its windows are gone")
        source = self.store.segments.open(spans, exact=self.kv_class.exact)
        source.layer, source.next_ahead = rows_from - 1, rows_from
        yield source, self.rows, None

    def unread(self, num_layers: int) -> float:
        """The share of its reads that is left to do."""
        return max(1.0 - self.layers / num_layers, 0.0)

    def seconds_left(self, num_layers: int, now: float) -> float | None:
        """How long the rest will take, judging by its layers so far; None before the first."""
        if not self.layers or not self.began_at:
            return None
        return max(num_layers - self.layers, 0) * (now - self.began_at) / self.layers


_Opened: TypeAlias = collections.deque[tuple[LoadJob, WholeSource]]


class JobLoader:
    """Carries out jobs, one after the other, on a thread of its own."""

    def __init__(
        self,
        device: torch.device,
        layers: StoredLayers,
        codec: Codec | None = None,
    ) -> None:
        """`device`: where the pools are; `codec` restores codes, if there are some."""
        self.wake = threading.Event()
        """Set when a job has ended."""
        self._layers, self._codec = layers, codec
        packed = layers.packed
        # Layers with windows are read by themselves, and states behind all others.
        self._windows_from = packed.first if packed is not None and packed.window else None
        self._rows_from = self._windows_from if layers.states is None else 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._asking = True
        self._measuring = False
        # Jobs, what measures reads, and None at the end.
        self._asked: queue.SimpleQueue[LoadJob | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="impress-load", daemon=True)
        self._thread.start()

    def begin(self, job: LoadJob) -> None:
        """Load a job, whose state is LOADING, after those that were begun before it."""
        self._asked.put(job)

    def measure(self, store: PrefixStore, spans: Sequence[StoredSpan], *, exact: bool) -> None:
        """Read a little of some spans, unless there are jobs, to measure how fast reads are now."""
        if not self._measuring:
            self._measuring = True
            self._asked.put(lambda: _measure(store, spans, exact=exact))

    def close(self, seconds: float) -> bool:
        """End the thread after all jobs; False if that takes more than `seconds`."""
        self._asked.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        compute_alone()
        opened = _Opened()
        while self._asking or opened:
            self._open(opened, wait=not opened)
            if opened:
                self._load(*opened.popleft(), opened)

    def _open(self, opened: _Opened, *, wait: bool = False) -> None:
        """Open what was asked for meanwhile, so that it is read ahead."""
        while self._asking and (wait or not self._asked.empty()):
            job, wait = self._asked.get(), False
            if job is None:
                self._asking = False
            elif isinstance(job, LoadJob):
                with self._failing(job):
                    job.began_at = time.monotonic()
                    if self._layers.states is not None and not job.behind:
                        # Another rank has one where this one has none.
                        raise PrefixUnreadable("", "its state is gone")
                    source = job.open()
                    if self._windows_from is not None:
                        source.num_layers = self._windows_from
                    try:
                        job.store.ahead.wait(source)
                    except BaseException:
                        job.store.close_source(source)
                        raise
                    opened.append((job, source))
            else:
                try:
                    if not opened:
                        job()
                except Exception:
                    logger.exception("reading could not be measured")
                self._measuring = False

    def _load(self, job: LoadJob, source: WholeSource, others: _Opened) -> None:
        with self._failing(job):
            sources = contextlib.closing(job.sources(source, self._rows_from))
            with torch.cuda.stream(self._stream), sources as reads:
                if self._stream is not None:
                    self._stream.wait_event(job.after)
                job.stream = self._stream
                for source, slots, after in reads:
                    try:
                        job.store.ahead.join(source)
                        for layer in range(source.layer + 1, source.num_layers):
                            self._load_layer(layer, job, source, slots, after)
                            self._open(others)
                    finally:
                        job.store.close_source(source)
                        job.reads.add(source.stats)
            self._end(job, JobState.LOADED)

    @contextlib.contextmanager
    def _failing(self, job: LoadJob) -> Iterator[None]:
        """End a job that something happens to."""
        try:
            yield
        except JobRevoked:
            self._end(job, JobState.DROPPED)
        except PrefixUnreadable as error:
            self._end(job, JobState.FAILED, error)
        except BaseException as bug:
            # Answers are right without the job.
            logger.exception("a stored prefix could not be loaded")
            self._end(job, JobState.FAILED, bug)

    def _load_layer(
        self,
        layer: int,
        job: LoadJob,
        source: WholeSource,
        slots: Tensor,
        after: AfterFill | None,
    ) -> None:
        if job.revoked:
            raise JobRevoked
        states, began = self._layers.states, time.perf_counter()
        into = self._layers if states is None or slots is not job.rows else states
        pieces = source.read(layer)
        with job.writing(), into.into(layer, slots) as rows:
            fill(layer, source, pieces, rows, self._codec)
            if after is not None:
                after(rows.keys)
        job.fill_seconds += time.perf_counter() - began
        if source.codes:
            job.bits = source.shape.code_bits
        job.note_layer()
        source.end_layer(layer)
        job.store.ahead.top_up()

    def _end(self, job: LoadJob, state: JobState, error: BaseException | None = None) -> None:
        job.end(state, error)
        self.wake.set()


def _measure(store: PrefixStore, spans: Sequence[StoredSpan], *, exact: bool) -> None:
    try:
        source = store.segments.open(spans, exact=exact)
        try:
            source.read_ahead()
            if not source.ended_in_time():
                late = TimeoutError("the device does not answer")
                store.health.failed("reading could not be measured", late, reading=True)
        finally:
            store.close_source(source)
    except PrefixUnreadable as error:
        logger.warning("reading cannot be measured: %s", error)
