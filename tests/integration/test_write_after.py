"""Prompts are stored once others have asked for the same, and no more of them than that."""

from __future__ import annotations

import pytest

from tests.integration.worlds import STORED, TOKENS, World


@pytest.fixture
def options() -> dict[str, int]:
    return {"write_after": 2}


def test_what_two_ask_for_is_stored(world: World) -> None:
    """Questions that nobody asks again are not."""
    stored = [world.stored_after(f"r{number}", 2000 + 100 * number) for number in range(4)]
    assert stored == [0, TOKENS, TOKENS, TOKENS]
    assert world.stored(STORED) == TOKENS


@pytest.mark.parametrize("retracted", [False, True])
def test_others_do_not_count(world: World, retracted: bool) -> None:
    """Neither a request that is matched again, nor one of another namespace."""
    req = world.request("r", [*STORED, *range(2000, 2064)])
    for _ in range(2):
        if retracted:
            world.cache.on_release(req, checkpointed=False)
        world.match(req)
    world.serve(req)
    world.flush()
    assert world.stored_after("s", 2000, namespace="other") == 0
    assert world.stored_after("t", 3000) == TOKENS


def test_samples_of_one_request_are_one(world: World) -> None:
    """SGLang computes its prompt first, without a token behind it."""
    for rid, new_tokens in (("r", 0), ("r-1", 8), ("r-2", 8)):
        assert world.stored_after(rid, 2000, sampling={"n": 2, "max_new_tokens": new_tokens}) == 0
    assert world.stored_after("s", 2000) == 2 * TOKENS


def test_a_conversation_is_stored_one_turn_later(world: World) -> None:
    """All of it but the turn under way: the last answer was seen by whom it was given to."""
    answer = [*range(5000, 5000 + TOKENS)]
    assert world.stored_after("r", 2000, answer=answer) == 0
    talk = [*STORED, *range(2000, 2000 + TOKENS), *answer]
    assert world.stored_after("s", 3000, prompt=talk) == len(talk)
