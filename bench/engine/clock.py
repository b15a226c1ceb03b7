"""Where the time of a request goes, on the device's clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from impress_sglang.timeline import REQUEST_TRACK, RequestTimeline
from impress_sglang.transfer.loader import LoadStats
from impress_sglang.transfer.read_planner import ReadStats

# Projections, norms and the feed-forward network: a stage beside those of `timeline`.
MODEL = "model"


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


class EventTimeline(RequestTimeline):
    """Stages of a request by the time at which an accelerator passes their bounds.

    On the host's clock a stage ends when it is queued, and whoever waits next gets its time. Here a
    stage lasts from when the device has done all before it until it has done the stage, waiting for
    the host included: of a read it is what is not hidden behind earlier computing. The device must
    be idle when a timeline begins, and when it ends.
    """

    def __init__(self, rid: str, record: Callable[[], Any]) -> None:
        """`record` puts an event with a time on the stream on which the model runs."""
        super().__init__(rid)
        self._record = record
        self._marks: list[tuple[str, int, Any, Any]] = []
        self._origin = record()

    @contextmanager
    def span(self, stage: str, layer: int) -> Iterator[None]:
        """See `Timeline.span`."""
        start = self._record()
        try:
            yield
        finally:
            self._marks.append((stage, layer, start, self._record()))

    def finish(self) -> None:
        """See `RequestTimeline.finish`."""
        super().finish()
        for stage, layer, *marks in self._marks:
            start, stop = (self._began + self._origin.elapsed_time(mark) / 1e3 for mark in marks)
            self.add(REQUEST_TRACK, stage, start, stop, layer)
        self._marks.clear()


def stage_clock(rid: str, device: torch.device) -> RequestTimeline:
    """The clock for requests on a device: of its own where it works by itself."""
    if device.type != "cuda":
        return RequestTimeline(rid)
    # What is copied beside computing, on another stream, is a part of no stage.
    stream = torch.cuda.current_stream(device)
    return EventTimeline(rid, lambda: stream.record_event(torch.cuda.Event(enable_timing=True)))
