"""Two stages of a pipeline, over gloo, one of two layers and one of one: answers are those of one
stage, also if one loses what it stores or is killed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.fault_control import FaultControl
from tests.faults import Rule
from tests.serving.compare import assert_same
from tests.serving.conftest import Serve
from tests.serving.harness import SKEWED, Server
from tests.serving.test_ranks import (
    EXACT,
    HANGS_S,
    MANY,
    SECOND,
    SKEWS,
    TOLERANCE,
    ask_all,
    assert_same_in_few_bits,
    assert_stored_again,
    differ,
    prompts_of,
    same_as,
    second,
    told_by,
    watched,
)
from tests.serving.tiny_models import random_tokens
from tests.unit.waiting import wait_until

STAYS_WHOLE = "stages"
FLAGS = ("--max-total-tokens=9000", "--chunked-prefill-size=512", "--impress-io-timeout=2")
BEFORE = random_tokens(900, 700)


@pytest.fixture(scope="module")
def control(workdir: Path) -> FaultControl:
    return FaultControl(workdir / "stages-faults.json", seed=5)


@pytest.fixture(scope="module")
def stages(serve: Serve, control: FaultControl) -> Iterator[Server]:
    """Its second life: in the first one a stage was killed, which ended the server."""
    how: dict[str, Any] = {"stages": 2, "faults": control, "preload": SKEWED}
    with serve("stages", *FLAGS, quiet=False, **how) as server:
        server.store_prompts(BEFORE)
        wait_until(lambda: list(second(server).glob("segments/*/*.kv")), HANGS_S)
        control.set(kill := Rule("kill", "rename", SECOND))
        with contextlib.suppress(requests.RequestException):
            server.store_prompts(random_tokens(900, 701))
        wait_until(lambda: not server.process.alive(), HANGS_S)
        assert control.hits()[kill.name] == 1
    control.set()
    with serve("stages", *FLAGS, **how) as server:
        yield server


def test_exact_answers_are_those_of_one_stage(stages: Server, stock: Server) -> None:
    prompts = [BEFORE, *prompts_of(21, 12)]
    assert same_as(stock, stages, prompts, **EXACT)[0] == "ssd"
    stages.flush()
    assert same_as(stock, stages, prompts, **EXACT).count("ssd") > 6
    one, two = told_by(stages, [])
    assert one["tree"] == two["tree"]


def test_answers_in_few_bits_are_those_of_one_stage(stages: Server, roomy: Server) -> None:
    assert_same_in_few_bits(roomy, stages, 710)


def test_a_file_that_is_gone_or_damaged_on_one_stage(stages: Server, stock: Server) -> None:
    assert_stored_again(stages, stock, 720)


def test_orders_and_weights_reach_all_stages_between_batches(
    stages: Server, stock: Server, tiny_llama: Path
) -> None:
    prompts = prompts_of(22, 6)
    stages.store_prompts(*prompts)
    with ThreadPoolExecutor(1) as pool, watched(stages):
        asked = pool.submit(ask_all, stages, prompts, **EXACT)
        while not asked.done():
            assert stages.post("/impress/purge", all=True).ok
        assert_same(ask_all(stock, prompts), asked.result(HANGS_S), TOLERANCE)
    stages.abort_in_every_phase(prompts)
    assert stages.post("/impress/purge", all=True).ok
    wait_until(lambda: not list(second(stages).glob("segments/*/*.kv")), HANGS_S)
    stages.store_prompts(prompts[0])
    stages.post("/update_weights_from_disk", model_path=str(tiny_llama)).raise_for_status()
    wait_until(lambda: stages.stats()["suspended"] is None, HANGS_S)
    assert same_as(stock, stages, prompts[:1], **EXACT) == ["ssd"]


@pytest.mark.parametrize("skew", [*SKEWS])
def test_a_stage_that_differs_changes_no_answer(
    stages: Server, stock: Server, control: FaultControl, skew: str, request: pytest.FixtureRequest
) -> None:
    count = request.config.getoption("--rank-requests")
    if count < MANY:
        pytest.skip("it takes long, with --rank-requests 100")
    differ(stages, stock, control, skew, count)
