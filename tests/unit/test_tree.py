"""The tree of stored prefixes, one scenario at a time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.management.restoring import newest_files, restore_segments
from impress_sglang.management.stored import SegmentState, StoredMatch, StoredSegment
from impress_sglang.management.tree import StoredTree, common_prefix_len, prefix_digest
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.segment import SegmentInfo
from tests.unit.kv_factory import as_tokens, make_info, make_shape

SHAPE = make_shape()
P = (1, 2, 3, 4, 5, 6)  # a prompt that others share
# Computed after a part of an exact prefix.
ONCE = Quality(1, 0.25)
HALF = Quality(1, 0.5)
TWICE = Quality(2, 0.5)


def segment(
    name: str,
    tokens: Sequence[int],
    prefix: Sequence[int] = (),
    *,
    namespace: str = "",
    quality: Quality = EXACT,
    ready: bool = True,
    last_access: int = 0,
) -> StoredSegment:
    info = make_info(
        SHAPE,
        tokens,
        segment_id=name,
        namespace=namespace,
        quality=quality,
        prefix_len=len(prefix),
        prefix_digest=prefix_digest(namespace, as_tokens(prefix)),
    )
    state = SegmentState.READY if ready else SegmentState.PENDING
    return StoredSegment(info, info.layout().file_bytes, state, last_access=last_access)


Put = Callable[..., StoredSegment]


@pytest.fixture
def tree() -> StoredTree:
    return StoredTree()


@pytest.fixture
def put(tree: StoredTree) -> Put:
    """Insert a segment after a prefix that is in the tree, and check the tree."""

    def put(name: str, tokens: Sequence[int], prefix: Sequence[int] = (), **fields: object):
        new = segment(name, tokens, prefix, **fields)  # type: ignore[arg-type]
        assert tree.insert(new, as_tokens(prefix))
        tree.check_integrity()
        return new

    return put


def found(
    tree: StoredTree,
    tokens: Sequence[int],
    *,
    namespace: str = "",
    least: Quality = EXACT,
    pending: bool = False,
) -> list[tuple[str, int, int]]:
    """A match as (segment, start, stop)."""
    match = tree.match(namespace, as_tokens(tokens), least=least, only_ready=not pending)
    return spans_of(match)


def spans_of(match: StoredMatch) -> list[tuple[str, int, int]]:
    return [(span.segment.segment_id, span.start, span.stop) for span in match.spans]


def test_an_empty_tree_knows_nothing(tree: StoredTree) -> None:
    assert found(tree, P) == []
    assert len(tree) == 0
    tree.check_integrity()


def test_a_match_ends_where_the_tokens_differ(tree: StoredTree, put: Put) -> None:
    put("a", P)

    assert found(tree, P) == [("a", 0, 6)]
    assert found(tree, [*P, 7, 8]) == [("a", 0, 6)]
    assert found(tree, P[:4]) == [("a", 0, 4)]
    assert found(tree, [1, 2, 9, 4]) == [("a", 0, 2)]
    assert found(tree, [9]) == []
    assert found(tree, []) == []


def test_an_extension_is_a_second_segment(tree: StoredTree, put: Put) -> None:
    first = put("a", P)
    second = put("b", [7, 8], P)

    assert found(tree, [*P, 7, 8, 9]) == [("a", 0, 6), ("b", 0, 2)]
    assert second.parent is first
    assert first.dependents == 1


def test_two_branches_share_the_part_before_them(tree: StoredTree, put: Put) -> None:
    first = put("a", P)
    put("b", [40, 50], P[:3])
    put("c", [60], P[:5])

    assert found(tree, P) == [("a", 0, 6)], "one span, however often the node was split"
    assert found(tree, [1, 2, 3, 40, 50]) == [("a", 0, 3), ("b", 0, 2)]
    assert found(tree, [1, 2, 3, 4, 5, 60]) == [("a", 0, 5), ("c", 0, 1)]
    assert first.dependents == 2


def test_a_split_below_a_split_keeps_the_ranges(tree: StoredTree, put: Put) -> None:
    put("a", range(10))
    put("b", range(100, 110), range(7))
    put("c", range(200, 205), [*range(7), *range(100, 104)])
    put("d", range(300, 302), range(3))

    assert found(tree, [*range(7), *range(100, 104), *range(200, 205)]) == [
        ("a", 0, 7),
        ("b", 0, 4),
        ("c", 0, 5),
    ]
    assert found(tree, [*range(7), *range(100, 110)]) == [("a", 0, 7), ("b", 0, 10)]
    assert found(tree, [0, 1, 2, 300]) == [("a", 0, 3), ("d", 0, 1)]


def test_a_matched_part_can_be_cut_out(tree: StoredTree, put: Put) -> None:
    put("a", P)
    put("b", [40, 50], P[:3])
    match = tree.match("", as_tokens([1, 2, 3, 40, 50]))

    def cut(start: int, stop: int) -> list[tuple[str, int, int]]:
        return spans_of(StoredMatch(match.slice(start, stop)))

    assert match.num_tokens == 5
    assert cut(0, 5) == [("a", 0, 3), ("b", 0, 2)]
    assert cut(2, 4) == [("a", 2, 3), ("b", 0, 1)]
    assert cut(3, 5) == [("b", 0, 2)]
    assert cut(4, 5) == [("b", 1, 2)]
    assert cut(0, 3) == [("a", 0, 3)]
    assert cut(2, 2) == []


def test_namespaces_do_not_see_each_other(tree: StoredTree, put: Put) -> None:
    put("a", P, namespace="tenant-1")
    put("b", P, namespace="tenant-2")

    assert found(tree, P, namespace="tenant-1") == [("a", 0, 6)]
    assert found(tree, P, namespace="tenant-2") == [("b", 0, 6)]
    assert found(tree, P, namespace="") == []


def test_approximate_segments_are_seen_only_where_they_are_allowed(
    tree: StoredTree, put: Put
) -> None:
    put("a", P)
    put("b", [7, 8], P, quality=ONCE)

    tokens = [*P, 7, 8]
    assert found(tree, tokens) == [("a", 0, 6)]
    assert found(tree, tokens, least=ONCE) == [("a", 0, 6), ("b", 0, 2)]
    assert tree.match("", as_tokens(tokens)).quality == EXACT
    assert tree.match("", as_tokens(tokens), least=ONCE).quality == ONCE


def test_exact_and_approximate_kvs_of_the_same_tokens_live_side_by_side(
    tree: StoredTree, put: Put
) -> None:
    put("a", P)
    put("b", [7, 8], P, quality=ONCE)
    put("c", [7, 8], P)

    assert found(tree, [*P, 7, 8]) == [("a", 0, 6), ("c", 0, 2)]
    assert found(tree, [*P, 7, 8], least=ONCE) == [("a", 0, 6), ("c", 0, 2)], "exact first"


def test_pending_segments_are_invisible_until_they_are_ready(tree: StoredTree, put: Put) -> None:
    put("a", P)
    late = put("b", [7, 8], P, ready=False)
    put("c", [9], [*P, 7, 8])

    tokens = [*P, 7, 8, 9]
    assert found(tree, tokens) == [("a", 0, 6)], "nor what hangs below them"
    assert found(tree, tokens, pending=True) == [("a", 0, 6), ("b", 0, 2), ("c", 0, 1)]
    late.state = SegmentState.READY
    assert found(tree, tokens) == [("a", 0, 6), ("b", 0, 2), ("c", 0, 1)]


def test_matching_changes_nothing(tree: StoredTree, put: Put) -> None:
    first = put("a", P)
    before = (first.last_access, first.hits)

    found(tree, [1, 2, 9])
    found(tree, P, namespace="new")

    assert (first.last_access, first.hits) == before
    assert found(tree, P) == [("a", 0, 6)]


def test_touching_a_match_makes_its_segments_the_latest(tree: StoredTree, put: Put) -> None:
    first, second, third = put("a", P), put("b", [7], P), put("c", [8], P)

    tree.touch(tree.match("", as_tokens([*P, 7])))

    assert first.last_access == second.last_access > third.last_access
    assert (first.hits, second.hits, third.hits) == (1, 1, 0)


def test_new_segments_are_later_than_all_before(put: Put) -> None:
    times = [put(name, [number], ()).last_access for number, name in enumerate("abc")]

    assert times == sorted(set(times))


def test_time_starts_where_it_is_told(put: Put) -> None:
    tree = StoredTree(first_time=100)
    new, old = segment("a", P), segment("b", [9], last_access=7)
    tree.insert(new, as_tokens([]))
    tree.insert(old, as_tokens([]))

    assert new.last_access >= 100
    assert old.last_access == 7, "kept from before the restart"


def test_a_second_segment_for_the_same_place_is_refused(tree: StoredTree, put: Put) -> None:
    put("a", P)

    assert not tree.insert(segment("b", [1, 9]), as_tokens([]))
    assert not tree.insert(segment("c", [4, 9], P[:3]), as_tokens(P[:3]))
    assert not tree.insert(segment("a", [9]), as_tokens([])), "the name is taken"
    tree.check_integrity()
    assert len(tree) == 1
    assert found(tree, P) == [("a", 0, 6)]


@pytest.mark.parametrize(
    "prefix", [[9], [1, 9], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 9], [2, 3], [1, 3]]
)
def test_a_segment_after_an_unknown_prefix_is_refused(
    tree: StoredTree, put: Put, prefix: list[int]
) -> None:
    put("a", P)

    assert not tree.insert(segment("b", [50], prefix), as_tokens(prefix))
    tree.check_integrity()
    assert found(tree, P) == [("a", 0, 6)]
    assert found(tree, [*P, 50]) == [("a", 0, 6)]


def test_a_prefix_that_leaves_a_node_midway_is_not_found_below_its_end(
    tree: StoredTree, put: Put
) -> None:
    """`a` is 1 2 7 and `b` follows it with 3 4: the prefix 1 2 3 4 is not in the tree.

    Were it taken for known, KVs computed after 1 2 3 4 would be served after 1 2 7 3 4.
    """
    put("a", [1, 2, 7])
    put("b", [3, 4], [1, 2, 7])

    assert not tree.insert(segment("c", [5, 6], [1, 2, 3, 4]), as_tokens([1, 2, 3, 4]))
    assert found(tree, [1, 2, 7, 3, 4, 5, 6]) == [("a", 0, 3), ("b", 0, 2)]


def test_the_best_of_the_qualities_that_a_request_takes_is_followed(
    tree: StoredTree, put: Put
) -> None:
    put("a", P)
    for name, quality in (("b", TWICE), ("c", ONCE), ("d", HALF)):
        put(name, [7, 8], P, quality=quality)

    def tail(least: Quality) -> str:
        return found(tree, [*P, 7, 8], least=least)[-1][0]

    assert tail(EXACT) == "a"
    assert tail(HALF) == tail(ONCE) == "d"
    assert tail(Quality(1, 0.75)) == "a", "no more than half of a prefix is behind any of them"
    assert tail(TWICE) == tail(Quality(2, 0.25)) == "d"
    assert tail(Quality(2, 0.75)) == "a"
    tree.lose(tree.get("d"))
    assert tail(HALF) == "a" and tail(ONCE) == "c"
    assert tail(TWICE) == "b" and tail(Quality(2, 0.25)) == "c"


def test_a_match_is_as_good_as_its_worst_part(tree: StoredTree, put: Put) -> None:
    put("a", P)
    put("b", [7], P, quality=HALF)
    put("c", [8], [*P, 7], quality=Quality(2, 0.25))

    def quality(length: int) -> Quality:
        tokens = as_tokens([*P, 7, 8][:length])
        return tree.match("", tokens, least=Quality(2, 0.25)).quality

    assert [quality(n) for n in (0, 6, 7, 8)] == [EXACT, EXACT, HALF, Quality(2, 0.25)]


def test_of_each_quality_there_is_one_child(tree: StoredTree, put: Put) -> None:
    put("a", [1, 2], quality=ONCE)
    put("b", [1, 3], quality=HALF)

    assert not tree.insert(segment("c", [1, 4], quality=ONCE), as_tokens([]))
    put("d", [4], [1], quality=HALF)
    assert found(tree, [1, 4], least=ONCE) == [("b", 0, 1), ("d", 0, 1)]


@pytest.mark.parametrize("state", SegmentState)
def test_a_match_ends_before_what_cannot_be_read(
    tree: StoredTree, put: Put, state: SegmentState
) -> None:
    put("a", P)
    second = put("b", [7, 8], P)
    put("c", [9], [*P, 7, 8])
    tokens = [*P, 7, 8, 9]

    second.state = state

    whole = [("a", 0, 6), ("b", 0, 2), ("c", 0, 1)]
    assert found(tree, tokens, pending=True) == whole
    assert found(tree, tokens) == (whole if state is SegmentState.READY else whole[:1])
    assert second.ready == (state is SegmentState.READY)
    assert second.on_disk == (state in (SegmentState.READY, SegmentState.SUSPECT))


def test_exact_segments_do_not_hang_below_approximate_ones(tree: StoredTree, put: Put) -> None:
    put("a", P)
    put("b", [7, 8], P, quality=ONCE)

    assert not tree.insert(segment("c", [9], [*P, 7, 8]), as_tokens([*P, 7, 8]))
    put("d", [9], [*P, 7, 8], quality=ONCE)


def test_losing_a_leaf_leaves_the_rest(tree: StoredTree, put: Put) -> None:
    first = put("a", P)
    second = put("b", [40, 50], P[:3])

    tree.lose(second)

    tree.check_integrity()
    assert "b" not in tree and tree.get("b") is None
    assert second.state is SegmentState.LOST, "who holds it sees that"
    assert first.dependents == 0
    assert found(tree, [1, 2, 3, 40]) == [("a", 0, 3)]
    assert found(tree, P) == [("a", 0, 6)]
    tree.lose(first)
    tree.check_integrity()
    assert found(tree, P) == []
    put("c", P)


# ---- holes

BRANCH, LEAF = [*P[:3], 40], [*P, 7]


@pytest.fixture
def lost(tree: StoredTree, put: Put) -> StoredSegment:
    """1 to 6, with branches after 3, at its end, and one after 2 that is gone again; then lost."""
    first = put("a", P)
    put("b", BRANCH[3:], P[:3])
    put("c", LEAF[6:], P)
    tree.lose(put("x", [9], P[:2]))
    tree.lose(first)
    tree.check_integrity()
    return first


def holes(tree: StoredTree, tokens: Sequence[int], least: Quality = EXACT) -> list[int]:
    """Tokens of the segments along a path, negative if they are lost."""
    spans = tree.match("", as_tokens(tokens), least=least, only_ready=False).spans
    return [-len(s) if s.segment.state is SegmentState.LOST else len(s) for s in spans]


def test_each_run_between_branches_is_a_hole_of_its_own(
    tree: StoredTree, lost: StoredSegment
) -> None:
    assert tree.get("a") is None and lost.state is SegmentState.LOST
    assert holes(tree, LEAF) == [-2, -1, -3, 1]
    assert holes(tree, BRANCH) == [-2, -1, 1]
    assert found(tree, LEAF) == []
    spans = tree.match("", as_tokens(LEAF), only_ready=False).spans
    infos = [span.segment.info for span in spans[:3]]
    assert [info.prefix_len for info in infos] == [0, 2, 3]
    assert [info.tokens.tolist() for info in infos] == [[1, 2], [3], [4, 5, 6]]
    assert len({info.segment_id for info in infos} | {"a"}) == 4
    assert [span.segment.dependents for span in spans] == [1, 2, 1, 0]
    assert [span.segment.parent for span in spans[1:]] == [span.segment for span in spans[:3]]


def test_the_end_that_nothing_builds_on_is_no_hole(tree: StoredTree, put: Put) -> None:
    first = put("a", P)
    put("b", BRANCH[3:], P[:3])

    tree.lose(first)

    tree.check_integrity()
    assert holes(tree, P) == [-3]


def test_holes_are_filled_by_one_segment(tree: StoredTree, lost: StoredSegment, put: Put) -> None:
    new = put("n", [*P, 8])

    assert found(tree, BRANCH) == [("n", 0, 3), ("b", 0, 1)]
    assert found(tree, LEAF) == [("n", 0, 6), ("c", 0, 1)]
    assert found(tree, [*P, 8]) == [("n", 0, 7)]
    assert (new.dependents, tree.node_starts(new)) == (2, [0, 2, 3, 6])


def test_holes_are_filled_with_what_follows_them(
    tree: StoredTree, lost: StoredSegment, put: Put
) -> None:
    new = put("n", [*P[:3], 50, 51])

    assert found(tree, [*P[:3], 50, 51]) == [("n", 0, 5)]
    assert found(tree, BRANCH) == [("n", 0, 3), ("b", 0, 1)]
    assert holes(tree, LEAF) == [3, -3, 1]
    assert new.dependents == 2


@pytest.mark.parametrize(("length", "left"), [(1, [-1, -1, -3, 1]), (4, [-2, 1])])
def test_a_part_of_a_hole_is_filled(
    tree: StoredTree, lost: StoredSegment, put: Put, length: int, left: list[int]
) -> None:
    put("n", P[:length])

    assert found(tree, LEAF) == [("n", 0, length)]
    assert holes(tree, LEAF) == [length, *left]
    put("m", P[length:], P[:length])
    assert found(tree, LEAF) == [("n", 0, length), ("m", 0, 6 - length), ("c", 0, 1)]


def test_a_branch_off_the_middle_of_a_hole_cuts_it(
    tree: StoredTree, lost: StoredSegment, put: Put
) -> None:
    put("d", [60], P[:5])

    assert holes(tree, LEAF) == [-2, -1, -2, -1, 1]
    put("n", P[:5])
    assert found(tree, [*P[:5], 60]) == [("n", 0, 5), ("d", 0, 1)]


def test_a_hole_ends_before_what_is_stored(tree: StoredTree, put: Put) -> None:
    first = put("a", P)
    put("b", [7, 8], P)
    tree.lose(first)

    assert not tree.insert(segment("n", [*P, 7]), as_tokens([]))
    tree.check_integrity()
    put("n", P)
    assert found(tree, [*P, 7, 8]) == [("n", 0, 6), ("b", 0, 2)]


def test_a_hole_is_filled_in_its_own_quality_only(tree: StoredTree, put: Put) -> None:
    first = put("a", P, quality=ONCE)
    put("b", [7], P, quality=ONCE)
    tree.lose(first)

    put("n", P)
    assert holes(tree, [*P, 7], ONCE) == [6], "the better branch hides it"
    put("m", P, quality=ONCE)
    assert [s.state for s in tree.segments()].count(SegmentState.LOST) == 0


def test_what_fills_a_hole_can_be_lost_again(
    tree: StoredTree, lost: StoredSegment, put: Put
) -> None:
    new = put("n", [*P[:3], 50, 51])

    tree.lose(new)

    tree.check_integrity()
    assert holes(tree, LEAF) == [-2, -1, -3, 1]
    assert holes(tree, [*P[:3], 50, 51]) == [-2, -1], "its own tokens are gone"


def test_holes_go_with_the_last_that_builds_on_them(tree: StoredTree, lost: StoredSegment) -> None:
    tree.lose(tree.get("c"))
    tree.check_integrity()
    assert holes(tree, LEAF) == [-2, -1]
    tree.lose(tree.get("b"))
    tree.check_integrity()
    assert len(tree) == 0 and holes(tree, LEAF) == []


def test_digest_of_a_prefix_depends_on_namespace_and_every_token() -> None:
    prefixes = [(), (0,), (0, 0), (1,), (256,), (1, 2), (2, 1)]
    names = ["", "a", "a\0", "\0"]
    digests = {prefix_digest(n, as_tokens(p)) for n, p in itertools.product(names, prefixes)}

    assert len(digests) == len(names) * len(prefixes)
    assert prefix_digest("a", as_tokens([1, 2])) == prefix_digest("a", np.array([1, 2], np.int64))


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_common_prefix_len(left: list[int], right: list[int]) -> None:
    length = common_prefix_len(as_tokens(left), as_tokens(right))

    assert left[:length] == right[:length]
    assert length == min(len(left), len(right)) or left[length] != right[length]


def in_another_file(old: StoredSegment, name: str) -> SegmentInfo:
    return dataclasses.replace(old.info, segment_id=name, generation=old.info.generation + 1)


def test_a_replaced_segment_has_its_place_under_another_name(tree: StoredTree, put: Put) -> None:
    first, second = put("a", P), put("b", [40, 50], P[:3])
    third = put("c", [7], P)
    match = tree.match("", as_tokens(P))

    tree.replace(first, in_another_file(first, "z"), 12345)

    tree.check_integrity()
    assert "a" not in tree and tree.get("z") is first
    assert (first.segment_id, first.file_bytes, first.dependents) == ("z", 12345, 2)
    assert found(tree, [*P, 7]) == [("z", 0, 6), ("c", 0, 1)]
    assert found(tree, [1, 2, 3, 40]) == [("z", 0, 3), ("b", 0, 1)]
    assert match.spans[0].segment is first, "a match is not out of date"
    assert second.parent is third.parent is first
    for own in (second, third, first):
        tree.lose(own)
        tree.check_integrity()
    assert found(tree, P) == []


def test_a_replacement_has_the_same_tokens_and_a_new_name(tree: StoredTree, put: Put) -> None:
    first = put("a", P)
    put("b", [9])

    with pytest.raises(AssertionError):
        tree.replace(first, in_another_file(first, "b"), 1)
    with pytest.raises(AssertionError):
        tree.replace(first, dataclasses.replace(first.info, tokens=as_tokens([1, 2])), 1)


def test_nodes_of_a_segment_begin_where_others_branch_off(tree: StoredTree, put: Put) -> None:
    first = put("a", P)
    assert tree.node_starts(first) == [0]
    second = put("b", [40, 50, 60], P[:4])
    assert tree.node_starts(first) == [0, 4]
    put("c", [70], P[:2])
    put("d", [8], P)
    put("e", [9], [*P[:4], 40])

    assert tree.node_starts(first) == [0, 2, 4], "an extension at its end splits nothing"
    assert tree.node_starts(second) == [0, 1]
    tree.replace(first, in_another_file(first, "z"), 1)
    assert tree.node_starts(first) == [0, 2, 4]


# ---- after a restart


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("newer", ["generation", "last_access", "name"])
def test_of_two_files_of_the_same_tokens_the_newer_is_restored(
    tree: StoredTree, names: tuple[str, str], newer: str
) -> None:
    """The process ended between the publication of one and the removal of the other."""
    old, below = segment(names[0], P, last_access=5), segment("c", [7], P)
    info = dataclasses.replace(old.info, segment_id=names[1], generation=int(newer == "generation"))
    # An old row has a time, a new file without a row has none.
    times = {"generation": 0, "last_access": 6, "name": 5}
    new = dataclasses.replace(old, info=info, last_access=times[newer])
    if newer == "name":
        old, new = sorted([old, new], key=lambda own: own.segment_id, reverse=True)

    kept, others = newest_files(sorted([old, new, below], key=lambda s: s.segment_id))

    assert others == [old] and len(kept) == 2
    assert restore_segments(tree, kept) == []
    tree.check_integrity()
    assert found(tree, [*P, 7]) == [(new.segment_id, 0, 6), ("c", 0, 1)]


def test_a_file_that_came_back_takes_no_place_of_what_was_used_later(tree: StoredTree) -> None:
    """However often it was rewritten: its generation says nothing of others."""
    back = segment("a", P)
    back.info = dataclasses.replace(back.info, generation=3)
    new, below = segment("n", [*P[:3], 40], last_access=7), segment("m", [50], [*P[:3], 40])

    kept, others = newest_files([back, new, below])

    assert others == [] and restore_segments(tree, kept) == [back]
    assert found(tree, [*P[:3], 40, 50]) == [("n", 0, 4), ("m", 0, 1)]


def test_files_of_other_places_qualities_or_namespaces_are_all_kept() -> None:
    segments = [
        segment("a", P),
        segment("b", P, quality=ONCE),
        segment("c", P, namespace="other"),
        segment("d", P, P),
        segment("e", P[:5]),
    ]

    kept, others = newest_files(segments)

    assert len(kept) == 5 and others == []


def family() -> list[StoredSegment]:
    return [
        segment("a", P),
        segment("b", [40, 50], P[:3]),
        segment("c", [60], [*P[:3], 40]),
        segment("d", [7, 8], P, quality=ONCE),
        segment("e", [9], [*P, 7, 8], quality=ONCE),
        segment("f", P, namespace="other"),
        segment("g", [7], P, namespace="other"),
    ]


@pytest.mark.parametrize("seed", range(8))
def test_segments_are_restored_from_any_order(tree: StoredTree, seed: int) -> None:
    segments = family()
    np.random.default_rng(seed).shuffle(segments)  # type: ignore[arg-type]

    lost = restore_segments(tree, segments)

    assert lost == []
    tree.check_integrity()
    assert found(tree, [*P[:3], 40, 60]) == [("a", 0, 3), ("b", 0, 1), ("c", 0, 1)]
    assert found(tree, [*P, 7, 8, 9], least=ONCE) == [("a", 0, 6), ("d", 0, 2), ("e", 0, 1)]
    assert found(tree, [*P, 7, 8, 9]) == [("a", 0, 6)]
    assert found(tree, [*P, 7], namespace="other") == [("f", 0, 6), ("g", 0, 1)]


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("a", {"b", "c", "d", "e"}),
        ("b", {"c"}),
        ("d", {"e"}),
        ("f", {"g"}),
        ("c", set()),
    ],
)
def test_segments_above_which_one_is_gone_are_lost(
    tree: StoredTree, missing: str, expected: set[str]
) -> None:
    lost = restore_segments(tree, [s for s in family() if s.segment_id != missing])

    assert {s.segment_id for s in lost} == expected
    assert {s.segment_id for s in tree.segments()} == set("abcdefg") - expected - {missing}
    tree.check_integrity()


def test_two_segments_for_the_same_place_are_not_both_restored(tree: StoredTree) -> None:
    lost = restore_segments(tree, [segment("a", P), segment("b", [1, 2, 9])])

    assert [s.segment_id for s in lost] == ["b"]
    tree.check_integrity()


def test_a_segment_is_restored_below_a_parent_that_a_better_one_hides(tree: StoredTree) -> None:
    """Approximate 1 2 3 4 came first, then exact 1 2 7 and 3 4 after that.

    `d` was computed after 1 2 3 4, and must not turn up after 1 2 7 3 4.
    """
    lost = restore_segments(
        tree,
        [
            segment("a", [1, 2, 3, 4], quality=ONCE),
            segment("b", [1, 2, 7]),
            segment("c", [3, 4], [1, 2, 7]),
            segment("d", [5, 6], [1, 2, 3, 4], quality=ONCE),
        ],
    )

    assert lost == []
    tree.check_integrity()
    match = found(tree, [1, 2, 7, 3, 4, 5, 6], least=ONCE)
    assert match == [("b", 0, 3), ("c", 0, 2)]
    above = tree.get("d").parent
    assert above is not None and above.segment_id == "a"
    tree.lose(tree.get("c"))
    tree.lose(tree.get("b"))
    assert found(tree, [1, 2, 3, 4, 5, 6], least=ONCE) == [("a", 0, 4), ("d", 0, 2)]


def test_segments_are_restored_on_any_path_that_suffices(tree: StoredTree) -> None:
    """Twice the same tokens, and below each something that begins alike."""
    lost = restore_segments(
        tree,
        [
            segment("a", P, quality=ONCE),
            segment("b", P),
            segment("c", [7, 8], P, quality=ONCE),
            segment("d", [7, 9], P, quality=ONCE),
            segment("e", [7, 10], P, quality=HALF),
            segment("f", [7, 11], P),
        ],
    )

    assert lost == []
    tree.check_integrity()
    parents = {name: tree.get(name).parent.segment_id for name in "cdef"}
    assert parents == {"c": "b", "d": "a", "e": "b", "f": "b"}


def test_a_path_of_too_low_a_quality_is_no_place(tree: StoredTree) -> None:
    lost = restore_segments(
        tree, [segment("a", P, quality=ONCE), segment("b", [7], P, quality=HALF)]
    )

    assert [own.segment_id for own in lost] == ["b"]


DAMAGE: dict[str, Callable[[StoredSegment, StoredSegment], None]] = {
    "a wrong count": lambda a, b: setattr(a, "dependents", 2),
    "a wrong parent": lambda a, b: setattr(b, "parent", None),
    "another namespace": lambda a, b: object.__setattr__(a.info, "namespace", "other"),
    "exact below approximate": lambda a, b: object.__setattr__(a.info, "quality", ONCE),
    "other tokens": lambda a, b: object.__setattr__(a.info, "tokens", as_tokens(range(6))),
    "lost without being a hole": lambda a, b: setattr(b, "state", SegmentState.LOST),
    "more tokens": lambda a, b: object.__setattr__(a.info, "tokens", as_tokens([*P, 1])),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_tree_is_noticed(tree: StoredTree, put: Put, damage: str) -> None:
    first = put("a", P)
    second = put("b", [7], P)

    DAMAGE[damage](first, second)

    with pytest.raises(AssertionError):
        tree.check_integrity()
