"""Loads in the midst of other requests: traffic, streams and figures, without SGLang."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from bench.core.options import parse
from bench.core.report import Row, Table
from bench.core.servers import Piece, Server
from bench.core.session import BenchFailed
from bench.core.zygote import ForkedProcess
from bench.traffic import beside, pressure
from bench.traffic.clients import Stream, gaps_of, tokens_between

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
        self.aborted: list[str] = []
        self.let_go = threading.Event()

    def request(self, method: str, path: str, **how: Any) -> Any:
        if path == "/abort_request":
            self.aborted.append(how["json"]["rid"])
            self.let_go.set()
            return None
        answer = self.how[len(how["json"]["input_ids"])]
        if isinstance(answer, Exception):
            raise BenchFailed("no") from answer
        if answer == "abort":
            assert self.let_go.wait(10)
        response = requests.Response()
        body = {"meta_info": {"finish_reason": {"type": answer}}}
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
    """An abort that nobody asked for is a failure."""
    stub = Stub({1: "length", 2: "abort", 3: "stop", 4: requests.HTTPError("503")})
    traffic = [asked(1), asked(2, abort_after=0.01), asked(3), asked(4), asked(2)]
    ended, _ = clients_of(stub).ask_all(traffic)
    assert outcomes(ended) == ["finished", "aborted", "failed", "failed", "failed"]
    assert stub.aborted == ["r2"]
    row = pressure.describe(ended)
    assert (row["finished"], row["aborted"], row["failed"], row["state"]) == (1, 1, 3, "ok")
    assert "503" in row["told"] and "stop" in row["told"]


@pytest.mark.parametrize(
    ("error", "state"), [(requests.ReadTimeout(), "hung"), (requests.ConnectionError(), "died")]
)
def test_nothing_is_asked_of_a_server_that_is_lost(error: Exception, state: str) -> None:
    traffic = [asked(1), asked(2), asked(1)]
    ended, _ = clients_of(Stub({1: "length", 2: error})).ask_all(traffic)
    assert outcomes(ended) == ["finished", state, "unasked"]
    row = pressure.describe(ended)
    assert (row["state"], row["unasked"]) == (state, 1)


def row_of(seed: int, seconds: float, state: str = "ok", told: str = "") -> Row:
    counts = dict.fromkeys(("finished", "aborted", "unasked", "failed"), 1)
    reads = dict.fromkeys(("read_bytes", "drive_bytes", "loads"))
    own = {"pool": 1.5, "seed": seed, "seconds": seconds, "slowest_s": 1.0, "machine_load": 0.1}
    return {**own, **counts, **reads, "state": state, "told": told}


def test_seeds_of_a_pool_are_summed_up() -> None:
    rows = [*(row_of(seed, 5.0 * seed) for seed in (1, 2, 3))]
    rows.append(row_of(4, 300.0, "hung", "r1: no answer"))
    (found,) = pressure.summarize(rows)
    assert (found["ok"], found["seeds"], found["median_s"], found["worst_s"]) == (3, 4, 10.0, 15.0)
    assert any("hung" in note and "no answer" in note for note in pressure.warnings(rows))
    assert "300.0" in str(Table(pressure.COLUMNS, rows))


CAME = [Piece(*own, {}) for own in ((1.0, 1), (1.5, 2), (3.0, 3), (3.25, 5))]


def test_gaps_and_tokens_of_a_stream() -> None:
    assert gaps_of(CAME) == [0.5, 1.5, 0.25]
    assert tokens_between(CAME, 1.0, 3.0) == 2 and tokens_between(CAME, 0.0, 9.0) == 5
    assert beside.describe_gaps([0.5, 1.5, 0.25]) == {
        "longest_ms": 1500.0,
        "second_ms": 500.0,
        "median_ms": 500.0,
    }


class Streaming:
    """Streams pieces, the last ones when told, or fails in their place."""

    def __init__(self, error: BenchFailed | None = None) -> None:
        self.go_on = threading.Event()
        self.error = error

    def stream(self, *_: Any) -> Iterator[Piece]:
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
    assert stream.join() == CAME


def test_a_stream_that_fails_says_so_to_who_waits() -> None:
    server: Any = Streaming(BenchFailed("broken"))
    stream = Stream(server, [1], 5)
    server.go_on.set()
    stream.wait(5)
    with pytest.raises(BenchFailed, match="broken"):
        stream.join()


def test_each_case_has_its_columns() -> None:
    assert all(callable(getattr(beside.Work, case)) for case in beside.SHOWN)


def test_trouble_in_a_log_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = Server(ForkedProcess(1), 1, log)
    log.write_text("all is well\n" * 50)
    server.check_log()
    log.write_text("pool leak detected: 7\n" + "all is well\n" * 50)
    with pytest.raises(BenchFailed, match="detected: 7"):
        server.check_log()
