"""Published traces as sessions, what is asked of a server, and the figures of it."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.core.servers import Piece
from bench.traffic import trace
from bench.traffic.sessions import MOONCAKE_BLOCK, Scale, Session, read_sessions

TEXT = list(range(1000, 6000))


def agents(folder: Path, *requests: dict[str, Any]) -> list[Session]:
    folder.mkdir(exist_ok=True)
    told = {"block_size": 64, "requests": list(requests)}
    (folder / f"{len(list(folder.iterdir()))}.json").write_text(json.dumps(told))
    return read_sessions(folder)


def chats(path: Path, *requests: tuple[int, list[int]]) -> list[Session]:
    lines = [
        {"timestamp": at, "input_length": 512 * len(blocks) - 12, "output_length": 9}
        | {"hash_ids": blocks}
        for at, blocks in requests
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return read_sessions(path)


def scale(**more: Any) -> Scale:
    return Scale(TEXT, **{"divide": 16, "hurry": 10.0, "longest": 3.0, "seed": 1, **more})


FIRST = {"t": 0.0, "in": 200, "out": 100, "hash_ids": [1, 2, 3]}
SECOND = {"t": 20.0, "in": 330, "out": 8, "hash_ids": [1, 2, 3, 4, 5], "api_time": 4.0}


def test_blocks_of_agents_are_those_of_their_session(tmp_path: Path) -> None:
    agents(tmp_path / "a", FIRST, {"t": 1.0, "type": "no request"}, SECOND)
    one, other = agents(tmp_path / "a", FIRST)
    assert [turn.think_seconds for turn in one] == [0.0, 16.0]
    assert one[1].blocks[:3] == one[0].blocks and not {*one[0].blocks} & {*other[0].blocks}
    assert scale().working_set([one, other]) == (5 + 3) * 4


def test_a_chat_goes_on_from_the_request_that_it_begins_with(tmp_path: Path) -> None:
    sessions = chats(
        tmp_path / "chats",
        (0, [0, 1, 2]),
        (500, [0, 7, 8]),
        (2500, [0, 1, 3, 4]),
        (4000, [0, 1, 3, 5, 6]),
        (5000, [0, 9]),
    )
    assert [[turn.at for turn in own] for own in sessions] == [[0.0, 2.5, 4.0], [0.5], [5.0]]
    assert [turn.think_seconds for turn in sessions[0]] == [0.0, 2.5, 1.5]
    assert sessions[0][0].block_tokens == MOONCAKE_BLOCK
    assert len(scale().ask(sessions[0][0]).tokens) == (3 * 512 - 12) // 16


def test_equal_blocks_are_equal_text_and_the_end_is_new(tmp_path: Path) -> None:
    (session,) = agents(tmp_path / "a", FIRST, SECOND, {**SECOND, "in": 331, "think_time": 90.0})
    first, second, third = (scale().ask(turn) for turn in session)
    assert [len(own.tokens) for own in (first, second, third)] == [13, 21, 21]
    assert list(second.tokens[:12]) == list(first.tokens[:12])
    # Blocks that follow each other are text that does.
    text = second.tokens[:20]
    assert all(b - a == 1 or b == TEXT[0] for a, b in itertools.pairwise(text))
    assert third.tokens[:20] == second.tokens[:20] and third.tokens[20] != second.tokens[20]
    assert [own.answer_tokens for own in (first, second)] == [6, 1]
    assert [own.pause_seconds for own in (first, second, third)] == [0.0, 1.6, 3.0]
    assert scale(seed=2).ask(session[0]).tokens != first.tokens


class Server:
    """Caches all but the last ten tokens; one answer takes two pieces."""

    def __init__(self, details: dict[str, Any] | None) -> None:
        self.pid = os.getpid()
        self.details = details
        self.made: list[int] = []

    def stream(self, tokens: list[int], new_tokens: int) -> Iterator[Piece]:
        self.made.append(len(tokens))
        now = trace.time.perf_counter()
        yield Piece(now + 0.5, 1, {})
        cached = {"cached_tokens": len(tokens) - 10, "cached_tokens_details": self.details}
        yield Piece(now + 0.75, new_tokens, cached)


def test_a_session_is_asked_in_its_order(tmp_path: Path) -> None:
    session = agents(tmp_path / "a", FIRST, SECOND)[0]
    server: Any = Server(None)
    row = trace.replay(server, [session], scale(hurry=1e6), 1)
    assert server.made == [13, 21]
    assert row["ttft_p50"] == pytest.approx(500, abs=20) and row["gap_max"] == 250.0
    assert (row["cached"], row["cached_tokens"]) == (round(14 / 34, 4), {"device": 14})
