"""What a check of the store finds, and how much of it one step looks at."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from impress_sglang.storage.segment import Priority
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import SegmentState, StoredSegment
from tests.unit import store_factory
from tests.unit.kv_factory import as_tokens
from tests.unit.store_factory import COARSE, Workbench, check_rows, look_up, prompt
from tests.unit.test_store_reordering import reorder, select


@pytest.fixture
def used(bench: Workbench) -> PrefixStore:
    """20 segments, some of them in a cache, one that builds on another."""
    store = bench.open(device_gb=1e-3, host_gb=1e-3)
    bench.put_all(store, *range(19))
    bench.put(store, prompt(3, 16))
    for number in (1, 2, 3):
        check_rows(store, prompt(number))
    return store


@pytest.fixture
def looked(used: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> list[StoredSegment]:
    found: list[StoredSegment] = []
    check = used.tree.check
    monkeypatch.setattr(used.tree, "check", lambda own: found.append(own) or check(own))
    # That looks at all of them, after each offer of these tests.
    monkeypatch.setattr(store_factory, "check_store", lambda store: None)
    return found


def test_a_step_looks_at_few_and_all_have_their_turn(
    used: PrefixStore, looked: list[StoredSegment]
) -> None:
    counts = []
    for _ in used.check_steps():
        counts.append(len(looked))
    assert counts[:3] == [8, 16, 20] and counts[-1] == 20
    assert {own.segment_id for own in looked} == {own.segment_id for own in used.tree.segments()}
    assert len(counts) == 3, "caches of a few chunks are one step"


def test_what_is_reordered_between_steps_is_checked_all_the_same(
    used: PrefixStore, looked: list[StoredSegment]
) -> None:
    for step, _ in enumerate(used.check_steps()):
        if step == 0:
            for number in (0, 18):
                select(used, prompt(number), 2, 5)
            reorder(used)
    assert used.rewrites["segments"] == 2
    assert set(looked) == set(used.tree.segments()) and len(looked) == len(used.tree)


def _wrong_heap(store: PrefixStore, _: StoredSegment) -> None:
    heaps = store.cache.placement._caches.heaps
    row = int(np.argmax(heaps.sizes))
    heaps.members[row, 2], heaps.members[row, 3] = heaps.members[row, 3], heaps.members[row, 2]


DAMAGE: dict[str, Callable[[PrefixStore, StoredSegment], object]] = {
    "bytes": lambda store, _: setattr(store.quota, "pending_bytes", 1),
    "bytes of the tree": lambda store, _: setattr(store.tree, "file_bytes", 1),
    "a write": lambda _, own: setattr(own, "state", SegmentState.PENDING),
    "a second look": lambda _, own: setattr(own, "state", SegmentState.SUSPECT),
    "more tokens": lambda _, own: object.__setattr__(own.info, "tokens", as_tokens(range(17))),
    "another namespace": lambda _, own: object.__setattr__(own.info, "namespace", "b"),
    "exact below approximate": lambda _, own: object.__setattr__(
        own.parent.info, "quality", COARSE
    ),
    "lost without being a hole": lambda _, own: setattr(own, "state", SegmentState.LOST),
    "a level": lambda _, own: setattr(own, "level", Priority.LOW),
    "what builds on it": lambda _, own: own.parent.dependents.__setitem__(1, 0),  # type: ignore
    "an order": lambda store, own: store.tree.order.remove(own),
    "a use": lambda _, own: setattr(own, "last_access", 10**6),
    "tokens": lambda _, own: object.__setattr__(own.info, "tokens", own.info.tokens + 1),
    "a parent": lambda _, own: setattr(own, "parent", None),
    "a version": lambda store, own: store.segments.acquire(own).__setattr__("readers", 0),
    "a retired version": lambda store, own: setattr(store.segments.acquire(own), "retired", True),
    "a cache": _wrong_heap,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_wrong_is_found(bench: Workbench, used: PrefixStore, damage: str) -> None:
    assert list(used.check_steps())
    DAMAGE[damage](used, look_up(used, prompt(3, 16)).spans[-1].segment)
    with pytest.raises(AssertionError):
        list(used.check_steps())
    bench.forget(used)
    used.close()
