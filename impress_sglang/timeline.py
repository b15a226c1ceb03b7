"""Where the time of one request went, stage by stage and layer by layer.

A `RequestTimeline` collects what its request's thread does, and what others do for it meanwhile;
`NO_TIMELINE` replaces it where no timeline is wanted, and costs next to nothing. A `TimelineWriter`
keeps each as a file in Chrome's trace event format, for https://ui.perfetto.dev.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple, Protocol

logger = logging.getLogger(__name__)

# Stages. The two reads are the time that the request's thread waits for bytes.
PROBE_READ = "probe read"
PROBE_COMPUTE = "probe compute"
SELECT = "select"
PLAN = "plan"
SSD_READ = "SSD read"
COPY = "copy"
ATTENTION = "attention"
STAGES = (PROBE_READ, PROBE_COMPUTE, SELECT, PLAN, SSD_READ, COPY, ATTENTION)
# The time of the request that no event of its track covers.
REST = "rest"
# The track of spans; events that are added to it must not partly overlap them.
REQUEST_TRACK = "request"

_PID = 1
_REQUEST_TID = 1
_MAX_RID_CHARS = 60
_FILE_NAME = re.compile(rf"([0-9]{{6,}})-[A-Za-z0-9_-]{{1,{_MAX_RID_CHARS}}}\.json")


class Timeline(Protocol):
    """What the stages of a request report to."""

    @property
    def enabled(self) -> bool:
        """Whether anything is kept; a caller may skip what only serves the timeline."""

    def span(self, stage: str, layer: int) -> AbstractContextManager[None]:
        """Record the block on the request's own track; by the request's thread only."""

    def add(
        self, track: str, name: str, start: float, stop: float, layer: int | None = None
    ) -> None:
        """Record an event of any thread on `track`; times in seconds of `time.perf_counter()`."""

    def finish(self) -> None:
        """Note the end of the request; the first call counts."""


class _NoTimeline:
    """Keeps nothing."""

    __slots__ = ()

    enabled = False

    def span(self, stage: str, layer: int) -> AbstractContextManager[None]:
        return _NOTHING

    def add(
        self, track: str, name: str, start: float, stop: float, layer: int | None = None
    ) -> None:
        pass

    def finish(self) -> None:
        pass


_NOTHING = nullcontext()
NO_TIMELINE: Timeline = _NoTimeline()


class _Event(NamedTuple):
    """Times in nanoseconds since the request began."""

    start: int
    stop: int
    name: str
    layer: int | None


class RequestTimeline:
    """The timeline of one request, which begins now."""

    __slots__ = ("_began", "_ended", "_events", "rid")

    enabled = True

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self._events: list[tuple[str, str, float, float, int | None]] = []
        self._ended: float | None = None
        self._began = perf_counter()

    def span(self, stage: str, layer: int) -> AbstractContextManager[None]:
        """Record the block as `stage`; time in a span is not counted for a span around it."""
        return _Span(self, stage, layer)

    def add(
        self, track: str, name: str, start: float, stop: float, layer: int | None = None
    ) -> None:
        """See `Timeline.add`."""
        self._events.append((track, name, start, stop, layer))

    def finish(self) -> None:
        """See `Timeline.finish`."""
        if self._ended is None:
            self._ended = perf_counter()

    @property
    def duration_ms(self) -> float:
        """Milliseconds from construction to `finish`, or to now before that."""
        return self._whole() / 1e6

    def totals(self) -> dict[str, float]:
        """Milliseconds per stage without the spans inside it, and the rest of the duration.

        Each of `STAGES` is included, then other names of the request's track. The values sum to the
        duration; time outside of it is not counted.
        """
        return _totals(self._by_track()[REQUEST_TRACK], self._whole())

    def chrome_trace(self) -> dict[str, Any]:
        """The timeline as a JSON object in Chrome's trace event format.

        The request's track is one thread, and each other track as many as it needs, because viewers
        drop overlapping events of a thread. Events from before the request begin with it.
        """
        tracks = self._by_track()
        threads = [(REQUEST_TRACK, sorted(tracks.pop(REQUEST_TRACK), key=_outer_first))]
        for track, events in tracks.items():
            for number, row in enumerate(_rows(events), start=1):
                threads.append((track if number == 1 else f"{track} ({number})", row))
        trace_events = [_metadata("process_name", 0, {"name": self.rid})]
        for tid, (name, row) in enumerate(threads, start=_REQUEST_TID):
            trace_events.append(_metadata("thread_name", tid, {"name": name}))
            trace_events.append(_metadata("thread_sort_index", tid, {"sort_index": tid}))
            trace_events.extend(_complete(event, tid) for event in row)
        return {
            "traceEvents": trace_events,
            "displayTimeUnit": "ms",
            "otherData": {"rid": self.rid, "duration_us": self._whole() / 1e3},
        }

    def _whole(self) -> int:
        ended = perf_counter() if self._ended is None else self._ended
        return self._since_start(ended)

    def _since_start(self, moment: float) -> int:
        return round((moment - self._began) * 1e9)

    def _by_track(self) -> dict[str, list[_Event]]:
        """Events by track, the request's first.

        A span is recorded when it closes. In the order latest first, outer ones therefore come
        before inner ones, even if the clock cannot tell them apart.
        """
        tracks: dict[str, list[_Event]] = {REQUEST_TRACK: []}
        for track, name, start, stop, layer in reversed(self._events.copy()):
            first = self._since_start(start)
            event = _Event(first, max(first, self._since_start(stop)), name, layer)
            tracks.setdefault(track, []).append(event)
        return tracks


class _Span:
    __slots__ = ("_layer", "_stage", "_start", "_timeline")

    def __init__(self, timeline: RequestTimeline, stage: str, layer: int) -> None:
        self._timeline = timeline
        self._stage = stage
        self._layer = layer

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timeline.add(REQUEST_TRACK, self._stage, self._start, perf_counter(), self._layer)


def _outer_first(event: _Event) -> tuple[int, int]:
    return event.start, -event.stop


def _exclusive(events: Iterable[_Event], whole: int) -> dict[tuple[str, int | None], int]:
    """Nanoseconds of [0, whole) per name and layer; of open events, only the innermost counts.

    Of events with the same times, earlier ones in `events` are the outer ones.
    """
    spent: dict[tuple[str, int | None], int] = defaultdict(int)
    stack: list[_Event] = []
    now = 0
    for event in (*sorted(events, key=_outer_first), None):
        until = whole if event is None else min(event.start, whole)
        while stack and now < until:
            top = stack[-1]
            stop = min(top.stop, until)
            if stop > now:
                spent[top.name, top.layer] += stop - now
                now = stop
            else:
                stack.pop()
        now = max(now, until)
        if event is not None:
            spent[event.name, event.layer] += 0
            stack.append(event)
    return spent


def _totals(events: Iterable[_Event], whole: int) -> dict[str, float]:
    """Milliseconds per stage and other name, and the rest."""
    totals = dict.fromkeys(STAGES, 0)
    spent = _exclusive(events, whole)
    for (name, _), nanoseconds in spent.items():
        totals[name] = totals.get(name, 0) + nanoseconds
    totals[REST] = totals.pop(REST, 0) + whole - sum(spent.values())
    return {name: nanoseconds / 1e6 for name, nanoseconds in totals.items()}


def _rows(events: Iterable[_Event]) -> list[list[_Event]]:
    """Events in as few rows as hold them without overlap."""
    rows: list[list[_Event]] = []
    for event in sorted(events, key=_outer_first):
        row = next((row for row in rows if row[-1].stop <= event.start), None)
        if row is None:
            rows.append([event])
        else:
            row.append(event)
    return rows


def _metadata(name: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": _PID, "tid": tid, "args": args}


def _complete(event: _Event, tid: int) -> dict[str, Any]:
    # Perfetto drops events with a negative time.
    start, stop = max(event.start, 0), max(event.stop, 0)
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.name,
        "ts": start / 1e3,
        "dur": (stop - start) / 1e3,
        "pid": _PID,
        "tid": tid,
        "args": {} if event.layer is None else {"layer": event.layer},
    }


class TimelineWriter:
    """Keeps the latest timelines as files NNNNNN-<rid>.json of a directory; for any thread.

    Raises:
        OSError: the directory is missing and cannot be made.
    """

    def __init__(self, directory: Path, max_files: int = 1000) -> None:
        if max_files < 1:
            raise ValueError(f"max_files must be at least 1, not {max_files}")
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._max_files = max_files
        self._lock = threading.Lock()

    def write(self, timeline: RequestTimeline) -> Path | None:
        """Write `timeline` to a file; returns its path, or None if that failed, with a warning."""
        text = json.dumps(timeline.chrome_trace())
        with self._lock:
            try:
                return self._write(text, timeline.rid)
            except OSError as error:
                logger.warning("The timeline of request %r was not kept: %s", timeline.rid, error)
                return None

    def _write(self, text: str, rid: str) -> Path:
        kept = self._numbered()
        number = kept[-1][0] + 1 if kept else 1
        safe = re.sub(r"[^A-Za-z0-9_-]", "_", rid)[:_MAX_RID_CHARS] or "_"
        path = self._directory / f"{number:06d}-{safe}.json"
        # Processes that share the directory must not share a temporary file.
        temporary = self._directory / f".{path.name}.{os.getpid()}.tmp"
        try:
            temporary.write_text(text, encoding="ascii")
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        excess = max(len(kept) + 1 - self._max_files, 0)
        self._remove([old for _, old in kept[:excess]])
        return path

    def _numbered(self) -> list[tuple[int, Path]]:
        """Numbers and files of earlier timelines, oldest first."""
        names = ((_FILE_NAME.fullmatch(name), name) for name in os.listdir(self._directory))
        return sorted((int(match[1]), self._directory / name) for match, name in names if match)

    def _remove(self, paths: list[Path]) -> None:
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("The old timeline %s was not removed: %s", path, error)
