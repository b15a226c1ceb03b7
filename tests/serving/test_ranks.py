"""Two ranks of a model, over gloo: answers are those of one, also if a rank is slower or loses what
it stores."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from pathlib import Path
from typing import Any

import pytest

from tests.fault_control import FaultControl
from tests.faults import Rule
from tests.serving.compare import assert_same, paths, report
from tests.serving.conftest import Serve, impress_flags
from tests.serving.damage import flip_value
from tests.serving.harness import Server, Zygote, running
from tests.serving.tiny_models import random_tokens
from tests.unit.waiting import wait_until

TOLERANCE = 1e-4
STAYS_WHOLE = "ranks"
EXACT = {"impress_bits": "exact"}
# Nothing that ranks wait for takes as long, on a busy machine.
HANGS_S = 120
# Fewer tokens are neither stored nor loaded.
LEAST = 64
SECOND = "*0001/segments/*"
READS = "open|read|block"
SKEWS = {
    "writes are late": Rule("delay", "rename", SECOND, seconds=0.5),
    "reads are late": Rule("delay", READS, SECOND, seconds=0.1, probability=0.3),
    "reads fail": Rule("EIO", READS, SECOND, probability=0.3),
    "blocks are corrupt": Rule("flip", "block", SECOND, probability=0.2),
    "writes fail": Rule("ENOSPC", "write", SECOND, probability=0.3),
}


@pytest.fixture(scope="module")
def control(workdir: Path) -> FaultControl:
    return FaultControl(workdir / "ranks-faults.json", seed=5)


@pytest.fixture(scope="module")
def ranks(serve: Serve, control: FaultControl) -> Iterator[Server]:
    """Two ranks, whose pool is small, whose chunks are short, and which put requests back."""
    flags = (
        *("--impress-device-gb=0", "--impress-host-gb=0", "--impress-io-timeout=2"),
        *("--max-total-tokens=9000", "--chunked-prefill-size=512"),
    )
    with serve("ranks", *flags, ranks=2, faults=control) as server:
        yield server


@contextlib.contextmanager
def watched(server: Server) -> Iterator[None]:
    """What all threads do is in the log if somebody waits for ever."""
    try:
        yield
    except NotInTime:
        server.tell_where()
        raise


def ask_all(server: Server, prompts: Sequence[Sequence[int]], **fields: Any) -> list[Any]:
    """Eight at a time."""
    with ThreadPoolExecutor(8) as pool, watched(server):
        asked = [
            pool.submit(server.generate, own, 6, return_logprob=True, **fields) for own in prompts
        ]
        return [own.result(HANGS_S) for own in asked]


def prompts_of(seed: int, count: int) -> list[list[int]]:
    """Prompts of which several begin alike, each with a question of its own."""
    rng = random.Random(seed)
    families = [random_tokens(1200, 10_000 * seed + number) for number in range(4)]
    return [
        [*rng.choice(families)[: rng.randrange(300, 1200)], *random_tokens(30, 10_000 * seed + k)]
        for k in range(100, 100 + count)
    ]


def same_as(server: Server, ranks: Server, prompts: list[list[int]], **fields: Any) -> list[str]:
    """Ask both; returns where the ranks had the prefixes."""
    answers = ask_all(ranks, prompts, **fields)
    assert_same(ask_all(server, prompts), answers, TOLERANCE)
    return paths(answers)


def is_well(server: Server) -> bool:
    with watched(server):
        store = server.stats()["store"]
    return bool(store["health"]["state"] == "ok" and not store["writes_pending"])


def test_exact_answers_are_those_of_one_rank(ranks: Server, stock: Server) -> None:
    prompts = prompts_of(1, 12)
    same_as(stock, ranks, prompts, **EXACT)
    ranks.flush()
    assert "ssd" in same_as(stock, ranks, prompts, **EXACT)


def test_answers_in_few_bits_are_those_of_one_rank(ranks: Server, roomy: Server) -> None:
    bits = {"impress_bits": 6}
    prompts = [random_tokens(700, 200 + number) for number in range(6)]
    told = []
    for server in (roomy, ranks):
        server.store_prompts(*prompts)
        told.append(ask_all(server, prompts, **bits))
        assert set(paths(told[-1])) == {"ssd"}
        assert {report(own)["bits"] for own in told[-1]} == {6.0}
    for one, two in zip(*told, strict=True):
        assert one["output_ids"] == two["output_ids"]


@pytest.mark.parametrize("name", SKEWS)
def test_a_rank_that_differs_changes_no_answer(
    ranks: Server, stock: Server, control: FaultControl, name: str, request: pytest.FixtureRequest
) -> None:
    count = request.config.getoption("--rank-requests")
    rule, prompts = SKEWS[name], prompts_of(50 + list(SKEWS).index(name), 12)
    want = ask_all(stock, prompts)
    # Some are stored before.
    ask_all(ranks, prompts[:6], **EXACT)
    ranks.flush()
    before = control.hits()[rule.name]
    control.set(rule)
    asked = 0
    while asked < count:
        assert_same(want, ask_all(ranks, prompts, **EXACT), TOLERANCE)
        asked += len(prompts)
        ranks.flush()
    assert control.hits()[rule.name] > before, "the rank did not differ"
    control.set()
    wait_until(lambda: is_well(ranks), HANGS_S)

    def healed() -> bool:
        """What one has lost was stored again: both load it, but for ends too short for that."""
        told = [report(own)["tokens"] for own in ask_all(ranks, prompts, **EXACT)]
        ranks.flush()
        loaded = any(own["loaded"] for own in told)
        return loaded and all(own["computed"] < 2 * LEAST for own in told)

    wait_until(healed, HANGS_S)
    assert_same(want, ask_all(ranks, prompts, **EXACT), TOLERANCE)


def test_a_file_that_is_gone_or_damaged_on_one_rank(ranks: Server, stock: Server) -> None:
    prompts = [random_tokens(900, 300 + number) for number in range(2)]
    before = set(second(ranks).glob("segments/*/*.kv"))
    ranks.store_prompts(*prompts)
    gone, damaged = sorted(set(second(ranks).glob("segments/*/*.kv")) - before)
    gone.unlink()
    flip_value(damaged)
    assert same_as(stock, ranks, prompts, **EXACT) == ["computed"] * 2
    wait_until(lambda: is_well(ranks), HANGS_S)
    ranks.flush()
    assert same_as(stock, ranks, prompts, **EXACT) == ["ssd"] * 2


def second(server: Server) -> Path:
    """The store of the second rank."""
    first = Path(server.stats()["store"]["directory"])
    return first.with_name(f"{first.name[:-4]}0001")


def test_aborts_and_orders_reach_all_ranks(ranks: Server, stock: Server) -> None:
    prompts = prompts_of(7, 6)
    ranks.store_prompts(*prompts)
    ranks.abort_in_every_phase(prompts)
    assert ranks.stats()["integrity"] == "ok"
    assert list(second(ranks).glob("segments/*/*.kv"))
    assert ranks.post("/impress/purge", all=True).ok
    wait_until(lambda: not list(second(ranks).glob("segments/*/*.kv")), HANGS_S)
    same_as(stock, ranks, prompts, **EXACT)


def test_other_weights_are_other_stores_on_all_ranks(
    ranks: Server, stock: Server, tiny_llama: Path
) -> None:
    prompt = random_tokens(600, 400)
    ranks.store_prompts(prompt)
    (before,) = ask_all(ranks, [prompt], **EXACT)
    assert paths([before]) == ["ssd"]
    ranks.post("/update_weights_from_disk", model_path=str(tiny_llama)).raise_for_status()
    wait_until(lambda: ranks.stats()["suspended"] is None, HANGS_S)
    assert same_as(stock, ranks, [prompt], **EXACT) == ["ssd"]


def test_requests_are_put_back_on_all_ranks(
    workdir: Path, tiny_llama: Path, stock: Server, zygote: Zygote
) -> None:
    """And what one rank has stored alone is a miss for two."""
    store = workdir / "store-ranks-anew"
    with running(
        tiny_llama, workdir / "ranks-one.log", *impress_flags(store), zygote=zygote
    ) as one:
        prompt = one.store(800, 500)
        assert paths([one.generate(prompt, 1)]) == ["ssd"]
    flags = impress_flags(store, "--max-total-tokens=6000", "--disable-overlap-schedule")
    log = workdir / "ranks-anew.log"
    with running(tiny_llama, log, *flags, zygote=zygote, ranks=2, retracts=True) as server:
        assert same_as(stock, server, [prompt], **EXACT) == ["computed"]
        prompts = prompts_of(8, 12)
        for _ in range(2):
            same_as(stock, server, prompts, **EXACT)
            server.flush()
        server.assert_quiet()
