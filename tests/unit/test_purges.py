"""What is pinned, what leaves the store by an order or by its age, and what is remembered of it."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from impress_sglang.errors import SegmentUnreadable
from impress_sglang.storage.directory import PINS
from impress_sglang.store import orders as orders_module
from impress_sglang.store.miss_log import MissCause, MissLog, MissRecord
from impress_sglang.store.orders import MAX_JOBS, MultiStepJobs, Purge
from impress_sglang.store.prefix_hashes import BLOCK_TOKENS
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.writing import StoreOutcome
from tests.faults import FaultyFileSystem, Rule
from tests.unit import store_factory as stores
from tests.unit.kv_factory import as_tokens
from tests.unit.store_checks import check_store
from tests.unit.store_factory import Workbench, check_rows, gb, length, look_up, lose, prompt
from tests.unit.waiting import Clock, wait_until


def pin(store: PrefixStore, tokens: Any, namespace: str = "") -> str | None:
    return store.pins.pin(store.namespace(namespace), as_tokens(tokens))


def steps_of(purge: Purge, store: PrefixStore, most: int = 64) -> list[Counter[str]]:
    steps = []
    while purge.unfinished:
        steps.append(purge.step(store, most))
        check_store(store)
    return steps


def forget(store: PrefixStore, tokens: Any) -> Counter[str]:
    """What is so little that one step is enough."""
    (step,) = steps_of(Purge(store.namespace(""), as_tokens(tokens)), store)
    return step


def test_the_state_behind_a_pinned_prefix_stays(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders_module, "_REFRESH_SECONDS", -1.0)
    store = bench.open(ssd_gb=gb(6 * bench.one))
    bench.put(store, prompt(1))
    assert pin(store, prompt(1)) is None
    bench.put(store, (*prompt(1), -1, -1))
    bench.put_all(store, *range(50, 58))
    assert length(store, (*prompt(1), -1, -1)) == 10
    assert forget(store, prompt(1))["tokens"] == 8


def test_all_that_a_pinned_prefix_builds_on_stays_after_a_restart_as_well(bench: Workbench) -> None:
    store = bench.open()
    for count in (8, 16):
        bench.put(store, prompt(1, count), namespace="salt")
    for _ in range(2):
        assert pin(store, prompt(1, 16), "salt") is None
    store = bench.reopen(store, ssd_gb=gb(8 * bench.one))
    bench.put_all(store, *range(50, 62))
    check_rows(store, prompt(1, 16), namespace="salt")
    assert store.pins.unpin(store.namespace("salt"), as_tokens(prompt(1, 16))) == 1
    assert not len(bench.reopen(store).pins)


def test_what_is_stored_anew_of_a_pinned_prefix_is_pinned(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders_module, "_REFRESH_SECONDS", 0.0)
    store = bench.open(ssd_gb=gb(4 * bench.one))
    bench.put(store, prompt(1))
    assert pin(store, prompt(1)) is None
    assert store.pins.summary() == {"prefixes": 1, "bytes": bench.one}
    lose(bench, store, stores.name_of(store, prompt(1)))
    assert store.pins.summary() == {"prefixes": 1, "bytes": 0}
    bench.put(store, prompt(1))
    bench.put_all(store, *range(50, 58))
    check_rows(store, prompt(1))


@pytest.mark.parametrize("count", [8, 16])
def test_a_pinned_prefix_stays_until_a_second_look_at_it(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(orders_module, "_REFRESH_SECONDS", -1.0)
    store = bench.open(ssd_gb=gb(4 * bench.one))
    for stop in (8, 16):
        bench.put(store, prompt(1, stop))
    assert pin(store, prompt(1, 16)) is None
    spans = look_up(store, prompt(1, count)).spans
    store.report(SegmentUnreadable(spans[-1].segment.segment_id, "a test"))
    for number in range(50, 53):
        assert bench.offer(store, prompt(number)) is StoreOutcome.ACCEPTED
        store.writes.drain()
    stores.look_again(store)
    check_rows(store, prompt(1, 16))


@pytest.mark.parametrize("content", [b"", b"[", b"{}", b"[1]", b'[{"namespace": "a"}]', b"\xff"])
def test_damaged_pins_are_none(bench: Workbench, store: PrefixStore, content: bytes) -> None:
    bench.put(store, prompt(1))
    assert pin(store, prompt(1)) is None
    bench.close(store)
    (path,) = bench.root.glob(f"*/{PINS}")
    path.write_bytes(content)
    store = bench.open()
    assert not len(store.pins)
    assert pin(store, prompt(1)) is None
    assert len(bench.reopen(store).pins) == 1


@pytest.mark.parametrize("namespace", ["salt", None])
def test_a_purge_of_a_namespace_and_of_all(bench: Workbench, namespace: str | None) -> None:
    store = bench.open()
    bench.put_all(store, *range(5), namespace="salt")
    bench.put(store, prompt(1))
    assert pin(store, prompt(3), "salt") is None and pin(store, prompt(1)) is None
    steps = steps_of(Purge(namespace and store.namespace(namespace)), store, 2)
    gone = 5 if namespace else 6
    assert [step["segments"] for step in steps] == [2, 2, gone - 4]
    assert sum(step["bytes"] for step in steps) == gone * bench.one
    assert len(store.tree) == 6 - gone == len(store.pins)
    wait_until(lambda: len(bench.files()) == 6 - gone)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("clock", [0, -3600])
def test_what_is_being_written_is_purged_as_well(bench: Workbench, late: bool, clock: int) -> None:
    """Also where its last layer was read before anybody said so, or the clock was set back."""
    store = bench.open()
    gate = bench.begin(store, prompt(1))
    for write in store.writes:
        write.written -= clock
    if late:
        gate.opened.set()
        wait_until(lambda: len(list(bench.root.glob("*/segments/*/*.kv"))) == 1)
    purged = forget(store, prompt(1))
    assert purged["writes"] + purged["segments"] == 1
    gate.opened.set()
    store.writes.drain()
    check_store(store)
    assert not len(store.tree)
    wait_until(lambda: not bench.files())
    assert bench.done == [prompt(1)]


HOUR = 3600.0


def test_what_is_too_old_is_removed_used_or_not(bench: Workbench) -> None:
    store = bench.open(ttl=HOUR)
    bench.put_all(store, 1, 2)
    bench.put(store, prompt(1, 16))
    assert pin(store, prompt(1)) is None
    written = time.time() - 2 * HOUR
    os.utime(stores.path_of(bench, look_up(store, prompt(1))), (written, written))
    store = bench.reopen(store, ttl=9 * HOUR)
    assert length(store, prompt(1, 16)) == 16

    store = bench.reopen(store, ttl=HOUR)
    store.poll()

    assert length(store, prompt(1, 16)) == 0 and length(store, prompt(2)) == 8
    wait_until(lambda: len(bench.files()) == 2)
    assert (store.stats.segments_expired, store.stats.segments_evicted) == (1, 0)
    long = as_tokens([*prompt(1), *range(60)])
    assert store.miss_log.find(store.namespace(""), long, 0) is None, "it had not a whole block"


@pytest.mark.parametrize("namespace", ["", None])
def test_a_purge_by_age_looks_at_few_in_a_step(
    bench: Workbench, store: PrefixStore, monkeypatch: pytest.MonkeyPatch, namespace: str | None
) -> None:
    monkeypatch.setattr(orders_module, "_MAX_CANDIDATES", 4)
    bench.put_all(store, *range(10))
    for number in (1, 8):
        look_up(store, prompt(number)).spans[0].segment.written -= 2 * HOUR
    name = None if namespace is None else store.namespace(namespace)
    steps = steps_of(Purge(name, older_than=HOUR), store)
    assert [step["segments"] for step in steps] == [1, 0, 1]
    assert stores.lengths(store, *range(10)) == [8, 0, *[8] * 6, 0, 8]


def test_what_cannot_be_asked_for_its_age_is_too_old(bench: Workbench) -> None:
    store = bench.open(ttl=HOUR)
    bench.put_all(store, 1, 2)
    path = stores.path_of(bench, look_up(store, prompt(1)))
    bench.close(store)
    files = FaultyFileSystem()
    with files.faults.injected(Rule("EIO", "stat", f"*/{path.name}")):
        store = bench.open(ttl=HOUR, files=files)
    store.poll()
    assert (length(store, prompt(1)), length(store, prompt(2))) == (0, 8)


@pytest.mark.parametrize("ttl", [HOUR, 9 * HOUR, 0])
def test_the_shorter_time_counts(bench: Workbench, ttl: float) -> None:
    store, asked = bench.open(ttl=ttl), (0, HOUR, 9 * HOUR)
    for number, seconds in enumerate(asked):
        bench.put(store, prompt(number), ttl=seconds)
    for wait, due in ((HOUR - 60, 0), (HOUR + 10, HOUR)):
        store.expire(time.time() + wait)
        stay = [min(seconds or math.inf, ttl or math.inf) > due for seconds in asked]
        assert stores.lengths(store, 0, 1, 2) == [8 * stays for stays in stay]


@pytest.mark.parametrize("ended", ["", "0", "3"])
def test_who_goes_on_finds_the_same_job_unless_there_are_too_many(ended: str) -> None:
    jobs = MultiStepJobs[str, object]()
    names = [str(number) for number in range(MAX_JOBS)]
    first = {name: jobs.get_or_begin(name, object) for name in names}
    assert all(jobs.get_or_begin(name, object) is first[name] for name in names)
    jobs.pop(ended, None)
    jobs.get_or_begin("new", object)
    assert len(jobs) == MAX_JOBS
    gone = {ended or "0"}
    assert {name for name in names if jobs.get(name) is not first[name]} == gone


def test_what_a_request_stores_goes_when_it_says(bench: Workbench) -> None:
    """Also after a restart, without the index, where it is pinned, and below others."""
    store, began = bench.open(), time.time()
    bench.put(store, prompt(1), ttl=HOUR)
    bench.put(store, prompt(1, 16))
    bench.put(store, prompt(2), ttl=3 * HOUR)
    assert bench.offer(store, prompt(2), ttl=1) is StoreOutcome.ALREADY_STORED
    assert pin(store, prompt(1)) is None

    def stored(after: float) -> list[int]:
        store.expire(began + after)
        check_store(store)
        wait_until(lambda: len(bench.files()) == sum(s.on_disk for s in store.tree.segments()))
        return [length(store, prompt(1, 16)), length(store, prompt(2)), len(bench.files())]

    assert stored(HOUR - 10) == [16, 8, 3]
    bench.close(store)
    next(bench.root.glob("*/journal")).unlink()
    store = bench.reopen(bench.open())
    assert stored(HOUR - 10) == [16, 8, 3]
    assert stored(HOUR + 10) == [0, 8, 2]
    bench.put(store, prompt(1))
    assert stored(HOUR + 10) == [16, 8, 3], "who stores what is missing sets its time"
    assert stored(6 * HOUR) == [16, 0, 2]


def test_what_is_due_while_it_is_written_does_not_stay(bench: Workbench) -> None:
    store = bench.open()
    bench.begin(store, prompt(1), ttl=1)
    store.expire(time.time() + 2)
    store.writes.drain()
    assert length(store, prompt(1)) == 0 and not bench.files()


LENGTH = 4 * BLOCK_TOKENS


def tokens(number: int, length: int = LENGTH) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return as_tokens(range(10_000 * number, 10_000 * number + length))


FORK = np.concatenate([tokens(1, 100), tokens(2)])
# Who asks: namespace, tokens, and from which on; and how many of these are gone.
ASKED = {
    "more tokens": ("a", tokens(1, LENGTH + 30), 0, LENGTH),
    "fewer": ("a", tokens(1, 2 * BLOCK_TOKENS + 1), 0, 128),
    "later ones": ("a", tokens(1), 70, LENGTH - 70),
    "a fork": ("a", FORK, 0, BLOCK_TOKENS),
    "behind the fork": ("a", FORK, BLOCK_TOKENS, 0),
    "another namespace": ("b", tokens(1), 0, 0),
    "another prompt": ("a", tokens(2), 0, 0),
    "another start": ("a", tokens(1)[1:], 0, 0),
    "no whole block": ("a", tokens(1, BLOCK_TOKENS - 1), 0, 0),
    "nothing": ("a", tokens(1, 0), 0, 0),
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_loss_is_found_by_who_has_the_same_tokens(asked: str) -> None:
    clock = Clock()
    miss_log = MissLog(clock=clock)
    miss_log.record_tokens("a", tokens(1), MissCause.EVICTED)
    clock.now += 5
    *question, count = ASKED[asked]
    assert miss_log.find(*question) == (
        MissRecord(MissCause.EVICTED, count, 5.0) if count else None
    )


def test_what_the_store_removes_is_noted(bench: Workbench, store: PrefixStore) -> None:
    first, second = ([*range(LENGTH), *tokens(number).tolist()] for number in (1, 2))
    for sequence in (first, second):
        bench.put(store, sequence, namespace="salt")

    lose(bench, store, stores.name_of(store, second, -1, namespace="salt"))

    name = store.namespace("salt")
    found = store.miss_log.find(name, as_tokens(second), LENGTH)
    assert found is not None and (found.cause, found.num_tokens) == (MissCause.DAMAGED, LENGTH)
    assert store.miss_log.find(store.namespace(""), as_tokens(second), LENGTH) is None
