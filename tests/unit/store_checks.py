"""Invariants of a store that take time: all of it is compared with all else."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np

from impress_sglang.loops.types import Flags
from impress_sglang.storage.segment import STATE_TOKEN
from impress_sglang.store.content import WINDOW_TOKENS, ContentIndex, _values
from impress_sglang.store.eviction_order import EvictionOrder
from impress_sglang.store.lookahead import LookAhead
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import SegmentState, StoredSegment
from impress_sglang.store.tree import StoredTree
from impress_sglang.tiers.placement import CACHES, IdRanges, Placement, Tier


def check_store(store: PrefixStore) -> None:
    """Tree, quota, readers and caches agree; nothing is left to compare of a closed store."""
    if store._closed:
        return
    check_tree(store.tree)
    for _ in store.check_steps():
        pass
    segments = list(store.tree.segments())
    assert sum(s.state is SegmentState.SUSPECT for s in segments) == len(store.health.suspects)
    names = {s.segment_id for s in segments if s.on_disk}
    # The loader's thread opens and closes files meanwhile.
    with store.readers._lock:
        opened = store.readers._open
        assert all(segment.readers > 0 for segment in opened.values())
        assert store.readers._ids.keys() <= names | opened.keys()
    check_placement(store.cache.placement)


def check_placement(placement: Placement) -> None:
    """Pages, tiers and heaps agree; others may use it meanwhile."""
    with placement._lock:
        caches, heaps = placement._caches, placement._caches.heaps
        assert heaps.priorities is placement._rule.priorities
        for tier in CACHES:
            row, members = tier - 1, np.flatnonzero(caches.tiers == tier)
            assert np.array_equal(np.sort(heaps.members[row, 1 : 1 + heaps.sizes[row]]), members)
            placement.check_members(tier, 0, len(members))
            pages, page = placement._pages_of(members).tolist(), int(caches.first_free[row])
            for _ in range(int(caches.free[row])):
                pages.append(page)
                page = int(caches.following[row, page])
            assert sorted(pages) == list(range(placement.capacity[tier]))
        assert not heaps.places[caches.tiers == Tier.SSD].any()
        assert not placement._journal.marks.any()
        owned = owned_ids(placement._ids, len(caches.tiers))
        assert not caches.tiers[~owned].any(), "a chunk without an owner is cached"
        assert not heaps.priorities[~owned].any()


def owned_ids(ids: IdRanges, size: int) -> Flags:
    """Which of the first `size` ids are handed out."""
    found = np.ones(size, np.bool_)
    for begin, end in ids.gaps.tolist():
        assert found[begin:end].all()
        found[begin:end] = False
    return found


def check_tree(tree: StoredTree) -> None:
    """Every invariant is recomputed from what builds on what."""
    found, held = list[StoredSegment](), Counter[str]()
    stack = list(tree._roots.values())
    assert all(stack)
    while stack:
        places = stack.pop().values()
        alike = [same for place in places for same in place.values()]
        assert all(places) and all(alike)
        found += itertools.chain.from_iterable(alike)
        stack += [segment.children for same in alike for segment in same]
    segments = list(tree.segments())
    assert Counter(found) == Counter(segments)
    for segment in segments:
        held[segment.info.namespace] += segment.file_bytes
    assert dict(tree.bytes_by_namespace) == {name: count for name, count in held.items() if count}
    assert tree.file_bytes == sum(held.values())
    check_order(tree.order, [segment for segment in segments if not segment.lost])
    dependents = Counter((segment.parent, segment.level) for segment in segments)
    for segment in segments:
        tree.check(segment)
        assert segment.dependents == [dependents[segment, level] for level in type(segment.level)]
        assert segment.states == sorted(
            at for at, place in segment.children.items() if STATE_TOKEN in place
        )


def check_order(order: EvictionOrder, segments: list[StoredSegment]) -> None:
    """It has these segments, each before what it builds on, in each namespace as in all."""
    places = {segment: place for place, segment in enumerate(order)}
    assert places.keys() == set(segments)
    assert order._changed.keys() <= places.keys()
    for (namespace, level), part in order._orders.items():
        its_places = [places[segment] for segment in part]
        assert its_places and its_places == sorted(its_places)
        assert all(namespace in (None, s.info.namespace) and s.level is level for s in part)
    assert sum(map(len, order._orders.values())) == 2 * len(places)
    for segment, place in places.items():
        above = segment.parent
        while above is not None:
            assert above not in places or places[above] > place
            assert above not in places or above.last_access >= segment.last_access
            above = above.parent


def check_content(index: ContentIndex) -> None:
    """Its windows are those of its segments."""
    there = set[tuple[int, int]]()
    counted = [item for table in index._tables for item in table.keys.items()]
    assert {segment for segment, _ in counted} == set(index._segments.values())
    assert len(counted) == len(index._segments)
    for segment, keys in counted:
        windows = segment.info.namespace, segment.info.tokens, WINDOW_TOKENS
        assert np.array_equal(keys, index._hashes.rolling_windows(*windows)[::WINDOW_TOKENS])
        there.update(_values(segment, keys))
    more = [(value, key) for key, keyed in index._more.items() for value in keyed]
    found = [*((value, key) for key, value in index._first.items()), *more]
    assert len(set(found)) == len(found) and set(found) == there
    for table in index._tables:
        assert table.num_windows == sum(map(len, table.keys.values())) == table._counts.sum()
        assert all((table.of(keys) > 0).all() for keys in table.keys.values())
    assert all(index._more.values()) and index._more.keys() <= index._first.keys()


def check_lookahead(lookahead: LookAhead) -> None:
    """Ranges by segment and by request agree."""
    assert {
        (rid, segment_id, tokens)
        for segment_id, waiting in lookahead._awaited.items()
        for tokens, rids in waiting.items()
        for rid in rids or "?"
    } == {(rid, *item) for rid, ranges in lookahead._ranges_of.items() for item in ranges.items()}
