"""The benchmark of eviction policies: SGLang's tree finds what it should, and traces are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.core.options import parse
from bench.policies import eviction
from bench.policies.eviction import Replay, count_blocks, few_shot, read_trace


def test_what_was_used_last_is_kept() -> None:
    replay = Replay("lru", 6, 0.0)
    for blocks in ((1, 2, 3), (7, 8, 9), (1, 2, 4)):
        replay.ask(blocks)
    assert replay.found == 2
    replay.ask((1, 2, 3))
    assert replay.found == 5
    replay.ask((7,))
    assert replay.found == 5, "4 took its room: a leaf goes as a whole"


@pytest.mark.parametrize(("policy", "found"), [("lru", 0), ("lfu", 3), (eviction.SCORE, 3)])
def test_frequency_keeps_what_was_asked_for_often(policy: str, found: int) -> None:
    replay = Replay(policy, 6, 100.0)
    for blocks in ((1, 2, 3), (1, 2, 3), (7, 8, 9), (17, 18, 19)):
        replay.ask(blocks)
    before = replay.found
    replay.ask((1, 2, 3))
    assert replay.found - before == found


def test_a_block_behind_others_is_another_one() -> None:
    assert count_blocks([(1, 2), (1, 2), (3, 2)]) == [2, 2, 1, 1]


def test_few_shot_prefixes_have_questions_of_their_own() -> None:
    trace = few_shot(4, 50, 1)
    assert trace == few_shot(4, 50, 1) != few_shot(4, 50, 2)
    assert len({blocks[-1] for blocks in trace}) == 50
    assert len({blocks[:-1] for blocks in trace}) == 4


def test_sessions_take_turns_and_share_no_blocks(tmp_path: Path) -> None:
    for number in (1, 2):
        blocks = ([1, 2], [1, 2, 3])
        requests = [{"t": len(own), "in": 9, "out": 1, "hash_ids": own} for own in blocks]
        session = {"block_size": 4, "requests": [*requests, {"t": 2}]}
        (tmp_path / f"{number}.json").write_text(json.dumps(session))
    trace = read_trace(tmp_path, 1)
    assert sorted(map(len, trace)) == [2, 2, 3, 3]
    assert len({blocks[0] for blocks in trace}) == 2
    file = tmp_path / "trace.jsonl"
    file.write_text('{"hash_ids": [4, 5]}\n{"hash_ids": [4]}\n')
    assert read_trace(file, 1) == [(4, 5), (4,)]


def test_all_is_found_in_a_pool_with_room(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text('{"hash_ids": [4, 5]}\n{"hash_ids": [4, 6]}\n' * 2)
    given = [f"--trace={tmp_path / 'trace.jsonl'}", "--shares=9", "--policies=lru"]
    result = eviction.run(parse("eviction", eviction.__doc__, eviction.OPTIONS, given))
    assert result.figures["rows"] == [
        {"trace": "trace", "requests": 4, "again": 3, "room": 27, "lru": 100.0}
    ]
