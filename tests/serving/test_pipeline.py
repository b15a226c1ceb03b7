"""Reading ahead, the choice between loading and computing, metrics."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import pytest

from impress_sglang.serving.metrics import COUNTERS, GAUGES
from tests.serving.compare import assert_same, report
from tests.serving.conftest import Serve, module_server
from tests.serving.harness import BENCH, Server, metrics_of
from tests.serving.test_jobs import STUCK_MBPS
from tests.serving.tiny_models import random_tokens
from tests.unit.waiting import wait_until

FLAGS = ("--impress-device-gb=0", "--max-total-tokens=9000", "--max-running-requests=1")


@pytest.fixture(scope="module")
def deciding(serve: Serve) -> Iterator[Server]:
    """A server that may compute instead of loading, and serves one request at a time."""
    flags = (*FLAGS, "--impress-load=faster", "--impress-host-gb=0", "--impress-bits=auto")
    with serve("deciding", *flags, preload=BENCH) as server:
        # What computing takes is learnt from some long prompts.
        for seed in range(4):
            server.generate(random_tokens(1500, seed=900 + seed), 1)
            server.flush()
        yield server


@pytest.fixture(autouse=True)
def _full_speed(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "deciding" in request.fixturenames:
        server = request.getfixturevalue("deciding")
        server.emulate_ssd(0)
        server.assert_whole()


def test_auto_is_exact_where_reading_hides_behind_computing(
    deciding: Server, stock: Server
) -> None:
    """A long question, alone, and a drive that is quick for so small a model."""
    prompt = [*random_tokens(1500, seed=902), *random_tokens(1200, seed=5)]
    answer = deciding.generate(prompt, 8, return_logprob=True)
    said = report(answer)
    assert said["path"] == "ssd" and said["bits"] == 16.0 and not said["approximate"]
    assert_same([stock.generate(prompt, 8, return_logprob=True)], [answer])


def test_a_prefix_is_computed_where_reading_takes_longer(deciding: Server, stock: Server) -> None:
    prefix = random_tokens(1500, seed=900)
    deciding.emulate_ssd(0.5)
    said = []
    for seed in range(12):
        prompt = [*prefix, *random_tokens(12, seed=seed)]
        answer = deciding.generate(prompt, 3)
        deciding.flush()
        said.append(report(answer))
        if said[-1]["decision"] == "recompute":
            # A small read in the background keeps the estimate fresh.
            assert said[-1]["path"] == "computed"
            assert said[-1]["why"]["reason"] == "computed_faster"
            assert said[-1]["estimated_load_ms"] > said[-1]["estimated_recompute_ms"] > 0
            assert answer["output_ids"] == stock.generate(prompt, 3)["output_ids"]
            break
    assert said[-1]["decision"] == "recompute", [
        (one["estimated_load_ms"], one["estimated_recompute_ms"], one["wait_ms"]) for one in said
    ]
    assert deciding.stats()["totals"]["requests_declined"] >= 1


LOADS = (
    *("--impress-host-gb=0.02", "--impress-io-timeout=600"),
    *("--impress-approximation-depth=0", "--impress-schedule=classes"),
)
# It serves one request at a time, and always loads.
narrow = module_server("narrow", *FLAGS, *LOADS, "--enable-metrics", preload=BENCH)


def test_prometheus_is_told_what_the_statistics_say(narrow: Server) -> None:
    prefix = narrow.store(1000, seed=670)
    for question in (5, 6, 7):
        assert report(narrow.generate([*prefix, question], 1))["path"] == "ssd"
        narrow.flush()
    # Writes end behind the requests; a server that sleeps while it is idle says so when it wakes.
    narrow.generate([1, 2, 3], 1)
    stats, found = narrow.stats(), metrics_of(narrow)
    named = {name.split(" ")[0] for name in found}
    # Of what did not happen.
    silent = {"requests_not_served_total", "requests_not_stored_total", "cache_evicted_score"}
    for metric in (*COUNTERS, *GAUGES):
        told = metric.read(stats)
        assert (metric.name in silent) == (not told) and (metric.name in named) == bool(told)
        for labels, value in told.items():
            # Prometheus may tell labels in another order.
            names = {" ".join([metric.name, *order]) for order in permutations(labels)}
            assert value == pytest.approx(next(found[name] for name in names & found.keys()))
    for histogram in ("load_seconds_count", "bits_count"):
        assert found[histogram] == stats["totals"]["requests_ssd"]
    assert stats["store"]["buffer_used_bytes"] == 0


def test_who_has_to_be_read_lets_others_pass(narrow: Server) -> None:
    """While one runs, three wait, the slowest first; its drive is freed behind the others."""
    *others, stored = (narrow.store(1000, seed=640 + number) for number in range(6))
    narrow.emulate_ssd(0.3)
    # From these the server learns how slow the drive is.
    for other in others:
        narrow.generate([*other, 5], 1)
    narrow.flush()
    narrow.emulate_ssd(STUCK_MBPS)
    resident = random_tokens(1000, seed=651)
    narrow.generate(resident, 1)
    ends: list[str] = []

    def ask(name: str, prompt: list[int], new_tokens: int = 1) -> None:
        narrow.generate(prompt, new_tokens)
        ends.append(name)
        if name == "unknown":
            narrow.emulate_ssd(0)

    waiting = {
        "runs": (random_tokens(20, seed=652), 300),
        "stored": ([*stored, 5], 1),
        "unknown": (random_tokens(900, seed=653), 1),
        "resident": ([*resident, 5], 1),
    }
    with ThreadPoolExecutor(len(waiting)) as pool:
        for count, (name, asked) in enumerate(waiting.items(), 1):
            pool.submit(ask, name, *asked)
            wait_until(lambda count=count: narrow.live() == count)
    assert ends == ["runs", "resident", "unknown", "stored"]
