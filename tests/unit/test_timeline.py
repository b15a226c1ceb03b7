"""A request's timeline: its times add up, its files are kept in bounds and read back."""

from __future__ import annotations

import json
import logging
import os
import timeit
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from impress_sglang import timeline as timeline_module
from impress_sglang.timeline import (
    ATTENTION,
    COPY,
    NO_TIMELINE,
    PLAN,
    REQUEST_TRACK,
    REST,
    SELECT,
    SSD_READ,
    STAGES,
    RequestTimeline,
    Timeline,
    TimelineWriter,
)
from tests.unit.waiting import Clock


class Milliseconds(Clock):
    def pass_ms(self, ms: float) -> None:
        self.now += ms / 1e3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Milliseconds:
    clock = Milliseconds()
    monkeypatch.setattr(timeline_module, "perf_counter", clock)
    return clock


def spend(timeline: Timeline, clock: Milliseconds, stage: str, ms: float, layer: int = 0) -> None:
    with timeline.span(stage, layer):
        clock.pass_ms(ms)


def request(clock: Milliseconds, rid: str = "r") -> RequestTimeline:
    """14 ms: select 4 with plan 2 inside, layer 0; copy 5, layer 1; rest 3. The SSD works on."""
    timeline = RequestTimeline(rid)
    clock.pass_ms(1)
    with timeline.span(SELECT, 0):
        clock.pass_ms(3)
        spend(timeline, clock, PLAN, 2)
        clock.pass_ms(1)
    timeline.add("SSD", "chunk", clock.now, clock.now + 0.004, 1)
    spend(timeline, clock, COPY, 5, layer=1)
    clock.pass_ms(2)
    timeline.finish()
    return timeline


def assert_totals(timeline: RequestTimeline, **expected: float) -> None:
    totals = timeline.totals()
    nonzero = {name: ms for name, ms in totals.items() if ms}
    assert nonzero == pytest.approx(expected, abs=1e-5)
    assert sum(totals.values()) == pytest.approx(timeline.duration_ms, abs=1e-9)
    assert set(totals) >= {*STAGES, REST}


