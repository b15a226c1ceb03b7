"""Loads in the midst of other requests: traffic, streams and figures, without SGLang."""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from bench.core.options import parse
from bench.core.report import Row, Table
from bench.core.servers import Server
from bench.core.session import BenchFailed
from bench.core.zygote import ForkedProcess
from bench.traffic import beside, crowd, pressure
from bench.traffic.streams import Stream, describe_gaps, gaps_of, tokens_between

PREFIXES = [list(range(1000, 1000 + length)) for length in pressure.PREFIX_TOKENS]


def args_of(*given: str) -> argparse.Namespace:
    return parse("pressure", "", pressure.OPTIONS, given)


def test_equal_seeds_make_equal_traffic() -> None:
    assert pressure.make_traffic(PREFIXES, 20, 3) == pressure.make_traffic(PREFIXES, 20, 3)
    assert pressure.make_traffic(PREFIXES, 20, 3) != pressure.make_traffic(PREFIXES, 20, 4)


def test_traffic_is_as_described() -> None:
    traffic = pressure.make_traffic(PREFIXES, 4000, 1)
    assert len({asked.name for asked in traffic}) == 4000
    for share, chosen in (
        (0.2, [asked.exact for asked in traffic]),
        (0.2, [asked.abort_after is not None for asked in traffic]),
        (0.5, [asked.tokens[2499] == 3499 for asked in traffic if len(asked.tokens) > 2499]),
    ):
        assert sum(chosen) / len(chosen) > share - 0.03
    cuts = [next(i for i, t in enumerate((*own.tokens, -1)) if t != 1000 + i) for own in traffic]
    for length in (*pressure.PREFIX_TOKENS, pressure.OFTEN_CUT):
        assert length in cuts
    assert min(cuts) >= pressure.SHORTEST_CUT
    assert sum(cut in pressure.PREFIX_TOKENS for cut in cuts) / 4000 == pytest.approx(0.5, abs=0.03)
    assert all(5 <= len(own.tokens) - cut < 60 for own, cut in zip(traffic, cuts, strict=True))
    assert {asked.new_tokens for asked in traffic} == set(range(1, 12))


class Stub:
    """Answers as a server would; a prompt's length says how."""

    def __init__(self, how: dict[int, Any]) -> None:
        self.how = how
        self.exact = set[int]()
        """Lengths of prompts whose prefixes are exact."""
        self.made: list[tuple[int, bool]] = []
        """Lengths of the prompts so far, and whether they asked for exact KVs."""
        self.aborted: list[str] = []
        self.again = False
        self.let_go = threading.Event()

    def request(self, method: str, path: str, **how: Any) -> Any:
        if path == "/abort_request":
            self.aborted.append(how["json"]["rid"])
            self.let_go.set()
        if path != "/generate":
            return None
        length = len(how["json"]["input_ids"])
        answer = self.how[length]
        self.made.append((length, "custom_params" in how["json"]["sampling_params"]))
        if isinstance(answer, Exception):
            raise BenchFailed("no") from answer
        if answer == "abort":
            assert self.let_go.wait(10)
        response = requests.Response()
        output = [7] * (answer + self.again) if isinstance(answer, int) else []
        reason = "length" if isinstance(answer, int) else answer
        told = {"approximate": length not in self.exact}
        meta = {"finish_reason": {"type": reason}, "impress": told}
        body = {"output_ids": output, "meta_info": meta}
        response.json = lambda **_: body  # type: ignore[method-assign]
        return response


def asked(length: int, **more: Any) -> pressure.Asked:
    fields = {"name": f"r{length}", "new_tokens": 1, "exact": False, "abort_after": None, **more}
    return pressure.Asked(tokens=tuple(range(length)), **fields)


def clients_of(stub: Any, *given: str) -> pressure.Clients:
    return pressure.Clients(args_of("--clients=1", *given), stub)


def outcomes(ended: list[pressure.Ended]) -> list[str]:
    return [own.outcome for own in ended]


def test_each_request_ends_in_its_way() -> None:
    stub = Stub({1: 3, 2: "abort", 3: "stop", 4: requests.HTTPError("503")})
    traffic = [asked(1), asked(2, abort_after=0.01), asked(3), asked(4)]
    ended, _ = clients_of(stub).ask_all(traffic)
    assert outcomes(ended) == ["finished", "aborted", "failed", "failed"]
    assert stub.aborted == ["r2"] and ended[0].output == (7, 7, 7)
    row = pressure.describe(ended)
    assert (row["finished"], row["aborted"], row["failed"], row["state"]) == (1, 1, 2, "ok")
    assert "503" in row["told"] and "stop" in row["told"]


def test_an_abort_that_nobody_asked_for_is_a_failure() -> None:
    stub = Stub({2: "abort"})
    stub.let_go.set()
    ended, _ = clients_of(stub).ask_all([asked(2)])
    assert outcomes(ended) == ["failed"]


@pytest.mark.parametrize(
    ("error", "state"), [(requests.ReadTimeout(), "hung"), (requests.ConnectionError(), "died")]
)
def test_nothing_is_asked_of_a_server_that_is_lost(error: Exception, state: str) -> None:
    ended, _ = clients_of(Stub({1: 3, 2: error})).ask_all([asked(1), asked(2), asked(1)])
    assert outcomes(ended) == ["finished", state, "unasked"]
    row = pressure.describe(ended)
    assert (row["state"], row["unasked"]) == (state, 1)


