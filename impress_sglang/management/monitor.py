"""Asks the disk now and then for its free space, and after a failure whether it answers again.

Nobody waits for the answers. If none comes within `patience` seconds, that is a failure, too.
"""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import Future

from impress_sglang.storage.directory import StoreDirectory, segment_files
from impress_sglang.storage.health import Health
from impress_sglang.threads import BackgroundThread

# How old, in seconds, the measured free space that decisions rest on may be.
MEASURE_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What a probe found: the names of the finished segments, or why there are none.

    `error` with `segments`: reading works, writing does not.
    """

    segments: frozenset[str] | None = None
    error: Exception | None = None


class Monitor:
    """Measures free space and probes the disk; owned by the store's thread."""

    def __init__(self, directory: StoreDirectory, health: Health, patience: float) -> None:
        """Measure the free space once.

        Raises:
            OSError: that cannot be done.
        """
        self._directory = directory
        self._health = health
        self._patience = patience
        self.free_bytes = self._measure()
        """Bytes that may still be written to the file system, as of the last measurement."""
        self._thread = BackgroundThread("impress-probe")
        self._measured_at = time.monotonic()
        self._measuring: Future[int] | None = None
        self._probing: Future[Answer] | None = None

    def poll(self) -> Answer | None:
        """Start what is due; returns the answer to a probe after a failure, when there is one."""
        if self._probing is not None:
            return self._take_answer()
        if self._health.probe_is_due:
            self._probing = self._thread.submit(self._probe)
        elif self._measuring is not None:
            self._take_measurement(self._measuring)
        elif time.monotonic() - self._measured_at > MEASURE_SECONDS:
            self._measured_at = time.monotonic()
            self._measuring = self._thread.submit(self._measure)
        return None

    def close(self, seconds: float) -> None:
        """End the thread, unless that takes longer than `seconds`."""
        self._thread.close(seconds)

    def _measure(self) -> int:
        return self._directory.files.free_bytes(self._directory.path)

    def _take_measurement(self, measuring: Future[int]) -> None:
        if not measuring.done():
            if self._health.readable and time.monotonic() - self._measured_at > self._patience:
                late = TimeoutError(f"no answer for {self._patience:g} s")
                self._health.failed("the free space cannot be measured", late, reading=True)
            return
        self._measuring = None
        if (error := measuring.exception()) is None:
            self.free_bytes = measuring.result()
        else:
            self._health.failed("the free space cannot be measured", error, reading=True)

    def _take_answer(self) -> Answer | None:
        assert self._probing is not None
        if not self._probing.done():
            return None
        answer, self._probing = self._probing.result(), None
        return answer

    def _probe(self) -> Answer:
        directory = self._directory
        try:
            try:
                directory.check_readable()
            except FileNotFoundError:
                directory.restore()
            found = segment_files(directory.files, directory.path)
            names = frozenset(name for name, _, finished in found if finished)
        except Exception as error:
            return Answer(error=error)
        try:
            directory.check_writable()
        except Exception as error:
            return Answer(names, error)
        return Answer(names)