def complete_events(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def thread_names(trace: dict[str, Any]) -> dict[int, str]:
    return {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }


def test_the_null_timeline_is_free() -> None:
    assert not NO_TIMELINE.enabled
    assert NO_TIMELINE.span(COPY, 0) is NO_TIMELINE.span(PLAN, 1)
    NO_TIMELINE.add("SSD", "chunk", 0.0, 1.0)

    def spans() -> None:
        for layer in range(1000):
            with NO_TIMELINE.span(COPY, layer):
                pass

    assert min(timeit.repeat(spans, number=10, repeat=20)) / 10_000 < 1e-6


def test_a_span_excludes_all_that_is_inside_of_it(clock: Milliseconds) -> None:
    timeline = RequestTimeline("r")
    with timeline.span(ATTENTION, 0):
        clock.pass_ms(1)
        with timeline.span(SELECT, 0):
            clock.pass_ms(2)
            spend(timeline, clock, SSD_READ, 4)
            spend(timeline, clock, SSD_READ, 8)
        with timeline.span(ATTENTION, 0):
            clock.pass_ms(16)
        clock.pass_ms(32)
    timeline.finish()

    assert_totals(timeline, **{ATTENTION: 49, SELECT: 2, SSD_READ: 12})


def test_an_inner_span_wins_where_the_clock_does_not_tell_them_apart(clock: Milliseconds) -> None:
    timeline = RequestTimeline("r")
    with timeline.span(SELECT, 0), timeline.span(PLAN, 0), timeline.span(COPY, 0):
        clock.pass_ms(3)
    timeline.finish()

    assert_totals(timeline, **{COPY: 3})
    assert [event["name"] for event in complete_events(timeline.chrome_trace())] == [
        SELECT,
        PLAN,
        COPY,
    ]


def test_an_exception_passes_and_its_spans_are_counted(clock: Milliseconds) -> None:
    timeline = RequestTimeline("r")
    with pytest.raises(RuntimeError, match="lost"), timeline.span(SELECT, 0):
        clock.pass_ms(1)
        with timeline.span(PLAN, 0):
            clock.pass_ms(2)
            raise RuntimeError("lost")
    spend(timeline, clock, SELECT, 4)
    clock.pass_ms(8)
    timeline.finish()

    assert_totals(timeline, **{SELECT: 5, PLAN: 2, REST: 8})


def test_what_lies_outside_of_the_request_is_not_counted(clock: Milliseconds) -> None:
    """As of a span that is open when the request is aborted. Overlap is not counted twice."""
    timeline = RequestTimeline("r")
    timeline.add(REQUEST_TRACK, "gone", clock.now - 5, clock.now - 4)
    timeline.add(REQUEST_TRACK, "queue", clock.now - 5, clock.now + 0.002)
    timeline.add(REQUEST_TRACK, "wait", clock.now + 0.001, clock.now + 0.004)
    clock.pass_ms(5)
    with timeline.span(COPY, 0):
        clock.pass_ms(3)
        timeline.finish()
        clock.pass_ms(10)
    spend(timeline, clock, PLAN, 1)

    assert_totals(timeline, **{"queue": 1, "wait": 3, COPY: 3, REST: 1})


def test_the_first_finish_counts(clock: Milliseconds) -> None:
    timeline = RequestTimeline("r")
    clock.pass_ms(2)
    assert timeline.duration_ms == pytest.approx(2)
    clock.pass_ms(1)
    timeline.finish()
    clock.pass_ms(4)
    timeline.finish()

    assert_totals(timeline, rest=3)


def test_the_trace_has_the_fields_of_the_format(clock: Milliseconds) -> None:
    trace = json.loads(json.dumps(request(clock, "my rid").chrome_trace(), allow_nan=False))

    assert trace["displayTimeUnit"] == "ms"
    processes = [e for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert [e["args"] for e in processes] == [{"name": "my rid"}]
    assert sorted(thread_names(trace).values()) == ["SSD", REQUEST_TRACK]
    assert {e["ph"] for e in trace["traceEvents"]} == {"M", "X"}
    assert len({e["pid"] for e in trace["traceEvents"]}) == 1

    names = thread_names(trace)
    events = {
        (names[e["tid"]], e["name"]): (e["ts"], e["dur"], e["args"]) for e in complete_events(trace)
    }
    assert events == {
        (REQUEST_TRACK, SELECT): (pytest.approx(1000), pytest.approx(6000), {"layer": 0}),
        (REQUEST_TRACK, PLAN): (pytest.approx(4000), pytest.approx(2000), {"layer": 0}),
        (REQUEST_TRACK, COPY): (pytest.approx(7000), pytest.approx(5000), {"layer": 1}),
        ("SSD", "chunk"): (pytest.approx(7000), pytest.approx(4000), {"layer": 1}),
    }
    assert all(e["cat"] == e["name"] for e in complete_events(trace))


def test_events_of_one_thread_do_not_overlap(clock: Milliseconds) -> None:
    """Viewers drop those that do; reads in flight overlap, or lie within each other."""
    timeline, t = RequestTimeline("r"), clock.now
    for start, stop in [(3, 5), (0, 4), (1, 2), (2, 6), (6, 7)]:
        timeline.add("SSD", "chunk", t + start, t + stop)
    trace = timeline.chrome_trace()

    by_thread: dict[int, list[tuple[float, float]]] = {}
    for event in complete_events(trace):
        by_thread.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, by_thread.values())) == 5
    for rows in by_thread.values():
        rows.sort()
        assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(rows))
    names = [thread_names(trace)[tid] for tid in sorted(by_thread)]
    assert names == ["SSD", "SSD (2)", "SSD (3)"]