def test_answers_are_compared_with_those_of_requests_alone() -> None:
    """And of the same class: the third had exact KVs without asking for them."""
    stub = Stub({1: 1, 2: 2, 3: 3})
    stub.exact = {2, 3}
    traffic = [asked(1), asked(2, exact=True), asked(3)]
    clients = clients_of(stub, "--sample=3")
    ended, _ = clients.ask_all(traffic)
    pairs = list(zip(traffic, ended, strict=True))
    stub.made.clear()
    assert clients.compare(pairs)["differ"] == 0
    assert stub.made == [(1, False), (2, True), (3, True)]
    stub.again = True
    row = clients.compare(pairs)
    assert (row["differ"], row["differ_exact"], row["compared"]) == (3, 1, 3)


def row_of(seed: int, seconds: float, **more: Any) -> Row:
    counts = dict.fromkeys(("finished", "aborted", "unasked", "failed", "differ", "compared"), 1)
    reads = dict.fromkeys(("read_bytes", "drive_bytes", "loads"))
    return {
        "pool": 1.5,
        "seed": seed,
        "seconds": seconds,
        "slowest_s": 1.0,
        "machine_load": 0.1,
        "state": "ok",
        "told": "",
        **counts,
        **reads,
        **more,
    }


def test_seeds_of_a_pool_are_summed_up() -> None:
    rows = [
        *(row_of(seed, 5.0 * seed) for seed in (1, 2, 3)),
        row_of(4, 300.0, state="hung", told="r1: no answer"),
    ]
    (found,) = pressure.summarize(rows)
    assert (found["ok"], found["seeds"], found["median_s"], found["worst_s"]) == (3, 4, 10.0, 15.0)
    assert any("hung" in note and "no answer" in note for note in pressure.warnings(rows))
    assert "1 of 1" in str(Table(pressure.COLUMNS, rows))


CAME = [(1.0, 1), (1.5, 2), (3.0, 3), (3.25, 5)]


def test_gaps_and_tokens_of_a_stream() -> None:
    assert gaps_of(CAME) == [0.5, 1.5, 0.25]
    assert gaps_of(CAME, 1.5, 3.0) == [1.5]
    assert tokens_between(CAME, 1.0, 3.0) == 2 and tokens_between(CAME, 0.0, 9.0) == 5
    assert describe_gaps([0.5, 1.5, 0.25]) == {
        "longest_ms": 1500.0,
        "second_ms": 500.0,
        "median_ms": 500.0,
    }


class Streaming:
    """Streams pieces, the last ones when told, or fails in their place."""

    def __init__(self, error: BenchFailed | None = None) -> None:
        self.go_on = threading.Event()
        self.error = error

    def stream(self, *_: Any, **__: Any) -> Iterator[tuple[float, int]]:
        yield from CAME[:2]
        assert self.go_on.wait(10)
        if self.error:
            raise self.error
        yield from CAME[2:]


def test_a_stream_can_be_waited_for() -> None:
    server: Any = Streaming()
    stream = Stream(server, [1], 5)
    stream.wait(2)
    assert stream.came[:2] == CAME[:2]
    server.go_on.set()
    stream.join()
    assert (stream.last, stream.gaps(), stream.tokens_between(0, 9)) == (3.25, [0.5, 1.5, 0.25], 5)


def test_a_stream_that_fails_says_so_to_who_waits() -> None:
    server: Any = Streaming(BenchFailed("broken"))
    stream = Stream(server, [1], 5)
    server.go_on.set()
    stream.wait(5)
    with pytest.raises(BenchFailed, match="broken"):
        stream.join()


def test_a_crowd_counts_what_came_in_its_window() -> None:
    answers = [(0.5, CAME), (3.5, [(3.75, 1), (4.5, 2)])]
    loads = [(0.0, 0.75, 1.0), (1.0, 2.0, 0.5), (2.0, 4.0, 1.0), (4.0, 4.25, 0.0)]
    row = crowd.describe(answers, loads, (1.25, 4.0))
    # Four tokens of the first answer and one of the second, in 2.75 s.
    assert row["tokens_per_s"] == round(5 / 2.75, 2)
    assert (row["gap_p50_ms"], row["gap_max_ms"]) == (500.0, 1500.0)
    assert (row["answered_per_s"], row["ttft_max_ms"]) == (round(2 / 2.75, 3), 2000.0)
    assert (row["cached_share"], row["first_p50_ms"]) == (0.75, 250.0)
    assert crowd.describe([], [], (0.0, 1.0))["gap_p99_ms"] is None


def test_a_crowd_asks_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Server:
        pid = os.getpid()

        def stream(self, *_: Any, **__: Any) -> Iterator[tuple[float, int]]:
            for count in (1, 2):
                yield clock(), count

        def generate(self, tokens: list[int], **_: Any) -> dict[str, Any]:
            assert tokens[:3] == [5, 6, 7]
            return {"meta_info": {"cached_tokens": 3}}

    monkeypatch.setattr(crowd, "BEGIN_SECONDS", 0.0)
    clock = crowd.time.perf_counter
    server: Any = Server()
    row = crowd.Crowd(2, 2, 2, [[5, 6, 7]], None, 1).ask(server, 0.2)
    assert row["tokens_per_s"] > 0 and row["answered_per_s"] > 0
    assert row["drive_mb_per_s"] >= 0
    assert row["cached_share"] == round(3 / (3 + crowd.QUESTION_TOKENS), 3)


def test_medians_of_repeats() -> None:
    assert beside.medians([{"x": 1}, {"x": 5}, {"x": 3}]) == {"x": 3}


def test_each_case_has_its_columns() -> None:
    assert set(beside.SHOWN) == set(beside.CASES) == {*beside.MEASURES, "load"}


def test_trouble_in_a_log_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = Server(ForkedProcess(1), 1, log)
    log.write_text("all is well\n" * 50)
    server.check_log()
    log.write_text("pool leak detected: 7\n" + "all is well\n" * 50)
    with pytest.raises(BenchFailed, match="detected: 7"):
        server.check_log()
