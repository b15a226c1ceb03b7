"""What is kept between the steps of orders."""

from __future__ import annotations

import pytest

from impress_sglang.management.begun import MOST_BEGUN, Begun


@pytest.fixture
def begun() -> Begun[str, list[int]]:
    return Begun()


def test_who_goes_on_finds_what_was_begun_until_it_ends(begun: Begun[str, list[int]]) -> None:
    assert begun.get("a") is None
    # Also where there is nothing in it.
    work = begun.begin("a", [])
    other = begun.begin("b", [1])
    assert begun.get("a") is work and begun.get("b") is other
    begun.end("a")
    assert begun.get("a") is None and begun.get("b") is other and len(begun) == 1
    begun.end("a")
    assert begun.begin("a", [2]) == [2]
    begun.clear()
    assert not len(begun) and begun.get("b") is None


def test_of_too_many_the_first_is_forgotten(begun: Begun[str, list[int]]) -> None:
    """Whoever went on with it last: that is no sign that it will end."""
    names = [str(number) for number in range(MOST_BEGUN)]
    for name in names:
        begun.begin(name, [])
    begun.get("0")
    begun.begin("new", [])
    assert [name for name in [*names, "new"] if begun.get(name) is None] == ["0"]
    begun.end("3")
    begun.begin("0", [])
    assert len(begun) == MOST_BEGUN and begun.get("1") is not None, "there was room"
    begun.begin("3", [])
    assert len(begun) == MOST_BEGUN and begun.get("1") is None
