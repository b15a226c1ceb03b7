"""Benchmarks that drive a server, without one: traces, sessions, traffic, and their rows."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.core.data import Question
from bench.core.report import Table
from bench.core.servers import Piece
from bench.core.session import BenchFailed
from bench.policies import serving
from bench.policies.serving import counted
from bench.policies.trace import MAX_QUESTION_TOKENS, Trace, make_trace
from bench.traffic import systems, trace
from bench.traffic.sessions import Scale, Session, read_sessions
from impress_sglang.config import POLICIES as ALL_POLICIES
from impress_sglang.config import ImpressConfig
from impress_sglang.serving.report import RequestTotals


def make(seed: int = 3) -> Trace:
    numbers: dict[str, int] = {}

    def tokenize(text: str) -> list[int]:
        return [numbers.setdefault(word, len(numbers)) for word in re.findall(r"\w+|\W", text)]

    questions = [Question(f"What is a {i}?", (f"it is {i}",), 0) for i in range(400)]
    sizes = {"prefixes": 6, "prefix_tokens": 300, "sigma": 1.5}
    counts = {"warmup": 5, "settle": 2, "requests": 20}
    args = argparse.Namespace(**sizes, **counts, seed=seed)
    return make_trace({"made": questions}, tokenize, args)


def test_a_request_is_a_prefix_and_a_question_that_no_prefix_shows() -> None:
    trace = make()
    assert trace == make() and trace.prefixes != make(seed=4).prefixes
    asked = set()
    for request in (*trace.warmup, *trace.settle, *trace.measured):
        (prefix,) = (prefix for prefix in trace.prefixes if request[: len(prefix)] == prefix)
        question = request[len(prefix) :]
        assert 0 < len(question) <= MAX_QUESTION_TOKENS and question not in asked
        asked.add(question)
        for other in trace.prefixes:
            places = range(len(other) - len(question))
            assert all(other[i : i + len(question)] != question for i in places)


@pytest.mark.parametrize("name", [*serving.POLICIES, "impress+lru", "impress+lfu"])
def test_flags_of_a_policy_are_options_of_the_server(name: str) -> None:
    flags = serving.policy_flags(name, Path("kv"), 0.25, (70, 104))
    options = dict(flag.removeprefix("--impress-").split("=") for flag in flags[1:])
    fields = {field.name for field in dataclasses.fields(ImpressConfig)}
    assert {key.replace("-", "_") for key in options} <= fields
    assert options["policy"] in ALL_POLICIES
    if name != "recompute":
        assert options["retention"] == ("1.0" if name == "as" or name[0] == "i" else "0.25")
        assert float(options["device-gb"]) == 0.07 and options["load"] == "always"
    kinds = {"pap": "paper", "imp": "codes"}
    assert serving.store_kind(name) == kinds.get(name[:3], "exact")


def stats(**totals: float) -> dict[str, Any]:
    return {"totals": RequestTotals() | totals}


def test_a_row_has_what_was_counted_in_between() -> None:
    before = stats(requests=3, ssd_bytes=100)
    loads = {"requests_ssd": 1, "ssd_bytes": 400, "device_chunks": 3, "chunks_accessed": 4}
    after = stats(requests=5, wait_ms=30, **loads)
    row = serving.make_row("as", [100.0, 200.0], counted(before, after, 2))
    assert (row["ttft_ms_mean"], row["io_share"], row["ssd_bytes"]) == (150.0, 0.1, 300)
    assert (row["device_hit_ratio"], row["important_device_hit_ratio"]) == (0.75, None)
    assert (row["requests"], row["requests_ssd"]) == (2, 1)
    with pytest.raises(BenchFailed, match="counted 2 requests, not 3"):
        counted(before, after, 3)
    fast = {**row, "policy": "impress", "ttft_ms_mean": 50.0}
    serving.add_speedups([row, fast])
    assert (row["speedup_over_best_baseline"], fast["speedup_over_best_baseline"]) == (1.0, 3.0)
    assert " 3.0 " in str(Table([row, fast], serving.COLUMNS)).splitlines()[-1]


TEXT = list(range(1000, 6000))


def agents(folder: Path, *sessions: Sequence[dict[str, Any]]) -> list[Session]:
    for number, requests in enumerate(sessions):
        session = {"block_size": 64, "requests": requests}
        (folder / f"{number}.json").write_text(json.dumps(session))
    return read_sessions(folder)


def scale(seed: int = 1) -> Scale:
    return Scale(TEXT, divide=16, hurry=10.0, longest=3.0, seed=seed)


FIRST = {"t": 0.0, "in": 200, "out": 100, "hash_ids": [1, 2, 3]}
SECOND = {"t": 20.0, "in": 330, "out": 8, "hash_ids": [1, 2, 3, 4, 5], "api_time": 4.0}


def test_blocks_of_agents_are_those_of_their_session(tmp_path: Path) -> None:
    other = {"t": 1.0, "type": "no request"}
    session, another = agents(tmp_path, [FIRST, other, SECOND], [FIRST])
    first, second = session
    assert (first.think_seconds, second.think_seconds) == (0.0, 16.0)
    assert second.blocks[:3] == first.blocks and not {*first.blocks} & {*another[0].blocks}
    assert scale().working_set([session, another]) == (5 + 3) * 4


def test_a_chat_goes_on_from_the_request_that_it_begins_with(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    chats = [0, 1, 2], [0, 7, 8], [0, 1, 3, 4], [0, 1, 3, 5, 6], [0, 9]
    times = 0, 500, 2500, 4000, 5000
    requests = [
        {"timestamp": at, "input_length": 512 * len(blocks) - 12, "output_length": 9}
        | {"hash_ids": blocks}
        for at, blocks in zip(times, chats, strict=True)
    ]
    path.write_text("\n".join(map(json.dumps, requests)))
    sessions = read_sessions(path)
    assert [[turn.at for turn in turns] for turns in sessions] == [[0.0, 2.5, 4.0], [0.5], [5.0]]
    assert [turn.think_seconds for turn in sessions[0]] == [0.0, 2.5, 1.5]
    assert len(scale().ask(sessions[0][0]).tokens) == (3 * 512 - 12) // 16


def test_equal_blocks_are_equal_text_and_the_end_is_new(tmp_path: Path) -> None:
    third = {**SECOND, "in": 331, "think_time": 90.0}
    (session,) = agents(tmp_path, [FIRST, SECOND, third])
    first, second, third = (scale().ask(turn) for turn in session)
    assert [len(ask.tokens) for ask in (first, second, third)] == [13, 21, 21]
    assert list(second.tokens[:12]) == list(first.tokens[:12])
    # Blocks that follow each other are text that does.
    text = second.tokens[:20]
    assert all(b - a == 1 or b == TEXT[0] for a, b in itertools.pairwise(text))
    assert third.tokens[:20] == second.tokens[:20] and third.tokens[20] != second.tokens[20]
    assert [ask.answer_tokens for ask in (first, second)] == [6, 1]
    assert [ask.pause_seconds for ask in (first, second, third)] == [0.0, 1.6, 3.0]
    assert scale(seed=2).ask(session[0]).tokens != first.tokens


def test_a_session_is_asked_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server that caches all but the last ten tokens, and answers in two pieces."""
    clock, pauses, lengths = itertools.count(1.0), list[float](), list[int]()
    time = SimpleNamespace(perf_counter=clock.__next__, sleep=pauses.append)
    monkeypatch.setattr(trace, "time", time)

    def stream(tokens: list[int], new_tokens: int) -> Iterator[Piece]:
        lengths.append(len(tokens))
        now = next(clock)
        yield Piece(now + 0.5, 1, {})
        yield Piece(now + 0.75, new_tokens, {"cached_tokens": len(tokens) - 10})

    server: Any = SimpleNamespace(stream=stream)
    row = trace.replay(server, agents(tmp_path, [FIRST, SECOND]), scale(), 1)
    assert lengths == [13, 21] and pauses == [0.0, 1.6]
    assert (row["ttft_p50"], row["gap_max"], row["cached"]) == (1500.0, 250.0, 0.4118)


def test_systems_are_compared_request_by_request() -> None:
    """Requests differ by far more than systems do, and both are drawn together."""
    first = [float(ttft) for ttft in range(100, 1000, 9)]
    rows: list[dict[str, Any]] = [
        {"mbps": mbps, "ttfts": ttfts}
        for mbps in (0, 130)
        for ttfts in (first, [1.5 * ttft for ttft in first], [1.5 * ttft for ttft in first[::-1]])
    ]
    systems.compare(rows)
    for base, slower, mixed in (rows[:3], rows[3:]):
        for name in ("p50_ratio", "mean_ratio"):
            assert (base[name], slower[name]) == ("1.00 [1.00, 1.00]", "1.50 [1.50, 1.50]")
            low, high = mixed[name].split(" [")[1].rstrip("]").split(", ")
            assert float(low) < 1.35 and float(high) > 1.65
