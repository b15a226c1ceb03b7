"""The tree of stored prefixes, one scenario at a time.

And how much of a match can be used where layers have sliding windows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impress_sglang.serving.load_planner import LoadPlanner
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.store import tree as tree_module
from impress_sglang.store.prefix_hashes import prefix_digest
from impress_sglang.store.stored import SegmentState, StoredMatch, StoredSegment, StoredSpan
from impress_sglang.store.tree import StoredTree
from impress_sglang.store.unattached import UnattachedSegments
from tests.unit.kv_factory import as_tokens, stored_segment
from tests.unit.prefix_model import QUALITIES, Known, Path, PrefixModel
from tests.unit.store_checks import check_tree

P = (1, 2, 3, 4, 5, 6)  # a prompt that others share


Put = Callable[..., StoredSegment]


@pytest.fixture
def tree() -> StoredTree:
    return StoredTree()


@pytest.fixture
def put(tree: StoredTree) -> Put:
    """Insert a segment after a prefix that is in the tree, and check the tree."""

    def put(
        name: str, tokens: Sequence[int], prefix: Sequence[int] = (), **fields: Any
    ) -> StoredSegment:
        new = stored_segment(name, tokens, prefix, **fields)
        assert tree.insert(new, as_tokens(prefix))
        check_tree(tree)
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
    return [(span.segment.segment_id, span.start, span.stop) for span in match.spans]


def test_time_goes_on_after_a_restart(tree: StoredTree, put: Put) -> None:
    new, old = stored_segment("a", P), stored_segment("b", [9], last_access=7)

    assert UnattachedSegments(tree).restore([new, old]) == ([], [])

    assert new.last_access == 8, "of a file without a row"
    assert old.last_access == 7, "kept from before the restart"
    assert put("c", [10]).last_access > 8


def test_what_was_blended_gives_way_to_all_else(tree: StoredTree, put: Put) -> None:
    """Whenever that comes, and only to who takes it; neither hides what is behind the other."""
    half = Quality(1, 8.0, 0.5)
    put("half", [7, 8], put("a", P).info.tokens, quality=half)
    put("tenth", [9], [*P, 7, 8], quality=Quality(2, 5.0, 0.1))
    tokens = [*P, 7, 8, 9]
    assert [len(found(tree, tokens, least=Quality(8, 5.0, share))) for share in (1, 0.5, 0.1)] == [
        *(1, 2, 3)
    ]
    put("coarse", [7, 8], P, quality=Quality(8, 4.0))
    assert found(tree, tokens, least=half)[1:] == [("half", 0, 2)]
    assert found(tree, tokens, least=Quality(8, 4.0, 0.1))[1:] == [("coarse", 0, 2)]
    put("exact", [7, 8, 9], P)
    for min_quality in (EXACT, half, Quality(8, 4.0, 0.1)):
        assert found(tree, tokens, least=min_quality)[1:] == [("exact", 0, 3)]


def test_holes_are_filled_in_part_and_end_where_nothing_builds_on_them(
    tree: StoredTree, put: Put
) -> None:
    def all_of(tokens: Sequence[int]) -> list[tuple[str, int, int]]:
        check_tree(tree)
        return [span for span in found(tree, tokens, pending=True) if span[0] in names]

    names = {"inside", "end", "middle", "head"}
    long = put("long", P)
    put("inside", [9], P[:2])
    end = put("end", [8], P)
    assert not tree.insert(
        stored_segment("x", [5], [1, 0, 0, 0, 0, 0, 8]), as_tokens([1, *[0] * 5, 8])
    )
    tree.lose(long)
    put("middle", P[2:4], P[:2])
    assert all_of([*P, 8]) == [("middle", 0, 2), ("end", 0, 1)]
    put("head", P[:1])
    assert all_of([*P, 8]) == [("head", 0, 1), ("middle", 0, 2), ("end", 0, 1)]
    assert all_of([*P[:2], 9]) == [("head", 0, 1), ("inside", 0, 1)]
    tree.lose(end)
    assert tree.match("", as_tokens(P), only_ready=False).num_tokens == 4
    long = put("long", [7] * 6)
    put("early", [9], [7] * 2)
    end = put("end", [9], [7] * 6)
    tree.lose(long)
    tree.lose(end)
    check_tree(tree)
    assert tree.match("", as_tokens([7] * 6), only_ready=False).num_tokens == 2


def test_digest_of_a_prefix_depends_on_namespace_and_every_token() -> None:
    prefixes = [(), (0,), (0, 0), (1,), (256,), (1, 2), (2, 1)]
    names = ["", "a", "a\0", "\0"]
    digests = {prefix_digest(n, as_tokens(p)) for n, p in itertools.product(names, prefixes)}

    assert len(digests) == len(names) * len(prefixes)
    assert prefix_digest("a", as_tokens([1, 2])) == prefix_digest("a", np.array([1, 2], np.int64))


def test_a_file_that_came_back_takes_no_place_of_what_was_used_later(tree: StoredTree) -> None:
    """However often it was rewritten: its generation says nothing of others."""
    back = stored_segment("a", P)
    back.info = dataclasses.replace(back.info, generation=3)
    new, below = (
        stored_segment("n", [*P[:3], 40], last_access=7),
        stored_segment("m", [50], [*P[:3], 40]),
    )

    assert UnattachedSegments(tree).restore([back, new, below]) == ([], [back])
    assert found(tree, [*P[:3], 40, 50]) == [("n", 0, 4), ("m", 0, 1)]


def test_what_follows_a_match(tree: StoredTree, put: Put) -> None:
    """Also inside of a segment, the last one first, and only if it can be read."""
    put("a", P)
    put("b", [7, 8], P)
    put("inside", [-1, -1], P[:3])
    put("between", [-1, -1], P)
    late = put("behind", [-1, -1], [*P, 7, 8])

    def ends(tokens: Sequence[int]) -> list[tuple[int, str, int]]:
        match = tree.match("", as_tokens(tokens))
        parts = [(end, StoredMatch(match.slice(0, end))) for end in tree.states_in(match)]
        found = [(end, *tree.state_behind(part)) for end, part in parts]
        return [(end, span.segment.segment_id, len(span)) for end, span in found]

    assert ends([*P, 7, 8, 9]) == [(8, "behind", 2), (6, "between", 2), (3, "inside", 2)]
    assert ends([*P, 7, 9]) == [(6, "between", 2), (3, "inside", 2)]
    assert ends(P[:5]) == [(3, "inside", 2)] and ends(P[:2]) == []
    tree.touch(tree.match("", as_tokens(P)))
    used = [s for s in tree.segments() if s.hits and s.last_access == tree.order.now]
    assert [segment.segment_id for segment in used] == ["a", "between"]
    with mock.patch.object(tree_module, "_MOST_STATES", 2):
        assert ends([*P, 7, 8, 9]) == [(8, "behind", 2), (6, "between", 2)]
    late.state = SegmentState.SUSPECT
    assert ends([*P, 7, 8]) == [(6, "between", 2), (3, "inside", 2)]
    assert not tree.state_behind(tree.match("", as_tokens([*P, 7, 8])))


@pytest.mark.parametrize("seed", range(8))
def test_states_are_known_of_what_comes_and_goes(tree: StoredTree, seed: int) -> None:
    """Also where holes are dug, filled and split below them."""
    chance, seen = np.random.default_rng(seed), 0
    for number in range(200):
        tokens = (chance.random(8) < 0.1).astype(int).tolist()
        start, stop = sorted(chance.integers(0, 9, 2).tolist())
        added = tokens[start:stop] if number % 2 else [-1]
        if added and (start or number % 2):
            new = stored_segment(str(number), added, tokens[:start])
            tree.insert(new, as_tokens(tokens[:start]))
        there = [segment for segment in tree.segments() if not segment.lost]
        if len(there) > 8:
            tree.lose(there[chance.integers(len(there))])
        check_tree(tree)
        seen += any(segment.states for segment in tree.segments() if segment.lost)
    assert seen > 20


spans = st.builds(
    lambda before, length, windows_from: (before, before + length, windows_from),
    st.integers(0, 5),
    st.integers(1, 20),
    st.integers(0, 30),
)


@given(found=st.lists(spans, max_size=5), window=st.integers(1, 12), page=st.integers(1, 4))
def test_the_longest_prefix_with_a_whole_window(
    found: list[tuple[int, int, int]], window: int, page: int
) -> None:
    segments: list[Any] = [
        SimpleNamespace(info=SimpleNamespace(windows_from=first)) for *_, first in found
    ]
    match = StoredMatch(
        tuple(
            StoredSpan(segment, start, stop)
            for segment, (start, stop, _) in zip(segments, found, strict=True)
        )
    )
    # Of each token, whether layers with windows have it.
    has = [at >= first for start, stop, first in found for at in range(start, stop)]
    usable = [
        length
        for length in range(0, len(has) + 1, page)
        if all(has[max(length - window, 0) : length])
    ]
    assert match.with_windows(window, page) == max(usable)


@pytest.mark.parametrize(("page", "usable"), [(1, 6), (4, 4), (8, 0)])
def test_states_that_another_page_size_has_left_are_passed_over(page: int, usable: int) -> None:
    tree, tokens = StoredTree(), as_tokens(range(9))
    tree.insert(stored_segment("a", tokens), tokens[:0])
    for end in (4, 6):
        tree.insert(stored_segment(f"state {end}", [-1, -1], tokens[:end]), tokens[:end])
    service: Any = SimpleNamespace(config=None, store=SimpleNamespace(tree=tree))
    planner, match = LoadPlanner(service, page, states=True), tree.match("", tokens)
    assert planner.usable(match) == usable


RUNS = st.lists(st.integers(0, 1), max_size=4).map(tuple)
PUT = st.tuples(
    st.integers(0, 9), st.integers(0, 12), RUNS, RUNS.filter(len), st.sampled_from(QUALITIES)
)
# A segment that is put behind so many tokens of another and some more, or which one is lost.
STEPS = st.lists(st.one_of(PUT, PUT, st.integers(0, 9)), min_size=12, max_size=30)


def path_of(segment: StoredSegment) -> Path:
    """Token and quality of each position before a segment."""
    path, tokens = list[tuple[int, Quality]](), segment.prompt()
    for at in reversed(range(segment.info.prefix_len)):
        while segment.info.prefix_len > at:
            assert segment.parent is not None
            segment = segment.parent
        path.append((int(tokens[at]), segment.info.quality))
    return tuple(reversed(path))


@settings(max_examples=4 * settings.default.max_examples, deadline=None)
@given(STEPS)
def test_against_a_model_without_a_tree(steps: list[Any]) -> None:
    """What is stored, in which place, and lost again."""
    tree, model, stored = StoredTree(), PrefixModel(), dict[str, StoredSegment]()
    for number, step in enumerate(steps):
        if isinstance(step, int):
            if stored:
                name = list(stored)[step % len(stored)]
                tree.lose(stored.pop(name))
                model.lose(name)
        else:
            which, cut, more, added, quality = step
            known = list(model.segments.values())
            path = known[which % len(known)].path[:cut] if known else ()
            prefix = [*(token for token, _ in path), *more]
            place = model.place_for("", prefix, added, quality)
            new = stored_segment(str(number), added, prefix, quality=quality)
            assert tree.insert(new, as_tokens(prefix)) == (place is not None)
            if place is not None:
                assert path_of(new) == place
                stored[str(number)] = new
                model.add(Known(str(number), "", place, tuple((token, quality) for token in added)))
        check_tree(tree)
        assert sum(s.info.num_tokens for s in tree.segments() if s.lost) == model.num_holes
        for known in model.segments.values():
            tokens = [token for token, _ in known.path]
            for min_quality in QUALITIES:
                path = model.follow("", tokens, min_quality)
                spans = tree.match("", as_tokens(tokens), least=min_quality, only_ready=False).spans
                names = [
                    "" if span.segment.lost else span.segment.segment_id
                    for span in spans
                    for _ in range(len(span))
                ]
                assert names == [
                    name for name, start, stop in model.spans("", path) for _ in range(start, stop)
                ]
            behind = {s.segment_id for s in tree.below("", as_tokens(tokens)) if not s.lost}
            assert behind == {
                name
                for name, known in model.segments.items()
                if [token for token, _ in known.path][: len(tokens)] == tokens
            }
