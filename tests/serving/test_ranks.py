"""Two ranks of a model, over gloo, which share its heads, or its layers as stages of a pipeline:
answers are those of one, also if a rank is slower, loses what it stores or is killed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from pathlib import Path
from typing import Any

import pytest
import requests

from bench.core.session import ReservedPort
from tests.fault_control import FaultControl
from tests.faults import READS, Rule
from tests.serving.compare import assert_same, paths, report
from tests.serving.conftest import Serve
from tests.serving.damage import flip_value
from tests.serving.harness import LATENT, SKEWED, Server
from tests.serving.tiny_models import make_model, random_tokens
from tests.unit.waiting import wait_until

STAYS_WHOLE = "ranks"
KINDS = ("ranks", "stages")
EXACT = {"impress_bits": "exact"}
# Nothing that ranks wait for takes as long, on a busy machine.
HANGS_S = 120
# Fewer tokens are neither stored nor loaded.
LEAST = 64
# What both store before the second is killed.
BEFORE = random_tokens(900, 700)
SECOND = "*0001/segments/*"
SKEWS = {
    "writes are late": Rule("delay", "rename", SECOND, seconds=0.5),
    "jobs fail": Rule("raise", "job", SECOND, probability=0.3),
    "writes fail": Rule("ENOSPC", "write", SECOND, probability=0.3),
    "reads are late": Rule("delay", READS, SECOND, seconds=0.5, probability=0.1),
    "reads fail": Rule("EIO", READS, SECOND, probability=0.3),
    "blocks are corrupt": Rule("flip", "block", SECOND, probability=0.2),
    "jobs are late": Rule("delay", "job", SECOND, seconds=0.5, probability=0.5),
    "matches are late": Rule("delay", "match", SECOND, seconds=0.5, probability=0.2),
    "matches fail": Rule("ENODATA", "match", SECOND, probability=0.3),
}
KILLS = {
    "write": Rule("kill", "rename", SECOND, after=2),
    "read": Rule("kill", "read|block", SECOND, after=30),
    "job": Rule("kill", "job", SECOND, after=4),
    "match": Rule("kill", "match", SECOND, after=20),
}
# With fewer requests, only so many of them.
MANY, FEW = 100, {"skew": 2, "kill": 0}
# The pool is small, and chunks are short.
FLAGS = (
    *("--impress-device-gb=0", "--impress-host-gb=0", "--impress-io-timeout=2"),
    *("--max-total-tokens=9000", "--chunked-prefill-size=512"),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    has_many = metafunc.config.getoption("--rank-requests") >= MANY
    for name, values in (("skew", [*SKEWS]), ("kill", [*KILLS])):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values if has_many else values[: FEW[name]])


@pytest.fixture(scope="module")
def control(workdir: Path) -> FaultControl:
    return FaultControl(workdir / "ranks-faults.json", seed=5)


@pytest.fixture(scope="module", params=KINDS)
def ranks(
    serve: Serve, stock: Server, control: FaultControl, request: pytest.FixtureRequest
) -> Iterator[Server]:
    """A second life: in the first one the second rank was killed, which ended the server."""
    kind = request.param
    how: dict[str, Any] = {kind: 2, "faults": control, "preload": SKEWED}
    with serve(kind, *FLAGS, quiet=False, **how) as server:
        server.store_prompts(BEFORE)
        wait_until(lambda: list(second(server).glob("segments/*/*.kv")), HANGS_S)
        before = control.hits()["kill rename"]
        control.set(Rule("kill", "rename", SECOND, name="kill rename"))
        with contextlib.suppress(requests.RequestException):
            server.generate(random_tokens(900, 701), 1)
        wait_until(lambda: not server.process.is_alive(), HANGS_S)
        assert control.hits()["kill rename"] == before + 1
    control.set()
    with serve(kind, *FLAGS, **how) as server:
        assert same_as(stock, server, [BEFORE], **EXACT) == ["ssd"]
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
            pool.submit(server.generate, each, 6, return_logprob=True, **fields) for each in prompts
        ]
        return [future.result(HANGS_S) for future in asked]


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
    assert_same(ask_all(server, prompts), answers)
    return paths(answers)


def is_well(server: Server) -> bool:
    with watched(server):
        store = server.stats()["store"]
    return bool(store["health"]["state"] == "ok" and not store["writes_pending"])


def test_exact_answers_are_those_of_one_rank(ranks: Server, stock: Server) -> None:
    prompts = prompts_of(1, 12)
    same_as(stock, ranks, prompts, **EXACT)
    ranks.flush()
    assert same_as(stock, ranks, prompts, **EXACT).count("ssd") > 3
    one, two = told_by(ranks, [])
    assert one["tree"] == two["tree"]


def test_answers_in_few_bits_are_those_of_one_rank(ranks: Server, roomy: Server) -> None:
    """Both load what they stored."""
    prompts, told = [random_tokens(700, 200 + number) for number in range(4)], []
    for server in (roomy, ranks):
        server.store_prompts(*prompts)
        told.append(ask_all(server, prompts, impress_bits=6))
        assert set(paths(told[-1])) == {"ssd"}
        assert {report(answer)["bits"] for answer in told[-1]} == {6.0}
    for one, two in zip(*told, strict=True):
        assert one["output_ids"] == two["output_ids"]


@pytest.fixture
def count(request: pytest.FixtureRequest) -> int:
    """How many requests are asked while a rank differs."""
    return int(request.config.getoption("--rank-requests"))


def ask_often(server: Server, prompts: list[list[int]], want: list[Any], count: int) -> None:
    """Ask so often; answers are right."""
    for _ in range(0, count, len(prompts)):
        assert_same(want, ask_all(server, prompts, **EXACT))
        server.flush()


def assert_healed(server: Server, prompts: list[list[int]], want: list[Any]) -> None:
    """What one rank has lost is stored again: all is loaded, and both have the same trees."""

    def healed() -> bool:
        # Ends may be too short to be loaded.
        told = [report(answer)["tokens"] for answer in ask_all(server, prompts, **EXACT)]
        server.flush()
        loaded = any(tokens["loaded"] for tokens in told)
        return loaded and all(tokens["computed"] < 2 * LEAST for tokens in told)

    wait_until(lambda: is_well(server), HANGS_S)
    wait_until(healed, HANGS_S)
    assert_same(want, ask_all(server, prompts, **EXACT))
    wait_until(lambda: is_well(server), HANGS_S)
    one, two = told_by(server, prompts)
    assert one["tree"] == two["tree"]
    for rank in (one, two):
        pairs = zip(rank["stored"], prompts, strict=True)
        assert all(len(prompt) - LEAST < stored for stored, prompt in pairs), rank["stored"]


def told_by(server: Server, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """A digest of the tree of each rank, and how much of each prompt it has stored."""
    answer = server.post("/tests/ranks", prompts=prompts)
    answer.raise_for_status()
    told: list[dict[str, Any]] = answer.json()
    return told


def test_a_rank_that_differs_changes_no_answer(
    ranks: Server,
    stock: Server,
    control: FaultControl,
    skew: str,
    count: int,
    request: pytest.FixtureRequest,
) -> None:
    """The second one, while so much is asked; then it heals."""
    if count < MANY and request.node.callspec.params["ranks"] == "stages":
        pytest.skip("it takes long, with --rank-requests 100")
    rule, prompts = SKEWS[skew], prompts_of(50 + list(SKEWS).index(skew), 12)
    want = ask_all(stock, prompts)
    # Some are stored before.
    ask_all(ranks, prompts[:2], **EXACT)
    ranks.flush()
    before = control.hits()[rule.name]
    control.set(rule)
    try:
        ask_often(ranks, prompts, want, count)
    finally:
        control.set()
    assert control.hits()[rule.name] > before, "the rank did not differ"
    assert_healed(ranks, prompts, want)
    if rule.fault == "raise":
        ranks.forgive("Unforeseen: injected")


def test_a_rank_that_is_killed(
    workdir: Path, serve: Serve, stock: Server, kill: str, count: int
) -> None:
    """SGLang ends the server, and the next one finds what both ranks have stored."""
    control, rule = FaultControl(workdir / f"killed-{kill}", seed=5), KILLS[kill]
    prompts = prompts_of(70 + list(KILLS).index(kill), 12)
    want = ask_all(stock, prompts)
    how: dict[str, Any] = {"ranks": 2, "faults": control, "preload": SKEWED}
    with serve(f"killed-{kill}", *FLAGS, quiet=False, **how) as server:
        ask_all(server, prompts[:2], **EXACT)
        server.flush()
        told = [rank["stored"] for rank in told_by(server, prompts)]
        before = [min(counts) for counts in zip(*told, strict=True)]
        assert any(before)
        control.set(rule)
        with contextlib.suppress(requests.RequestException):
            ask_often(server, prompts, want, count)
        assert control.hits()[rule.name], "no rank was killed"
        wait_until(lambda: not server.process.is_alive(), HANGS_S)
    control.set()
    with serve(f"killed-{kill}", *FLAGS, **how) as server:
        one, two = told_by(server, prompts)
        assert one["tree"] == two["tree"]
        for rank in (one, two):
            pairs = zip(rank["stored"], before, strict=True)
            assert all(now >= earlier for now, earlier in pairs), "something is lost"
        ask_often(server, prompts, want, count)
        assert_healed(server, prompts, want)


@pytest.mark.long
@pytest.mark.parametrize("latent", [False, True])
def test_ranks_on_two_nodes(workdir: Path, serve: Serve, latent: bool) -> None:
    """Each node has a drive of its own, also for what both have; a second life finds all of it."""
    prompts, told, flags = prompts_of(90, 6), [], FLAGS
    how: dict[str, Any] = {"ranks": 2, "waits": False, "quiet": False}
    if latent:
        how |= {"preload": LATENT, "model": make_model("deepseek_v2", workdir / "deepseek-nodes")}
        flags = (*FLAGS, "--impress-keep=auto")
    names = [f"node-{number}-{latent}" for number in range(2)]
    for _ in range(2):
        with contextlib.ExitStack() as stack, contextlib.closing(ReservedPort()) as port:
            both = "--nnodes=2", f"--dist-init-addr=127.0.0.1:{port.number}"
            nodes = [
                stack.enter_context(
                    serve(names[number], *flags, *both, f"--node-rank={number}", **how)
                )
                for number in range(2)
            ]
            nodes[0].wait_ready()
            for _ in range(2):
                told.append(ask_all(nodes[0], prompts, **EXACT))
                nodes[0].flush()
            for node in nodes:
                node.assert_quiet()
    assert [("ssd" in paths(answers)) for answers in told] == [False, True, True, True]
    for answers in told[1:]:
        assert_same(told[0], answers)
    one, two = ([*(workdir / f"store-{name}").glob("*/segments/*/*.kv")] for name in names)
    assert len(one) == len(two) > 0


def test_what_the_agreement_costs(
    serve: Serve, workdir: Path, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A share of passes of about 10 ms, while prompts are written and loaded, and while not."""
    if count < MANY:
        pytest.skip("it measures, with --rank-requests 300")
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    model = make_model("llama", workdir / "cost", **shape)
    control = FaultControl(workdir / "cost-faults")
    with serve("cost", model=model, ranks=2, faults=control, preload=SKEWED) as server:
        prompts = [random_tokens(600, 600 + number) for number in range(8)]
        lines = []
        for what, length in (("computes and writes", 600), ("loads", 600), ("neither", 40)):
            server.flush()
            before = told_by(server, [])[0]["cost"]
            server.generate_together([prompt[:length] for prompt in prompts], 100)
            after = told_by(server, [])[0]["cost"]
            cost = {name: after[name] - before.get(name, 0) for name in after}
            lines.append(f"{what}: {cost}")
            assert cost["votes"] <= cost["passes"]
        with capsys.disabled():
            print("", *lines, sep="\n")


def test_a_file_that_is_gone_or_damaged_on_one_rank(ranks: Server, stock: Server) -> None:
    """What the second rank has lost all compute, and load the next time."""
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
    """Orders do so between batches, too."""
    prompts = prompts_of(7, 6)
    ranks.store_prompts(*prompts)
    with ThreadPoolExecutor(1) as pool, watched(ranks):
        asked = pool.submit(ask_all, ranks, prompts, **EXACT)
        while not asked.done():
            assert ranks.post("/impress/purge", all=True).ok
        assert_same(ask_all(stock, prompts), asked.result(HANGS_S))
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


def test_requests_are_put_back_on_all_ranks(serve: Serve, stock: Server, roomy: Server) -> None:
    """And what one rank has stored alone is a miss for two."""
    prompt = roomy.store(800, 500)
    assert paths([roomy.generate(prompt, 1)]) == ["ssd"]
    flags = ("--max-total-tokens=6000", "--disable-overlap-schedule")
    with serve("ranks-anew", *flags, store="roomy", ranks=2, retracts=True) as server:
        assert same_as(stock, server, [prompt], **EXACT) == ["computed"]
        prompts = prompts_of(8, 12)
        for _ in range(2):
            same_as(stock, server, prompts, **EXACT)
            server.flush()
