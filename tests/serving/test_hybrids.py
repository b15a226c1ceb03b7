"""Models of which most layers keep a state instead of KVs, where SGLang keeps one.

By default it keeps one at the last multiple of 64 tokens of a prompt, and where prompts part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.serving.compare import assert_same, paths, report
from tests.serving.conftest import Serve
from tests.serving.damage import flip_value, place_of, store_damaged
from tests.serving.harness import HYBRID, Server
from tests.serving.test_pools import assert_comes_back, assert_forks
from tests.serving.test_ranks import HANGS_S, second
from tests.serving.tiny_models import make_model, random_tokens
from tests.unit.waiting import wait_until

FLAGS = ("--max-total-tokens=9000", "--max-mamba-cache-size=40", "--impress-keep=auto")
PROMPTS = [random_tokens(470, seed=60 + number) for number in range(6)]
# Of these tokens SGLang keeps a state.
KEPT = 448


@pytest.fixture(scope="module")
def model(workdir: Path) -> Path:
    return make_model("qwen3_next", workdir / "qwen3_next")


def answers(server: Server, prompts: list[list[int]]) -> list[Any]:
    return [server.generate(prompt, 16, return_logprob=True) for prompt in prompts]


@pytest.fixture(scope="module")
def computed(serve: Serve, model: Path) -> list[Any]:
    """Answers to `PROMPTS`, by a first life of a server."""
    with serve("hybrid", *FLAGS, model=model, preload=HYBRID, stops=True) as server:
        return answers(server, PROMPTS)


def test_states(serve: Serve, model: Path, computed: list[Any]) -> None:
    """After a restart, also behind a fork, and when there are few."""
    with serve("hybrid", *FLAGS, model=model, preload=HYBRID) as server:
        again = answers(server, PROMPTS)
        assert_same(computed, again)
        assert set(paths(again)) == {"ssd"}
        # There is no state in the middle of a prompt.
        told = report(server.generate([*PROMPTS[0][:300], *random_tokens(9, seed=95)], 1))
        assert told["path"] == "computed" and told["why"]["reason"] == "no_state"
        server.flush()
        assert "states of layers without KVs are stored with the others" in server.log_text()
        assert_comes_back(server, [random_tokens(700, seed=94)])
        prompt = [*store_damaged(server, 900, seed=83, state=True), *random_tokens(3, seed=84)]
        told = report(server.generate(prompt, 12))
        assert told["path"] == "computed" and told["why"]["reason"] == "no_state"
        # SGLang has a state where they part.
        assert_forks(server)
        server.flush()
        together = server.generate_together([*PROMPTS, *PROMPTS], 16, return_logprob=True)
        assert_same([*computed, *computed], together)
        assert "ssd" in paths(together)
        server.abort_in_every_phase(PROMPTS)
        server.assert_whole()


def test_states_of_two_ranks(serve: Serve, model: Path, computed: list[Any]) -> None:
    """Each has that of its heads; of a conversation, a turn stores the state of the one before."""
    how: dict[str, Any] = {"model": model, "preload": HYBRID, "ranks": 2}
    asked, spoiled = PROMPTS[:3], PROMPTS[3]
    with serve("hybrid-ranks", *FLAGS, "--impress-write-after=2", **how) as server:
        assert_same(computed[:3], answers(server, asked))
        for prompt in asked:
            server.generate([*prompt, *random_tokens(100, seed=96)], 1)
        server.flush()
        again = answers(server, asked)
        assert_same(computed[:3], again)
        assert {report(answer)["loaded_tokens"] for answer in again} == {KEPT}
        before = set(second(server).glob("segments/*/*.kv"))
        server.store_prompts(spoiled, spoiled)
        found = set(second(server).glob("segments/*/*.kv")) - before
        _, state = sorted(found, key=place_of)
        flip_value(state)
        told = answers(server, [spoiled])
        assert paths(told) == ["computed"]

        def healed() -> bool:
            server.flush()
            told.extend(answers(server, [spoiled]))
            return paths(told)[-1] == "ssd"

        wait_until(healed, HANGS_S)
        assert_same([computed[3]] * len(told), told)
        server.assert_whole()


def test_states_at_the_ends_of_prompts(serve: Serve, model: Path) -> None:
    flags = ("--mamba-radix-cache-strategy=no_buffer", "--disable-overlap-schedule")
    prompt = random_tokens(700, seed=70)
    with serve("hybrid-ends", *FLAGS, *flags, model=model, preload=HYBRID) as server:
        server.generate(prompt, 1)
        resident = server.generate([*prompt, 5], 16, return_logprob=True)
        server.flush()
        loaded = server.generate([*prompt, 5], 16, return_logprob=True)
        assert report(loaded)["loaded_tokens"] == len(prompt)
        assert_same([resident], [loaded], 1e-5)
        # With the state at its end, which is none of a block.
        asked = {"input_ids": [*prompt, 5, 6]}
        assert server.post("/impress/pin", **asked).json()["tokens"] == len(prompt)
        assert server.post("/impress/unpin", **asked).json()["unpinned"] == 1
        refused = server.post("/impress/pin", input_ids=prompt[:400])
        assert refused.status_code == 400 and "no state" in refused.text
        server.assert_whole()
