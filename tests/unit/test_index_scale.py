"""What the index does for many segments, counted, for times depend on machines; and its checks."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from impress_sglang.storage.segment import STATE_TOKEN, Priority
from impress_sglang.store import disk as disk_module
from impress_sglang.store import tree as tree_module
from impress_sglang.store import unattached
from impress_sglang.store.eviction_order import EvictionOrder
from impress_sglang.store.lookahead import LookAhead
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import SegmentState, StoredSegment
from impress_sglang.store.tree import StoredTree
from impress_sglang.store.unattached import UnattachedSegments
from impress_sglang.store.writing import StoreOutcome
from impress_sglang.tiers.placement import Placement
from tests.unit import store_factory
from tests.unit.kv_factory import as_tokens, stored_segment
from tests.unit.store_checks import check_tree
from tests.unit.store_factory import Workbench, check_rows, gb, index_of, look_up, name_of, prompt
from tests.unit.test_store_reordering import reorder, select
from tests.unit.waiting import calls_of

TURNS = 5
NO_TOKENS = np.empty(0, np.int32)


def conversations(count: int) -> tuple[list[StoredSegment], dict[str, str]]:
    """Conversations of some turns, each of another length, and by segment the one before it."""
    segments, parents = [], {}
    for number in range(count):
        prefix: list[int] = []
        for turn in range(TURNS):
            name, tokens = f"{number:05}-{turn}", [1000 + number + turn] * (3 + number % 97 + turn)
            segments.append(stored_segment(name, tokens, prefix, last_access=number + 1))
            parents[name] = f"{number:05}-{turn - 1}" if turn else ""
            prefix += tokens
    return segments, parents


def test_a_start_without_the_index_looks_at_each_token_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each segment is digested once more, in pieces; it was each path, once per known length."""
    digests = calls_of(monkeypatch, unattached, "extend_digest")
    segments, parents = conversations(200)
    tree = StoredTree()

    assert UnattachedSegments(tree).restore(segments) == ([], [])

    check_tree(tree)
    assert {s.segment_id: s.parent.segment_id for s in segments if s.parent is not None} == {
        name: above for name, above in parents.items() if above
    }
    paths = sum(s.info.prefix_len for s in segments)
    num_digested = sum(len(tokens) for (_, tokens), _ in digests)
    assert num_digested <= sum(s.info.num_tokens for s in segments) + paths


def test_a_chain_without_its_head_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    segments, prefix = [], [1]
    for turn in range(30):
        segments.append(stored_segment(f"{turn:02}", [turn, turn + 1], prefix))
        segments[-1].parent_hint = f"{turn - 1:02}"
        prefix = [*prefix, turn, turn + 1]
    walks = calls_of(monkeypatch, UnattachedSegments, "_tokens_before")

    assert UnattachedSegments(StoredTree()).restore(segments) == ([], segments)

    assert len(walks) == 1


