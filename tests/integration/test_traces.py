"""What a load adds to SGLang's own trace of a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sglang.srt.observability import trace

from tests.integration.tree_world import TreeWorld

STORED = [*range(40)] * 8


class Tracer:
    """Stands in for OpenTelemetry's, whose SDK is not needed here; it is also each of its spans."""

    def __init__(self, name: str = "") -> None:
        self.name, self.spans = name, list[Tracer]()
        self.events: dict[str, dict[str, Any]] = {}

    def start_span(self, name: str, **_: Any) -> Tracer:
        self.spans.append(Tracer(name))
        return self.spans[-1]

    def add_event(self, name: str, timestamp: int, attributes: dict[str, Any]) -> None:
        self.events[name] = attributes

    def get_span_context(self) -> None: ...
    def set_attributes(self, attributes: dict[str, Any]) -> None: ...
    def end(self, end_time: int) -> None: ...


def test_the_span_of_waiting_says_what_was_loaded_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, tracer = TreeWorld(tmp_path, blend="off"), Tracer()
    world.run("first", [*STORED, 1])
    world.flush()
    monkeypatch.setattr(trace, "opentelemetry_initialized", True)
    monkeypatch.setattr(trace, "tracer", tracer)
    monkeypatch.setattr(trace, "threads_info", {})
    context = trace.TraceReqContext("own", module_name="request")
    context.rebuild_thread_context()

    req = world.request("own", [*STORED, 2])
    req.time_stats.trace_ctx = context
    req.time_stats.set_wait_queue_entry_time()
    world.settle(req)
    world.admit(req)
    req.time_stats.set_forward_entry_time()

    (told,) = [own.events["impress.load"] for own in tracer.spans if own.events]
    assert told["tokens"] == len(STORED) and told["ssd_bytes"] > 0
    assert min(told[name] for name in ("queued_ms", "read_ms", "restored_ms")) >= 0
    assert [own.name for own in tracer.spans if own.events] == ["prefill_waiting"]
    context.abort()
    world.compute(req)
    world.end(req)
    world.close()
