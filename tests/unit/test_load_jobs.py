"""Jobs on a real store: what they bring, what they leave when they end early, and other threads."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from impress_sglang.errors import PrefixUnreadable
from impress_sglang.loops import groups
from impress_sglang.serving.kv_class import KVClass
from impress_sglang.serving.load_jobs import JobState, LoadJob
from impress_sglang.transfer.buffers import BufferPool
from tests.faults import Rule
from tests.unit import kv_factory as kv
from tests.unit import store_factory as stores
from tests.unit.job_world import new_job
from tests.unit.load_desk import SHAPE, Desk, Make, desks_in
from tests.unit.store_checks import check_placement, check_store
from tests.unit.store_factory import look_up, prompt
from tests.unit.waiting import calls_of, wait_until

EXACT, CODES = CLASSES = KVClass(), KVClass(6.0)
SMALL, LARGE = 2e-5, 2e-3
CACHES = {
    "none": {},
    "host small": {"host_gb": SMALL},
    "host large": {"host_gb": LARGE},
    "both small": {"host_gb": SMALL, "device_gb": SMALL},
    "both large": {"host_gb": LARGE, "device_gb": LARGE},
    "device small, host large": {"host_gb": LARGE, "device_gb": SMALL},
}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """As a server does at its start: it may take longer than a test waits."""
    assert groups.restore_keys


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from desks_in(tmp_path)


FIRST = prompt(1, 70)
SECOND = (*FIRST, *prompt(7, 33))
OTHER = prompt(2, 150)


@pytest.mark.parametrize("caches", CACHES.values(), ids=CACHES)
def test_slots_get_what_is_stored(make: Make, caches: dict[str, float]) -> None:
    desk = make(**caches)
    desk.put(FIRST, SECOND, OTHER)
    for kv_class in CLASSES:
        desk.empty()
        for tokens, start in ((OTHER, 0), (SECOND, 0), (SECOND, 72), (FIRST, 16), (OTHER, 149)):
            job = desk.load(tokens, kv_class, start)
            desk.check(job)
            assert (
                job.read_stats.ssd_bytes + job.read_stats.host_chunks + job.read_stats.device_chunks
                > 0
            )
            assert job.bits == kv_class.bits
        assert desk.pools.empty(desk.free), "nothing else was written"
    check_store(desk.store)


def test_a_failed_job_ends_behind_what_the_device_writes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its slots would be others' while it still writes to them."""
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    desk, stream = make(), mock.Mock()
    desk.put(OTHER)
    path = stores.path_of(desk.bench, look_up(desk.store, OTHER))
    kv.flip_byte(path, path.stat().st_size - 4096)
    written = stream.record_event.return_value
    desk.loader._stream = stream

    job = desk.load(OTHER, CODES)

    assert job.state is JobState.FAILED and job.layers_loaded
    assert stream.record_event.call_count == job.layers_loaded == len(job.layer_events)
    written.synchronize.assert_called_once()


@pytest.mark.parametrize(
    "rule",
    [
        Rule("EIO", "block"),
        Rule("EIO", "open", "*.kv"),
        Rule("raise", "open", "*.kv"),
        Rule("raise", "start", count=1),
        Rule("raise", "finish", count=1),
        Rule("short", "block", count=1),
        Rule("flip", "block"),
    ],
    ids=lambda rule: rule.name,
)
@pytest.mark.parametrize("readahead", [0.0, 0.2])
def test_what_a_drive_does_ends_jobs_and_not_the_loader(
    make: Make, rule: Rule, readahead: float
) -> None:
    desk = make(readahead=readahead)
    desk.put(FIRST, OTHER)
    with desk.faults.injected(dataclasses.replace(rule, hits=0, seen=0)):
        jobs = [desk.begin(*each) for each in itertools.product((FIRST, OTHER), CLASSES)]
        desk.wait(*jobs)
    # What is missing of a short read is read again.
    assert rule.fault == "short" or any(job.state is JobState.FAILED for job in jobs)
    for job in jobs:
        if job.state is JobState.FAILED:
            assert isinstance(job.error, PrefixUnreadable)
            desk.store.report(job.error)
        else:
            desk.check(job)
    stores.until(desk.store, lambda: desk.store.health.state == "ok")
    stores.look_again(desk.store)
    desk.check(desk.load(OTHER))


def give_to_others(desk: Desk, job: LoadJob, number: float) -> None:
    """They write to the slots that it had."""
    for pool in (*desk.pools.keys, *desk.pools.values):
        pool[job.target_slots] = number


