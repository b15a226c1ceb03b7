"""A real server with a basis: its codes, and exact KVs beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.compare import report
from tests.serving.conftest import Serve
from tests.serving.harness import Server
from tests.serving.test_bits import EXACT, logprob
from tests.serving.tiny_models import make_basis, random_tokens

STAYS_WHOLE = "impress"
RATE, LOWER_RATE = 4.0, 3.0


@pytest.fixture(scope="module")
def basis(workdir: Path, tiny_llama: Path) -> Path:
    return make_basis(tiny_llama, workdir / "tiny.basis", ranks=2)


@pytest.fixture(scope="module")
def impress(serve: Serve, basis: Path) -> Iterator[Server]:
    flags = ("--max-total-tokens=9000", "--impress-host-gb=0", "--impress-device-gb=0")
    with serve("basis", f"--impress-basis={basis}", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def two_ranks(serve: Serve, basis: Path) -> Iterator[Server]:
    """Each has a basis of its own heads, in more bits."""
    with serve("basis-ranks", f"--impress-basis={basis}", ranks=2) as server:
        yield server
        server.assert_whole()


@pytest.mark.parametrize(("name", "most", "least"), [("impress", 0.0, 5), ("two_ranks", 1.0, 4)])
def test_a_prefix_comes_in_the_bits_of_the_basis(
    request: pytest.FixtureRequest, stock: Server, name: str, most: float, least: int
) -> None:
    """In fewer bytes than exact KVs, and answers hardly differ."""
    server: Server = request.getfixturevalue(name)
    prefix = server.store(1200, seed=3)
    question = [*prefix, *random_tokens(25, seed=4)]
    right = logprob(stock.generate(question, 1, return_logprob=True))
    found = server.generate(question, 1, return_logprob=True)
    few = report(found)
    assert few["path"] == "ssd" and RATE <= few["bits_mean"] <= RATE + most
    assert few["approximate"] is True and few["loaded_tokens"] == 1200
    assert abs(logprob(found) - right) < 0.3
    exact = report(server.generate(question, 1, **EXACT))
    assert exact["bits_mean"] == 16.0 and least < exact["ssd_bytes"] / few["ssd_bytes"] < 8


@pytest.mark.parametrize("bits", [5, 6])
def test_who_asks_for_no_more_bits_than_it_is_worth_gets_it(impress: Server, bits: int) -> None:
    prefix = impress.store(300, seed=5)
    question = [*prefix, *random_tokens(9, seed=40 + bits)]
    said = report(impress.generate(question, 1, impress_bits=bits))
    assert said["path"] == "ssd" and said["bits_mean"] == RATE


def test_a_conversation_is_read_back_over_turns(impress: Server) -> None:
    """What is computed behind coded KVs is stored, and coded in its turn."""
    text = random_tokens(400, seed=7)
    for turn in range(4):
        impress.flush()
        said = report(impress.generate(text, 1))
        assert said["path"] == ("ssd" if turn else "computed")
        assert said["loaded_tokens"] == (len(text) - 200 if turn else 0)
        text = [*text, *random_tokens(200, seed=70 + turn)]


def test_a_server_with_fewer_bits_takes_the_lower_rate(serve: Serve, basis: Path) -> None:
    """And exact KVs are computed where only codes are kept."""
    flags = (f"--impress-basis={basis}", "--impress-bits=5", "--impress-keep=codes")
    with serve("basis-5", *flags) as server:
        prefix = server.store(400, seed=9)
        said = report(server.generate([*prefix, 7], 1))
        assert said["path"] == "ssd" and said["bits_mean"] == pytest.approx(LOWER_RATE, abs=0.02)
        for bits in (6, "exact"):
            said = report(server.generate([*prefix, 8], 1, impress_bits=bits))
            assert said["path"] == "computed" and said["why"]["reason"] == "quality"
            server.flush()
        warmed = random_tokens(300, seed=12)
        for outcomes in ({"stored", "being_written"}, {"stored_before"}):
            told = server.post("/impress/warm", input_ids=warmed).json()
            assert told["outcome"] in outcomes
            server.flush()
    with serve("basis-5", *flags) as server:
        said = report(server.generate([*random_tokens(400, seed=9), *random_tokens(9, seed=1)], 1))
        assert said["path"] == "ssd", "what was stored before a restart"
