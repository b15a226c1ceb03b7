"""What leaves the SSD before others, and what after them."""

from __future__ import annotations

import time

import pytest

from impress_sglang.storage.segment import Priority
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import StoredSegment
from tests.unit import store_factory
from tests.unit.store_checks import check_store
from tests.unit.store_factory import (
    Workbench,
    gb,
    length,
    lengths,
    look_up,
    prompt,
    use,
)

LOW, NORMAL, HIGH = Priority


def segment_of(store: PrefixStore, *which: int) -> StoredSegment:
    return look_up(store, prompt(*which)).spans[-1].segment


@pytest.fixture
def full(bench: Workbench) -> PrefixStore:
    """1 is high, 2 normal and 3 low, the last used first."""
    store = bench.open(ssd_gb=gb(3 * bench.one))
    for number, priority in ((1, HIGH), (2, NORMAL), (3, LOW)):
        bench.put(store, prompt(number), priority=priority)
    return store


def test_low_goes_before_normal_and_high_after_it(bench: Workbench, full: PrefixStore) -> None:
    bench.put(full, prompt(4))
    assert lengths(full, 1, 2, 3, 4) == [8, 8, 0, 8]
    bench.put(full, prompt(5))
    assert lengths(full, 1, 2, 4, 5) == [8, 0, 8, 8]
    bench.put(full, prompt(6, 24))
    assert lengths(full, 1, 4, 5) == [0, 0, 0], "if nothing else does, high goes as well"


def test_what_others_build_on_goes_with_them(bench: Workbench) -> None:
    """1 is low, and so is 2, on which a high one builds for a while."""
    store = bench.open(ssd_gb=gb(5 * bench.one))
    bench.put_all(store, 1, 2, priority=LOW)
    bench.put(store, prompt(2, 16), priority=HIGH, ttl=10)
    bench.put(store, prompt(3))
    assert [segment_of(store, n).level for n in (1, 2, 3)] == [LOW, HIGH, NORMAL]
    bench.put_all(store, 4, 5, 6)
    assert lengths(store, 1, 2, 3, 4) == [0, 8, 0, 8]

    store.expire(store.tree.order.take_due(time.time() + 20, 64))

    check_store(store)
    assert segment_of(store, 2).level is LOW, "nothing builds on it any more"
    bench.put_all(store, 7, 8)
    assert lengths(store, 2, 4) == [0, 8]


def test_a_hole_has_the_level_of_what_builds_on_it(bench: Workbench, store: PrefixStore) -> None:
    bench.put(store, prompt(1), priority=LOW)
    bench.put(store, prompt(1, 16), priority=HIGH)
    bench.put(store, prompt(1, 24), priority=NORMAL)
    middle = segment_of(store, 1, 16)
    store_factory.lose(bench, store, middle.segment_id, gone=True)
    assert segment_of(store, 1).level is NORMAL
    bench.put(store, prompt(1, 16), priority=HIGH)
    levels = [own.segment.level for own in look_up(store, prompt(1, 24)).spans]
    assert levels == [HIGH, HIGH, NORMAL]


def test_a_namespace_gives_up_its_own_low_ones_first(bench: Workbench) -> None:
    store = bench.open(namespace_gb=gb(2 * bench.one))
    bench.put(store, prompt(9), namespace="other", priority=LOW)
    for number, priority in ((1, NORMAL), (2, LOW)):
        bench.put(store, prompt(number), namespace="a", priority=priority)
    bench.put(store, prompt(3), namespace="a", priority=HIGH)
    bench.put(store, prompt(4), namespace="a")
    assert lengths(store, 1, 2, 3, 4, namespace="a") == [0, 0, 8, 8]
    assert length(store, prompt(9), namespace="other") == 8


@pytest.mark.parametrize("index", ["there", "gone"])
def test_a_restart_knows_it(bench: Workbench, full: PrefixStore, index: str) -> None:
    use(full, prompt(3))
    bench.close(full)
    (path,) = bench.root.glob("*/journal")
    if index == "gone":
        path.unlink()
    store = bench.open(ssd_gb=gb(3 * bench.one))
    assert [segment_of(store, n).info.priority for n in (1, 2, 3)] == [HIGH, NORMAL, LOW]
    bench.put(store, prompt(4))
    assert lengths(store, 1, 2, 3, 4) == [8, 8, 0, 8]