class TestRevoking:
    @pytest.mark.parametrize("kv_class", CLASSES, ids=["exact", "codes"])
    @pytest.mark.parametrize("after", [0, 1, 2])
    def test_while_the_drive_hangs(self, make: Make, kv_class: KVClass, after: int) -> None:
        """Neither it nor the end of a server waits; who gets the slots keeps what it writes."""
        desk = make(readahead=0.0)
        desk.put(FIRST, OTHER)
        hang = Rule("hang", "block", after=after)
        with desk.faults.injected(hang):
            job = desk.begin(OTHER, kv_class)
            wait_until(lambda: hang.hits)
            job.revoke()
            assert job.revoked and not job.done.is_set() and job.target_slots is not None
            give_to_others(desk, job, 5.0)
            assert not desk.loader.close(0.05) and not job.done.is_set()
        desk.wait(job)
        assert job.state is JobState.DROPPED and job.error is None
        assert all(bool((rows == 5.0).all()) for rows in desk.pools.rows(job.target_slots))
        assert desk.loader.close(20.0)

    def test_before_its_files_are_opened(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody waits for a drive on its behalf: what comes after it would wait as well."""
        desk = make()
        desk.put(FIRST, OTHER)
        opened = calls_of(monkeypatch, desk.store.readers, "open")
        hang = Rule("hang", "open", "*.kv")
        with desk.faults.injected(hang):
            first, *others = [desk.begin(tokens) for tokens in (FIRST, OTHER, OTHER)]
            wait_until(lambda: hang.hits)
            for job in others:
                job.revoke()
        desk.wait(first, *others)
        desk.check(first)
        assert all(job.state is JobState.DROPPED for job in others)
        assert len(opened) == 1

    def test_at_any_time(self, make: Make) -> None:
        """What is written after it returns was written by others."""
        desk = make(host_gb=SMALL, device_gb=SMALL)
        desk.put(OTHER)
        desk.load(OTHER, CODES)
        for number in range(60):
            desk.empty()
            job = desk.begin(OTHER, CLASSES[number % 2])
            time.sleep(number * 4e-5)
            job.revoke()
            assert job.target_slots is not None
            give_to_others(desk, job, number)
            desk.wait(job)
            expected = (
                JobState.LOADED if job.layers_loaded == SHAPE.num_layers else JobState.DROPPED
            )
            assert job.state is expected
            assert all(bool((rows == number).all()) for rows in desk.pools.rows(job.target_slots))
        check_store(desk.store)


class TestLayers:
    @pytest.fixture
    def job(self) -> LoadJob:
        return new_job((1, 2, 3), 1)

    def test_nobody_waits_for_ever(self, job: LoadJob) -> None:
        job.pass_deadline = time.monotonic() + 0.02
        assert not job.wait_for_layer(0)
        job.pass_deadline = 0.0
        assert not job.wait_for_layer(0)
        job.count_layer()
        assert job.wait_for_layer(0) and not job.wait_for_layer(1)

    def test_nor_for_a_layer_that_will_never_come(self, job: LoadJob) -> None:
        job.pass_deadline = time.monotonic() + 20.0
        job.count_layer()
        threading.Timer(0.02, job.end, (JobState.FAILED,)).start()
        began = time.monotonic()
        assert not job.wait_for_layer(1) and job.wait_for_layer(0)
        assert time.monotonic() - began < 10.0

    def test_slots_are_taken_away_behind_what_the_device_writes(self, job: LoadJob) -> None:
        """Also before the layer is noted, and if only a part of it was written."""
        job.stream = mock.Mock()
        with pytest.raises(ZeroDivisionError), job.writing():
            1 / 0  # noqa: B018
        job.revoke()
        job.stream.record_event.return_value.synchronize.assert_called_once()

    def test_what_is_left_is_judged_by_what_was_loaded(self, job: LoadJob) -> None:
        assert job.seconds_left(3, 100.0) is None
        job.started_at = 98.0
        assert job.seconds_left(3, 100.0) is None
        job.count_layer()
        assert job.seconds_left(3, 100.0) == 4.0
        job.count_layer()
        assert job.seconds_left(3, 100.0) == 1.0


class TestLoader:
    def test_a_bug_ends_its_job_alone(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        desk = make()
        desk.put(FIRST, OTHER)

        def fails(*_: object) -> None:
            raise ValueError("a bug")

        segments = desk.store.readers
        for owner, name in ((BufferPool, "_free_memory"), (desk.loader._layers, "_main_layers")):
            monkeypatch.setattr(owner, name, fails)
            job = desk.load(FIRST)
            monkeypatch.undo()
            assert job.state is JobState.FAILED and isinstance(job.error, ValueError)
            wait_until(lambda: segments.release_closed() or not segments._open)
            desk.check(desk.load(FIRST))

    def test_buffers_are_made_for_the_device_of_the_slots(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A thread that names none pins memory for the first one, and takes memory of it."""
        stream, taken, take = mock.MagicMock(), list[bool](), BufferPool.take

        def noted(*args: Any) -> Any:
            taken.append(stream.__enter__.call_count > stream.__exit__.call_count)
            return take(*args)

        monkeypatch.setattr(torch.cuda, "stream", lambda _: stream)
        monkeypatch.setattr(BufferPool, "take", noted)
        desk = make()
        desk.put(FIRST)
        desk.check(desk.load(FIRST))
        assert taken and all(taken)

    def test_a_drive_that_hangs_ends_a_measurement(self, make: Make) -> None:
        """And what comes after it is loaded."""
        desk = make(io_timeout=2.0)
        desk.put(FIRST)
        hang = Rule("hang", "block")
        with desk.faults.injected(hang):
            desk.loader.measure(desk.store, look_up(desk.store, FIRST).spans, exact=False)
            wait_until(lambda: not desk.store.health.readable)
        wait_until(lambda: not desk.store.poll() and desk.store.health.readable)
        desk.check(desk.load(FIRST))

    def test_nothing_is_measured_while_a_job_is_loaded(self, make: Make) -> None:
        """Its reads are measured, and would wait for others."""
        desk = make(readahead=0.0)
        desk.put(FIRST, OTHER)
        hang = Rule("hang", "block", after=1)
        with desk.faults.injected(hang):
            job = desk.begin(OTHER)
            wait_until(lambda: hang.hits)
            desk.loader.measure(desk.store, look_up(desk.store, FIRST).spans, exact=True)
        desk.wait(job)
        wait_until(lambda: not desk.loader._measuring)
        assert desk.store.stats.bytes_read == job.read_stats.ssd_bytes

    def test_what_comes_after_its_store_was_closed_does_not_wait(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        desk = make()
        desk.put(FIRST)
        spans, wait = look_up(desk.store, FIRST).spans, mock.Mock(side_effect=TimeoutError)
        desk.store.readers.close(20.0)
        with monkeypatch.context() as patch, pytest.raises(PrefixUnreadable, match="too long"):
            patch.setattr(Future, "exception", wait)
            desk.store.readers.open(spans, exact=False)
        wait.assert_called_once_with(0.0)

    @pytest.mark.parametrize("host_gb", [4e-5, LARGE], ids=["a layer", "a span"])
    def test_what_is_cached_is_not_measured(self, make: Make, host_gb: float) -> None:
        """Else a drive that was slow would stay so for ever where all loads are declined."""
        desk = make(host_gb=host_gb)
        desk.put(OTHER, (*OTHER, *prompt(7, 33)))
        desk.load(OTHER, CODES)
        match = look_up(desk.store, OTHER if host_gb < LARGE else (*OTHER, *prompt(7, 33)))
        tiers = desk.store.readers.tiers(match.spans[0].segment.info, codes=True)
        assert tiers[0] and tiers.all() == (len(match.spans) > 1)

        read = desk.store.stats.bytes_read
        desk.loader.measure(desk.store, match.spans, exact=False)
        wait_until(lambda: not desk.loader._measuring)
        assert desk.store.stats.bytes_read > read


@pytest.mark.parametrize("caches", ["none", "both small", "both large"])
def test_the_scheduler_goes_on_meanwhile(make: Make, caches: str) -> None:
    """Estimates, expectations, new segments and evictions while jobs load; bytes stay right."""
    sizes = (kv.make_info(SHAPE, range(length)).layout().file_bytes for length in (20, 40))
    desk = make(**CACHES[caches], ssd_gb=6 * sum(sizes) / 2 / 1e9)
    store, chance = desk.store, np.random.default_rng(3)
    store.tree.touch(look_up(store, FIRST))
    desk.put(prompt(1, 40))
    began, number, loaded = time.monotonic(), 2, 0
    jobs: list[LoadJob] = []
    while (seconds := time.monotonic() - began) < 0.8 or loaded <= 5:
        assert seconds < 60
        number += 1
        desk.bench.offer(store, prompt(number, 20 + 20 * (number % 2)))
        store.writes.drain()
        for _ in range(20):
            tokens = prompt(int(chance.integers(max(1, number - 6), number + 1)), 40)
            match = store.match("", kv.as_tokens(tokens))
            if not match.num_tokens:
                continue
            spans = match.spans
            store.readers.can_read(spans, in_codes=True)
            store.readers.bytes_to_read(spans, codes=False)
            store.readers.bytes_to_read(spans, codes=True)
            store.readers._lookahead.set_expected(
                str(chance.integers(4)), spans[: chance.integers(3)]
            )
            store.readers.update_expected()
            for span in spans:
                store.readers.cached_bytes(span.segment.segment_id)
            check_placement(store.cache.placement)
            store.summary()
            store.cache.summary()
            if len(jobs) < 3:
                kv_class = CLASSES[chance.integers(len(CLASSES))]
                first = int(chance.integers(match.num_tokens))
                jobs.append(desk.begin(tokens[: match.num_tokens], kv_class, first))
        for job in [begun for begun in jobs if begun.done.is_set()]:
            jobs.remove(job)
            loaded += desk.check_or_gone(job)
            assert job.target_slots is not None
            desk.free = torch.cat([desk.free, job.target_slots])
    desk.wait(*jobs)
    store.poll()
    check_store(store)
