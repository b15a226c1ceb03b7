"""The randomised run's own judgement: it must not pass what is wrong."""

from __future__ import annotations

import time

import pytest

from tests.serving.traffic import TOLERANCE, Answer, Catalogue
from tests.serving.world import MIXED, World

ONE, OTHER = Answer(tokens=((1, 2, 3),)), Answer(tokens=((1, 2, 4),))


@pytest.fixture
def world() -> World:
    world = World(Catalogue([], []))
    world.must_have("a")
    return world


def judge(world: World, answer: Answer, began: float, *, exact: bool = True) -> bool:
    """Whether an answer passes, where stock says `ONE` with weights a and `OTHER` with b."""
    before = len(world.problems)
    world.judge_answer("it", [answer], {"a": [ONE], "b": [OTHER]}, began, exact=exact)
    return len(world.problems) == before


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (ONE, ONE, True),
        (ONE, OTHER, False),
        (ONE, Answer(tokens=((1, 2),)), False),
        (Answer(numbers=(1.0,)), Answer(numbers=(1.0 + TOLERANCE / 2,)), True),
        (Answer(numbers=(1.0,)), Answer(numbers=(1.0 + TOLERANCE * 2,)), False),
        (Answer(numbers=(1.0,)), Answer(numbers=(float("nan"),)), False),
        (Answer(numbers=(1.0,)), Answer(), False),
        (Answer(((1,),), scores=(2.0,)), Answer(((5,),), scores=(2.0,)), True),
        (Answer(((1,),), scores=(2.0,)), Answer(((1,),), scores=(2.1,)), False),
    ],
)
def test_answers_differ(left: Answer, right: Answer, same: bool) -> None:
    assert (left.difference(right) == "") is same


def test_an_answer_is_of_the_weights_of_its_time(world: World) -> None:
    began = time.monotonic()
    assert judge(world, ONE, began) and not judge(world, OTHER, began)
    world.may_have("b")
    assert judge(world, ONE, began) and judge(world, OTHER, began)
    assert not judge(world, Answer(tokens=((9,),)), began)
    world.must_have("b")
    time.sleep(0.01)
    now = time.monotonic()
    assert judge(world, ONE, began), "it may have been computed before"
    assert judge(world, OTHER, now) and not judge(world, ONE, now)


def test_what_is_not_exact_has_the_right_form(world: World) -> None:
    now = time.monotonic()
    assert judge(world, OTHER, now, exact=False)
    assert not judge(world, Answer(), now, exact=False)
    with world.disturbed(MIXED):
        assert judge(world, OTHER, now)
        assert not judge(world, Answer(tokens=((1,), (2,))), now)
    time.sleep(0.01)
    assert not judge(world, OTHER, time.monotonic())
