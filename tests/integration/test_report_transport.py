"""What reports say, and what is learnt of them; `tests/serving/test_reports.py` has answers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from impress_sglang.cost import RequestLengths
from impress_sglang.paper.plugin.part_cache import PartCache
from impress_sglang.plugin import report_transport
from impress_sglang.plugin.request_tracker import RequestTracker
from impress_sglang.serving.report import RecentRequests, new_report
from impress_sglang.serving.why import Reason
from tests.integration.worlds import STORED, World


def test_sglang_asks_for_reports(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the streamer of a server that has our tree cache, and no other."""
    monkeypatch.setattr(SchedulerOutputStreamer, "has_additional_customized_info", False)
    monkeypatch.setattr(report_transport, "_policy", None)
    build: Callable[..., Any] = SchedulerOutputStreamer.build_additional_customized_info
    assert build(SimpleNamespace(tree_cache=None), []) == {}
    report_transport.opt_in("impress")
    assert SchedulerOutputStreamer.has_additional_customized_info
    req = world.request("r", STORED)
    assert build(SimpleNamespace(tree_cache=world.cache), [req]) == {"impress": [None]}
    req.finished_reason = object()
    ((report,),) = build(SimpleNamespace(tree_cache=world.cache), [req]).values()
    assert report["why"]["reason"] == Reason.NOT_ADMITTED and report["path"] is None
    assert not any(report["tokens"].values()) and not report["prefix_tokens"]
    world.abort(req)


class Learning:
    """Stands in for a service and its costs: notes what is learnt of requests and loads."""

    def __init__(self) -> None:
        self.recent, self.estimator, self.loading = RecentRequests(), self, self
        self.opened = None
        self.requests: list[Any] = []
        self.loads: list[Any] = []

    def count(self, report: Any) -> None: ...

    def observe_request(self, *told: Any) -> None:
        self.requests.append(told)

    def observe(self, work: RequestLengths, seconds: float, *, whole: bool) -> None:
        self.loads.append((work, round(seconds, 6), whole))


def ended(policy: str, told: dict[str, Any], queued: float = 0.0, gated: float = 0.0) -> Any:
    """A request of 20 tokens, whose pass took 0.1 s."""
    times = SimpleNamespace(
        queue_duration_s=queued, forward_entry_time=7.0, prefill_finished_time=7.1
    )
    req = SimpleNamespace(
        rid="r", time_stats=times, origin_input_ids=[*range(20)], retraction_count=0
    )
    report, disturbed = new_report(policy, 0, 20) | told, "failed" in told
    return SimpleNamespace(
        req=req, report=report, namespace="", layer_wait_seconds=gated, timing_invalid=disturbed
    )


@pytest.mark.parametrize(
    ("queued", "load_ms", "gated", "split"),
    [
        (0.5, 200.0, 0.0, (300, 200, 100)),
        # A pass that has begun waits for the last layers.
        (0.5, 540.0, 0.04, (0, 540, 60)),
        # Threads load at the same time as others, for longer than anybody waits.
        (0.5, 900.0, 0.04, (0, 540, 60)),
        (0.0, 0.0, 0.0, (0, 0, 100)),
    ],
)
def test_times_of_a_request_add_up_where_its_prefix_is_loaded_while_it_waits(
    queued: float, load_ms: float, gated: float, split: tuple[int, int, int]
) -> None:
    service = Learning()
    requests: Any = SimpleNamespace(service=service)
    RequestTracker.count(requests, ended("impress", {"load_ms": load_ms}, queued, gated))
    (row,) = service.recent.since_number(0)
    assert (row["waited_ms"], row["loading_ms"], row["computing_ms"]) == split
    assert service.requests == [(0, 20, pytest.approx(0.1 - gated))]


PART = {
    "prefix_tokens": 15,
    "used_tokens": 8,
    "resident_tokens": 2,
    "stored_tokens": 13,
    "loaded_tokens": 6,
    "probe_ms": 20.0,
    "load_ms": 30.0,
    "wait_ms": 10.0,
}


@pytest.mark.parametrize(
    ("told", "request_took", "load_took"),
    [
        ({}, (0, 20, 0.1), None),
        (PART, (8, 5, 0.05), (RequestLengths(2, 13, 5), 0.04, False)),
        (
            PART | {"loaded_tokens": 13, "used_tokens": 15},
            (15, 5, 0.05),
            (RequestLengths(2, 13, 5), 0.04, True),
        ),
        (PART | {"failed": True}, None, None),
        (PART | {"load_ms": 900.0}, None, None),
    ],
    ids=["computed", "a part", "a whole", "unreadable", "nothing but loading"],
)
def test_what_a_pass_took_is_learnt_apart_from_what_it_loaded(
    told: dict[str, Any], request_took: tuple[float, ...] | None, load_took: Any
) -> None:
    service, cache = Learning(), object.__new__(PartCache)
    requests: Any = SimpleNamespace(service=service)
    requests.count = functools.partial(RequestTracker.count, requests)
    rest = {"_tracked": {}, "_requests": requests, "_saves": SimpleNamespace(end=id)}
    vars(cache).update(service=service, **rest)
    cache._forget(ended("paper", told))
    assert service.requests == ([] if request_took is None else [pytest.approx(request_took)])
    assert service.loads == ([] if load_took is None else [load_took])