def test_the_trace_has_no_negative_times_and_no_layer_where_none_was_given(
    clock: Milliseconds,
) -> None:
    timeline, t = RequestTimeline("r"), clock.now
    timeline.add("SSD", "early", t - 1, t + 1)
    timeline.add("SSD", "gone", t - 3, t - 2)
    timeline.add("SSD", "backwards", t + 5, t + 4)

    events = {e["name"]: e for e in complete_events(timeline.chrome_trace())}
    assert (events["early"]["ts"], events["early"]["dur"]) == (0, pytest.approx(1e6))
    assert (events["gone"]["ts"], events["gone"]["dur"]) == (0, 0)
    assert events["backwards"]["dur"] == 0
    assert events["early"]["args"] == {}


def names_in(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_writer_numbers_on_from_what_is_there(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "timelines"
    writer = TimelineWriter(directory)
    first = writer.write(RequestTimeline("a"))
    assert first == directory / "000001-a.json"
    writer.write(RequestTimeline("b"))
    (directory / "000041-x.json").touch()
    (directory / "000099-x.txt").touch()
    (directory / "000077-x y.json").touch()

    assert TimelineWriter(directory).write(RequestTimeline("c")) == directory / "000042-c.json"
    assert first.exists()


@pytest.mark.parametrize(
    ("rid", "part"),
    [
        ("chat-1_A", "chat-1_A"),
        ("../../etc/pass wd", "______etc_pass_wd"),
        ("é\n\ud800\0", "____"),
        ("x" * 300, "x" * 60),
        ("", "_"),
    ],
)
def test_any_rid_gives_a_file_of_the_directory(tmp_path: Path, rid: str, part: str) -> None:
    path = TimelineWriter(tmp_path).write(RequestTimeline(rid))

    assert path == tmp_path / f"000001-{part}.json"
    assert names_in(tmp_path) == [path.name]
    assert json.loads(path.read_text())["otherData"]["rid"] == rid


def test_writer_removes_the_oldest_of_its_own_files(tmp_path: Path) -> None:
    others = [
        "000000-notes.md",
        "a.json",
        "00001-short.json",
        "000001-x y.json",
        "000001-a.json.bak",
    ]
    for name in others:
        (tmp_path / name).touch()
    writer = TimelineWriter(tmp_path, max_files=3)
    for rid in "abcde":
        assert writer.write(RequestTimeline(rid))
    assert names_in(tmp_path) == sorted(
        [*others, "000003-c.json", "000004-d.json", "000005-e.json"]
    )

    TimelineWriter(tmp_path, max_files=1).write(RequestTimeline("f"))
    assert names_in(tmp_path) == sorted([*others, "000006-f.json"])


@pytest.mark.parametrize("step", ["write_text", "replace"])
def test_a_full_disk_is_a_warning_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    writer = TimelineWriter(tmp_path, max_files=1)
    kept = writer.write(RequestTimeline("kept"))
    assert kept is not None

    def full(path: Path, *args: object, **kwargs: object) -> None:
        path.write_bytes(b'{"tra')
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Path, step, full)
        assert writer.write(RequestTimeline("lost")) is None
    assert "No space left" in caplog.text and "lost" in caplog.text
    assert names_in(tmp_path) == [kept.name]
    assert writer.write(RequestTimeline("next")) == tmp_path / "000002-next.json"


def test_a_file_that_cannot_be_removed_does_not_lose_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = TimelineWriter(tmp_path, max_files=1)
    writer.write(RequestTimeline("old"))

    def denied(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", denied)
    assert writer.write(RequestTimeline("new")) == tmp_path / "000002-new.json"
    assert "000001-old.json" in caplog.text


def test_threads_write_at_the_same_time(tmp_path: Path) -> None:
    writer = TimelineWriter(tmp_path, max_files=15)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: writer.write(RequestTimeline("r")), range(20)))

    assert names_in(tmp_path) == [f"{n:06d}-r.json" for n in range(6, 21)]
