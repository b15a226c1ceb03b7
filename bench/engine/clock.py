"""Where the time of a request goes, on the device's clock."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from impress_sglang.transfer.loader import LoadStats
from impress_sglang.transfer.read_planner import ReadStats

# Projections, norms and the feed-forward network; attention; what fills its rows; all else.
MODEL, ATTENTION, LOAD, REST = STAGES = ("model", "attention", "load", "rest")


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """A request that was answered; `reads` and `loads` only with a stored prefix.

    `logits` [vocabulary] of the first token, on the device. `estimated_ms` is what loading was
    estimated to take, None before anything was known.
    """

    ttft_ms: float
    stage_ms: dict[str, float]
    logits: Tensor
    reads: ReadStats | None = None
    loads: LoadStats | None = None
    estimated_ms: float | None = None


class StageClock:
    """Times the stages of one request, which begins now; the device is idle then, and at the end.

    On an accelerator's clock a stage lasts from when the device has done all before it until it has
    done the stage, waiting for the host included: of a read it is what is not hidden behind earlier
    computing. (On the host's clock a stage would end when it is queued.)
    """

    def __init__(self, mark: Callable[[], Any], between: Callable[[Any, Any], float]) -> None:
        """`mark` takes a moment of the device's clock, `between` gives the ms between two."""
        self._mark = mark
        self._between = between
        self._marks: list[tuple[str, Any, Any]] = []
        self._began = time.perf_counter()
        self.duration_ms = 0.0
        """Set by `finish`."""

    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        """Count the block for a stage; spans are not nested."""
        start = self._mark()
        try:
            yield
        finally:
            self._marks.append((stage, start, self._mark()))

    def finish(self) -> dict[str, float]:
        """End the request; milliseconds by stage, which sum to its duration."""
        self.duration_ms = (time.perf_counter() - self._began) * 1e3
        found = dict.fromkeys(STAGES, 0.0)
        for stage, start, stop in self._marks:
            found[stage] += self._between(start, stop)
        found[REST] = self.duration_ms - sum(found.values())
        return found


def stage_clock(device: torch.device) -> StageClock:
    """The clock for a request on a device: of its own where it works by itself."""
    if device.type != "cuda":
        return StageClock(time.perf_counter, lambda start, stop: (stop - start) * 1e3)
    # What is copied beside computing, on another stream, is a part of no stage.
    stream = torch.cuda.current_stream(device)
    return StageClock(
        lambda: stream.record_event(torch.cuda.Event(enable_timing=True)),
        lambda start, stop: start.elapsed_time(stop),
    )
