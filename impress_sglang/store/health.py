"""State machine of the disk and of suspect segments; does no I/O.

    the disk     ok ── a write fails ──► read-only ── a read fails ──► degraded
                  ▲──────────── a probe finds that it answers again ───────┘
    a segment    ready ── it could not be read ──► suspect ── a look decides ──► ready, or lost

A block that cannot be read now, or was read wrong once, need not be damaged. So the whole segment
is read again in the background (a look), and again after a pause that doubles as long as it cannot
be read at all.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from impress_sglang.store.stored import SegmentState, StoredSegment

logger = logging.getLogger(__name__)

# Pauses between probes of a disk that fails.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
# Pauses between looks at a suspect.
FIRST_LOOK_S, LONGEST_LOOK_S = 1.0, 600.0
# Seconds between two measurements of the free space.
MEASURE_S = 1.0


class Verdict(enum.Enum):
    """Result of a second look at a segment."""

    GOOD = "good"
    BAD = "bad"
    """It is damaged, or never readable, and is in quarantine now."""
    GONE = "gone"
    UNCLEAR = "unclear"
    """It cannot be read now."""


class DiskTask(enum.Enum):
    """Work on the disk; results are passed to `on_measured` and `on_probed`."""

    MEASURE = "measure the free space"
    PROBE = "probe a disk that failed"


@dataclasses.dataclass(eq=False, slots=True)
class Suspect:
    """A segment that could not be read; its next look is due at `look_at`, see `on_looked`."""

    segment: StoredSegment
    look_at: float
    pause: float
    looking: bool = False


class Health:
    """State of the disk: `ok`, `read-only` (nothing is stored) or `degraded` (nothing is read or
    stored).

    Thread: any for `report_failure`, otherwise the store's.
    """

    def __init__(
        self, patience: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`patience`: seconds after which an unfinished measurement is a failure."""
        self._patience, self._clock = patience, clock
        self._lock = threading.Lock()
        self.readable = self.writable = True
        """Whether prefixes may be matched and loaded, and whether prefixes may be stored."""
        self._since, self._probe_at = -math.inf, 0.0
        self._pause = FIRST_PAUSE_S
        self._failures = self._recoveries = 0
        self._last_failure = ""
        self._probing = self._measuring = False
        self._measured_at = clock()
        self.free_bytes = 0
        """Bytes that may be written to the file system; an estimate between measurements."""
        self.suspects: dict[StoredSegment, Suspect] = {}
        """Suspects of the tree: the caller removes a segment here when it is lost."""

    @property
    def state(self) -> str:
        return "degraded" if not self.readable else "ok" if self.writable else "read-only"

    def report_failure(self, what: str, error: BaseException, *, reading: bool) -> None:
        """Report a failure; `reading`: because of it, stored prefixes cannot be used either."""
        with self._lock:
            self._failures += 1
            self._last_failure = f"{what}: {error}"
            changes_state = self.writable or (self.readable and reading)
            if self.writable:
                # The pause doubles for a disk that fails again soon after its recovery.
                recovered = self._clock() - self._since > 2 * self._pause
                self._pause = FIRST_PAUSE_S if recovered else min(2 * self._pause, LONGEST_PAUSE_S)
                self._since = self._clock()
                self._probe_at = self._since + self._pause
            self.readable, self.writable = self.readable and not reading, False
        if changes_state:
            stops = "nothing is read or stored" if reading else "nothing is stored"
            message = "the SSD store is %s: %s (%s); %s until it answers again"
            logger.warning(message, self.state, what, error, stops)

    def suspect(self, segment: StoredSegment) -> None:
        """Stop using a segment that could not be read until a look finds it good."""
        assert segment.ready
        segment.state = SegmentState.SUSPECT
        self.suspects[segment] = Suspect(segment, self._clock(), FIRST_LOOK_S)

    def due(self) -> Iterator[DiskTask | Suspect]:
        """Yield the tasks and looks to start now, each only once until its result is known.

        While the disk fails it is probed, and there are no looks until it can be read.
        """
        now = self._clock()
        if self._measuring and self.readable and now - self._measured_at > self._patience:
            self._not_measured(TimeoutError(f"no answer for {self._patience:g} s"))
        if not self._probing and not self.writable and now >= self._probe_at:
            self._probing = True
            yield DiskTask.PROBE
        if not (self._probing or self._measuring) and now - self._measured_at > MEASURE_S:
            self._measuring, self._measured_at = True, now
            yield DiskTask.MEASURE
        for suspect in self.suspects.values() if self.readable else ():
            if not suspect.looking and now >= suspect.look_at:
                suspect.looking = True
                yield suspect

    def on_measured(self, result: int | BaseException) -> None:
        """Take the free bytes, or the error of their measurement."""
        self._measuring = False
        if isinstance(result, BaseException):
            self._not_measured(result)
        else:
            self.free_bytes = result

    def _not_measured(self, error: BaseException) -> None:
        self.report_failure("the free space cannot be measured", error, reading=True)

    def on_probed(self, error: BaseException | None, *, readable: bool) -> None:
        """Take the result of a probe; `error` is None if the disk can be read and written."""
        self._probing = False
        if readable and not self.readable:
            for suspect in self.suspects.values():
                suspect.look_at, suspect.pause = self._clock(), FIRST_LOOK_S
        with self._lock:
            self.readable = self.readable or readable
            if error is not None:
                self._last_failure = f"a probe: {error}"
                self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
                self._probe_at = self._clock() + self._pause
                return
            self.writable = True
            self._recoveries += 1
            seconds, self._since = self._clock() - self._since, self._clock()
        logger.warning("the SSD store answers again after %.1f s", seconds)

    def on_looked(self, suspect: Suspect, verdict: Verdict) -> bool:
        """Take the verdict of a look; returns whether it is final, for a segment of the tree.

        A good segment is ready again. The caller handles bad and missing segments.
        """
        if self.suspects.get(suspect.segment) is not suspect:
            return False
        if verdict is Verdict.UNCLEAR:
            suspect.looking, suspect.look_at = False, self._clock() + suspect.pause
            suspect.pause = min(2 * suspect.pause, LONGEST_LOOK_S)
            return False
        del self.suspects[suspect.segment]
        if verdict is Verdict.GOOD:
            suspect.segment.state = SegmentState.READY
        return True

    def summary(self) -> dict[str, Any]:
        with self._lock:
            return {
                "state": self.state,
                "failures": self._failures,
                "recoveries": self._recoveries,
                "last_failure": self._last_failure,
            }
