"""Load jobs in real servers: who waits for which, who passes, what ends them, and what is right."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from bench.core.servers import Stream
from bench.core.session import BenchFailed
from tests.serving.compare import assert_same, paths, report
from tests.serving.conftest import Serve, module_server
from tests.serving.damage import store_damaged
from tests.serving.harness import BENCH, Server
from tests.serving.tiny_models import random_tokens
from tests.unit.waiting import wait_until

STAYS_WHOLE = "jobs"
NO_CACHES = ("--impress-device-gb=0", "--impress-host-gb=0")
# Until the drive is released: a layer of 1,500 tokens takes minutes.
STUCK_MBPS = 0.001


FLAGS = ("--impress-bits=exact", "--max-total-tokens=9000", "--impress-io-timeout=600")
# Exact KVs, read from SSD each time, as slowly as a test wants.
jobs = module_server("jobs", *FLAGS, *NO_CACHES, preload=BENCH)


@contextlib.contextmanager
def slow(server: Server, mbps: float = STUCK_MBPS) -> Iterator[None]:
    """A drive that reads no faster for the time of a `with` block."""
    server.emulate_ssd(mbps)
    try:
        yield
    finally:
        server.emulate_ssd(0)


def loading(server: Server) -> int:
    """Slots that jobs have."""
    return int(server.stats(check=False)["device_pool"]["loading_tokens"])


def test_eight_at_once_read_a_prefix_once_and_all_say_so(jobs: Server, stock: Server) -> None:
    prefix = jobs.store(1500, seed=1)
    prompts = [[*prefix, *random_tokens(20, seed=10 + number)] for number in range(8)]
    alone = report(jobs.generate(prompts[0], 1))
    jobs.flush()
    with ThreadPoolExecutor(8) as pool:
        with slow(jobs):
            asked = [pool.submit(jobs.generate, each, 6, return_logprob=True) for each in prompts]
            wait_until(lambda: jobs.live() == 8, 60)
        answers = [future.result() for future in asked]
    assert_same(stock.generate_together(prompts, 6, return_logprob=True), answers)
    told = [report(answer) for answer in answers]
    assert sorted(said["why"]["reason"] for said in told) == ["loaded"] + ["shared"] * 7
    assert sorted(said["loaded_tokens"] for said in told) == [0] * 7 + [1500]
    assert sorted(said["shared_tokens"] for said in told) == [0] + [1500] * 7
    assert sum(said["ssd_bytes"] for said in told) == alone["ssd_bytes"] > 0
    assert all(said["tokens"]["computed"] == 20 for said in told)


def test_others_pass_one_that_waits_and_a_stream_goes_on(jobs: Server, stock: Server) -> None:
    prompt = [*jobs.store(1500, seed=21), *random_tokens(20, seed=22)]
    resident = random_tokens(400, seed=23)
    jobs.generate(resident, 1)
    stream = Stream(jobs, random_tokens(30, seed=24), 4000)
    stream.wait(6)
    with ThreadPoolExecutor(1) as pool:
        with slow(jobs):
            waiting = pool.submit(jobs.generate, prompt, 6, return_logprob=True)
            wait_until(lambda: loading(jobs) > 0, 60)
            passing = [jobs.generate([*resident, token], 2) for token in (5, 6)]
            passing.append(jobs.generate(random_tokens(300, seed=25), 2))
            stream.wait(stream.came[-1].tokens + 20)
            assert loading(jobs) > 0 and not waiting.done()
        answer = waiting.result()
    jobs.post("/abort_request", abort_all=True)
    with pytest.raises(BenchFailed, match="ended after"):
        stream.join()
    assert paths(passing) == ["device", "device", "computed"]
    assert_same([stock.generate(prompt, 6, return_logprob=True)], [answer])
    assert paths([answer]) == ["ssd"]


def abort(server: Server, rid: str) -> None:
    server.post("/abort_request", rid=rid).raise_for_status()


def test_who_is_aborted_leaves_nothing_and_who_waits_with_it_is_served(
    jobs: Server, stock: Server
) -> None:
    """While it loads, alone and with another, while it waits for room, and when it is over."""
    prefix, large = jobs.store(1500, seed=31), jobs.store(6500, seed=32)
    prompts = [[*prefix, *random_tokens(20, seed=33 + number)] for number in range(3)]
    other = random_tokens(1500, seed=44)
    with ThreadPoolExecutor(4) as pool:
        with slow(jobs):
            alone = pool.submit(jobs.ask, prompts[0], 4, rid="alone.")
            wait_until(lambda: loading(jobs) == 1500, 60)
            assert jobs.post("/flush_cache").status_code == 400
            abort(jobs, "alone.")
            assert "abort" in alone.result().text.lower() and loading(jobs) == 0
            # The loader still reads a layer, and writes nothing to slots that are others' now.
            assert jobs.post("/flush_cache").status_code == 200
            answer = jobs.generate(other, 6, return_logprob=True)
            assert_same([stock.generate(other, 6, return_logprob=True)], [answer])
        with slow(jobs):
            first = pool.submit(jobs.ask, prompts[1], 4, rid="first.")
            wait_until(lambda: loading(jobs) == 1500, 60)
            second = pool.submit(jobs.generate, prompts[2], 4, return_logprob=True)
            wait_until(lambda: jobs.live() == 2, 60)
            roomless = pool.submit(jobs.ask, [*large, 5], 1500, rid="roomless.")
            wait_until(lambda: jobs.live() == 3, 60)
            assert loading(jobs) == 1500, "both do not fit"
            for rid, future in (("first.", first), ("roomless.", roomless)):
                abort(jobs, rid)
                assert "abort" in future.result().text.lower()
            assert loading(jobs) == 1500
        answer = second.result()
    assert_same([stock.generate(prompts[2], 4, return_logprob=True)], [answer])
    assert report(answer)["loaded_tokens"] == 1500
    abort(jobs, "first.")
    # It runs by then.
    stored = jobs.store(600, seed=36)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(jobs.ask, [*stored, 5], 2000, rid="late.")
        wait_until(lambda: jobs.live() == 1, 60)
        time.sleep(0.5)
        abort(jobs, "late.")
        assert "abort" in late.result().text.lower()


@pytest.mark.parametrize(("bits", "flushes"), [(6, True), ("exact", False)])
def test_each_turn_of_a_chat_computes_only_what_is_new(
    jobs: Server, bits: object, *, flushes: bool
) -> None:
    wanted = {"impress_bits": bits}
    chat = jobs.store(500, seed=70 + flushes)
    for turn in range(4):
        new = random_tokens(90, seed=72 + turn)
        # Fewer tokens than a chunk are not stored by themselves.
        answer = jobs.generate([*chat, *new], 80, **wanted)
        told = report(answer)
        # The last token of an answer is computed for nobody.
        assert told["tokens"]["computed"] == 90 + (turn > 0), told
        assert told["path"] == ("ssd" if flushes or not turn else "device")
        assert told["approximate"] == (bits != "exact")
        chat = [*chat, *new, *answer["output_ids"]]
        if flushes:
            jobs.flush()


AGAIN = "begins again: what it used could not be loaded"


@pytest.fixture(scope="module")
def early(jobs: Server) -> Server:
    """It knows what its passes take, so that they begin before all layers are there."""
    for seed in range(3):
        jobs.generate(random_tokens(3000, seed=100 + seed), 1)
        jobs.flush()
    return jobs


# How fast a drive is with which a pass begins between two layers depends on the machine.
RATES = (1.5, 3, 6, 1.5, 3, 6, 12, 0.8)


def test_a_pass_begins_before_the_last_layers_are_there(early: Server, stock: Server) -> None:
    prompt = [*early.store(1500, seed=111), *random_tokens(1900, seed=112)]
    expected = stock.generate(prompt, 6, return_logprob=True)
    for rate in RATES[:4]:
        with slow(early, rate):
            answer = early.generate(prompt, 6, return_logprob=True, impress_store=False)
        assert_same([expected], [answer])
        told = report(answer)
        assert told["loaded_tokens"] == 1500 and told["path"] == "ssd" and told["ssd_bytes"] > 0
        early.flush()
    assert AGAIN not in early.log_text()


def test_a_layer_that_is_damaged_behind_a_pass_that_began(early: Server, stock: Server) -> None:
    """All who attended to it begin again, and what they left is not kept."""
    for number, rate in enumerate(RATES):
        prefix = store_damaged(early, 1500, seed=121 + number)
        prompt = [*prefix, *random_tokens(1900, seed=150)]
        expected = stock.generate(prompt, 6, return_logprob=True)
        with slow(early, rate):
            answer = early.generate(prompt, 6, return_logprob=True)
        assert_same([expected], [answer])
        assert report(answer)["loaded_tokens"] == 0
        resident = early.generate(prompt, 6, return_logprob=True)
        assert_same([expected], [resident])
        early.flush()
        if AGAIN in early.log_text():
            return
    raise AssertionError("no pass began early")


def test_a_server_ends_while_a_job_runs(serve: Serve) -> None:
    """And what is stored is there when it starts again."""
    prompt = [*random_tokens(1500, seed=141), 5]
    flags = ("--impress-bits=exact", *NO_CACHES)
    with ThreadPoolExecutor(1) as pool, serve("ends", *flags, preload=BENCH, quiet=False) as server:
        server.store_prompts(prompt[:-1])
        server.emulate_ssd(0.3)
        asked = pool.submit(server.ask, prompt, 1)
        wait_until(lambda: loading(server) > 0, 60)
        server.stop()
        assert not server.process.is_alive(), "it does not end by itself"
        with contextlib.suppress(requests.RequestException):
            asked.result()
        server.check_log()
    with serve("ends", *flags) as server:
        assert paths([server.generate(prompt, 1)]) == ["ssd"]
