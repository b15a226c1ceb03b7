"""Prompts are stored once others have asked for the same, and no more of them than that."""

from __future__ import annotations

import pytest

from tests.integration import worlds


@pytest.fixture
def options() -> dict[str, int]:
    return {"write_after": 2}


def test_what_two_ask_for_is_stored(world: worlds.World) -> None:
    """Questions that nobody asks again are not."""
    stored = [world.compute(f"r{number}", 2000 + 100 * number) for number in range(4)]
    assert stored == [0, worlds.TOKENS, worlds.TOKENS, worlds.TOKENS]
    assert world.stored(1000) == worlds.TOKENS


@pytest.mark.parametrize("retracted", [False, True])
def test_others_do_not_count(world: worlds.World, retracted: bool) -> None:
    """Neither a request that is matched again, nor one of another namespace."""
    assert world.compute("r", 2000, matches=3, retracted=retracted) == 0
    assert world.compute("s", 2000, namespace="other") == 0
    assert world.compute("t", 3000) == worlds.TOKENS


def test_samples_of_one_request_are_one(world: worlds.World) -> None:
    """SGLang computes its prompt first, without a token behind it."""
    for rid, new_tokens in (("r", 0), ("r-1", 8), ("r-2", 8)):
        assert world.compute(rid, 2000, sampling={"n": 2, "max_new_tokens": new_tokens}) == 0
    assert world.compute("s", 2000) == 2 * worlds.TOKENS


def test_a_conversation_is_stored_one_turn_later(world: worlds.World) -> None:
    """All of it but the turn under way: the last answer was seen by whom it was given to."""
    answer = [*range(5000, 5000 + worlds.TOKENS)]
    assert world.compute("r", 2000, answer=answer) == 0
    talk = [*worlds.STORED, *range(2000, 2000 + worlds.TOKENS), *answer]
    assert world.compute("s", 3000, prompt=talk) == len(talk)