def test_a_disk_that_is_back_costs_a_look_at_what_has_no_file_there(
    bench: Workbench, store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.put_all(store, 1, 2, 3)
    lost = name_of(store, prompt(2))
    bench.file_of(lost).unlink()
    store.health.report_failure("a test", OSError("a test"), reading=True)
    looked = calls_of(monkeypatch, StoredTree, "segments")
    store._take_probe_result((frozenset(Path(name).stem for name in bench.files()), None))
    assert [segment.segment_id for segment in store.health.suspects] == [lost] and not looked
    store_factory.look_again(store)
    assert store_factory.lengths(store, 1, 2, 3) == [8, 0, 8]


def test_segments_that_are_postponed_delay_no_others() -> None:
    tree = StoredTree()
    kept = UnattachedSegments(tree)
    for number in range(100):
        kept.postpone(stored_segment(f"postponed {number}", [number], [5]), math.inf)
    kept.add(stored_segment("child", [8], [7]))
    parent = stored_segment("parent", [7])
    assert tree.insert(parent, NO_TOKENS)
    kept.on_attached(parent)
    kept.retry()
    assert "child" in tree


@pytest.mark.parametrize("wrong", ["0", "00001-0", "00003-4", "no such segment"])
def test_a_wrong_parent_in_the_index_costs_nothing(wrong: str) -> None:
    """A bit that flips must not lend KVs to other tokens, nor cost a file."""
    segments, parents = conversations(4)
    tree = StoredTree()
    names = ("00002-2", "00001-3", "00003-0")
    for segment in segments:
        segment.parent_hint = wrong if segment.segment_id in names else parents[segment.segment_id]

    assert UnattachedSegments(tree).restore(segments) == ([], [])

    check_tree(tree)
    assert tree.get("00002-2").parent is tree.get("00002-1")  # type: ignore[union-attr]
    assert tree.get("00001-3").parent is tree.get("00001-2")  # type: ignore[union-attr]


def test_the_order_of_use_is_that_of_before() -> None:
    segments, _ = conversations(3)
    for segment, last_access in zip(segments, [5, 9, 2, 2, 2, *[3] * 10], strict=True):
        segment.last_access = last_access

    tree = StoredTree()
    assert UnattachedSegments(tree).restore(segments) == ([], [])

    check_tree(tree)
    names = [segment.segment_id for segment in tree.order]
    assert names[:3] == ["00000-4", "00000-3", "00000-2"], "what builds on others goes first"
    assert names[-2:] == ["00000-1", "00000-0"], "a use is one of all that it builds on"
    assert segments[0].last_access == 9


def segments() -> int:
    """Of trees, as far as Python looks for garbage."""
    return sum(type(found) is StoredSegment for found in gc.get_objects())


class Cycle:
    """Garbage that only a look finds."""

    def __init__(self) -> None:
        self.itself = self


def test_python_looks_for_no_garbage_in_a_large_index(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But what is garbage before its start is let go."""
    monkeypatch.setattr(disk_module, "_MANY_SEGMENTS", 1)
    # What there is already need not be looked through.
    gc.freeze()
    store = store_factory.three_prefixes(bench)
    assert segments() > 0
    cycle = weakref.ref(Cycle())
    store = bench.reopen(store)
    assert segments() == 0 and cycle() is None
    store_factory.check_three_prefixes(store)
    # What a start has frozen is let go at the end.
    bench.close(store)
    assert segments() > 0, "then it is garbage"


def test_a_match_passes_a_segment_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts may leave a system prompt at each of its tokens."""
    tree, tokens = StoredTree(), list(range(200))
    long = stored_segment("long", tokens)
    assert tree.insert(long, NO_TOKENS)
    for left in range(1, 200):
        assert tree.attach(stored_segment(f"left {left}", [1000], tokens[:left]), long)
    check_tree(tree)
    steps = calls_of(monkeypatch, tree_module, "_children_for")

    for common in (1, 2, 100, 199):
        for end in ([], [1000], [2000]):
            spans = tree.match("", as_tokens(tokens[:common] + end)).spans
            found = [(span.segment.segment_id, len(span)) for span in spans]
            assert found == [("long", common), (f"left {common}", 1)][: 1 + (end == [1000])]

    assert len(steps) == 4 * (1 + 2 + 2)


class Unlisted(dict[int, Any]):
    """What builds on a segment, looked up by its place only."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("all places were looked at")

    keys = items = values = __iter__  # type: ignore[assignment]


def test_states_are_found_without_a_look_at_each_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each token of a prompt others may have left it, with states that are of no use."""
    tree, tokens = StoredTree(), list(range(1000))
    long = stored_segment("long", tokens)
    assert tree.insert(long, NO_TOKENS)
    for left in range(1, 1000):
        last, state = [1000 + left], SegmentState.PENDING if left > 700 else SegmentState.READY
        assert tree.attach(stored_segment(f"left {left}", last, tokens[:left]), long)
        if left > 650 and left % 5:
            late = stored_segment(f"state {left}", [STATE_TOKEN], tokens[:left], state=state)
            assert tree.attach(late, long)
    long.children = Unlisted(long.children)
    looked = calls_of(monkeypatch, tree_module, "_state_at")

    assert (
        list(tree.state_positions(tree.match("", as_tokens(tokens))))
        == [*(left for left in range(700, 650, -1) if left % 5)][: 256 - 240]
    )
    assert len(looked) == 256
    looked.clear()
    assert next(tree.state_positions(tree.match("", as_tokens(tokens[:700])))) == 699
    assert not list(tree.state_positions(tree.match("", as_tokens(tokens[:650]))))
    assert len(looked) == 1


def test_of_requests_for_one_prefix_or_parts_of_it_the_caches_are_told_once(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many arrive between two passes, each of which looks up what it needs."""
    store = bench.open(lookahead=(lookahead := LookAhead()), host_gb=1e-3)
    bench.put_all(store, 1)
    check_rows(store, prompt(1))
    told = calls_of(monkeypatch, Placement, "expect")
    asked = calls_of(monkeypatch, LookAhead, "ranges")
    lookahead.set_expected("0", look_up(store, prompt(1)).spans)
    store.poll()
    once = len(told), len(asked)
    assert all(once)

    for number in range(20):
        lookahead.set_expected(str(number), look_up(store, prompt(1)).spans)
    store.poll()
    assert (len(told), len(asked)) == once

    for number in range(1, 8):
        lookahead.set_expected(f"part {number}", look_up(store, prompt(1)[:number]).spans)
    assert (len(told), len(asked)) == once
    store.poll()
    assert (len(told), len(asked)) == (2 * once[0], 2 * once[1])

    lookahead.set_queue([str(number) for number in range(20)])
    store.poll()
    assert (len(told), len(asked)) == (3 * once[0], 3 * once[1])


class Lookups(Counter[str]):
    """Counts which names were looked up."""

    names: Counter[str]

    def __getitem__(self, name: str) -> int:
        self.names[name] += 1
        return super().__getitem__(name)


@pytest.mark.parametrize("limit", [9, 1])
def test_room_is_made_without_a_look_at_each_namespace(bench: Workbench, limit: int) -> None:
    """Whether none has more than it may, or all have, because the limit was lowered."""
    store = bench.open()
    for number in range(20):
        bench.put_all(store, 1, 2, namespace=f"tenant {number}")
    limits = {"ssd_gb": gb(40 * bench.one), "namespace_gb": gb(limit * bench.one)}
    store = bench.reopen(store, **limits)
    store.tree.bytes_by_namespace = held = Lookups(store.tree.bytes_by_namespace)
    held.names = Counter()

    for number in range(2):
        outcome = bench.offer(store, prompt(number), namespace=f"new {number}")
        assert outcome is StoreOutcome.ACCEPTED

    assert len(held.names) <= 4 and store.stats.segments_evicted == 2


class Room:
    """Offers prompts, for each of which one segment has to go, and counts steps of the searches."""

    def __init__(
        self, bench: Workbench, store: PrefixStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # That looks at all segments.
        monkeypatch.setattr(store_factory, "check_store", lambda store: None)
        self._bench, self._store, self.passed = bench, store, 0
        self.noted = calls_of(monkeypatch, EvictionOrder, "count_use")
        search = EvictionOrder.of

        def of(order: EvictionOrder, namespace: str | None) -> Iterator[StoredSegment]:
            for segment in search(order, namespace):
                self.passed += 1
                yield segment

        monkeypatch.setattr(EvictionOrder, "of", of)

    def take(self, number: int) -> None:
        evicted = self._store.stats.segments_evicted
        self._bench.put(self._store, prompt(number))
        assert self._store.stats.segments_evicted == evicted + 1


def test_a_chain_whose_end_is_needed_is_passed_and_noted_once(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    depth = 10
    store = bench.open(ssd_gb=gb(2 * depth * bench.one))
    for turns in range(1, depth + 1):
        bench.put(store, prompt(1, 8 * turns))
    bench.put_all(store, *range(50, 50 + depth))
    assert store.pins.pin(store.namespace(""), as_tokens(prompt(1, 8 * depth))) is None
    room = Room(bench, store, monkeypatch)

    room.take(70)
    assert room.passed <= depth + 2 and len(room.noted) == 2, "and what is new"
    room.take(71)
    assert room.passed <= depth + 4 and len(room.noted) == 3


def test_what_others_build_on_is_neither_passed_nor_noted(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is of a lower priority than what builds on it."""
    store = bench.open(ssd_gb=gb(20 * bench.one))
    bench.put_all(store, *range(10), priority=Priority.LOW)
    for number in range(10):
        bench.put(store, prompt(number, 16))
    store.tree.order.take_changed(100)
    room = Room(bench, store, monkeypatch)

    for number in range(3):
        room.take(50 + number)
    assert room.passed <= 6 and len(room.noted) == 3, "what is new"
    assert len(store.tree.order.take_changed(100)) == 3, "nor is it written to the journal"


def test_a_killed_process_has_told_what_was_used(bench: Workbench, store: PrefixStore) -> None:
    bench.put_all(store, 1, 2)
    store_factory.use(store, prompt(1))
    name = name_of(store, prompt(1))
    assert index_of(bench)[name].hits == 0

    store._disk._record_at = 0.0
    store.poll()
    store.worker.submit(int).result()

    assert index_of(bench)[name].hits == 1
    assert max(index_of(bench).values(), key=lambda row: row.last_access).info.segment_id == name
    assert store._disk._record_at > 0.0


@pytest.fixture
def used(bench: Workbench) -> PrefixStore:
    """20 segments, some of them in a cache, one that builds on another."""
    store = bench.open(device_gb=1e-3, host_gb=1e-3)
    bench.put_all(store, *range(19))
    bench.put(store, prompt(3, 16))
    for number in (1, 2, 3):
        check_rows(store, prompt(number))
    return store


@pytest.mark.parametrize("reordered", [0, 2])
def test_a_step_looks_at_few_and_all_have_their_turn(
    used: PrefixStore, reordered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what is reordered between two steps."""
    # That looks at all of them, after each offer.
    monkeypatch.setattr(store_factory, "check_store", lambda store: None)
    looked, counts = calls_of(monkeypatch, used.tree, "check"), list[int]()
    for _ in used.check_steps():
        counts.append(len(looked))
        if len(counts) == 1 and reordered:
            for number in (0, 18):
                select(used, prompt(number), 2, 5)
            reorder(used)
    assert counts == [8, 16, 20], "caches of a few chunks are one step"
    assert {call.args[0] for call in looked} == set(used.tree.segments())
    assert used.rewrites["segments"] == reordered


DAMAGE: dict[str, Callable[[PrefixStore, StoredSegment], object]] = {
    "bytes": lambda store, _: setattr(store.quota, "pending_bytes", 1),
    "bytes of the tree": lambda store, _: setattr(store.tree, "file_bytes", 1),
    "a write": lambda _, s: setattr(s, "state", SegmentState.PENDING),
    "a second look": lambda _, s: setattr(s, "state", SegmentState.SUSPECT),
    "more tokens": lambda _, s: object.__setattr__(s.info, "tokens", as_tokens(range(17))),
    "another namespace": lambda _, s: object.__setattr__(s.info, "namespace", "b"),
    "exact below approximate": lambda _, s: object.__setattr__(
        s.parent.info, "quality", store_factory.COARSE
    ),
    "lost without being a hole": lambda _, s: setattr(s, "state", SegmentState.LOST),
    "a level": lambda _, s: setattr(s, "level", Priority.LOW),
    "what builds on it": lambda _, s: s.parent.dependents.__setitem__(1, 0),  # type: ignore
    "an order": lambda store, s: store.tree.order.remove(s),
    "a use": lambda _, s: setattr(s, "last_access", 10**6),
    "tokens": lambda _, s: object.__setattr__(s.info, "tokens", s.info.tokens + 1),
    "a parent": lambda _, s: setattr(s, "parent", None),
    "a version": lambda store, s: store.readers.acquire(s).__setattr__("readers", 0),
    "a cache": lambda store, _: store.cache.placement._caches.heaps.places.fill(0),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_wrong_is_found(bench: Workbench, used: PrefixStore, damage: str) -> None:
    assert list(used.check_steps())
    DAMAGE[damage](used, look_up(used, prompt(3, 16)).spans[-1].segment)
    with pytest.raises(AssertionError):
        list(used.check_steps())
    bench.forget(used)
    used.close()
