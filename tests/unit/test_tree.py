"""The tree of stored prefixes, one scenario at a time.

And how much of a match can be used where layers have sliding windows.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.serving.load_planner import LoadPlanner
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.segment import STATE_TOKEN
from impress_sglang.store import tree as tree_module
from impress_sglang.store.orders import is_in
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


def test_time_goes_on_after_a_restart(tree: StoredTree, put: Put) -> None:
    new, old = stored_segment("a", P), stored_segment("b", [9], last_access=7)

    assert UnattachedSegments(tree).restore([new, old]) == ([], [])

    assert new.last_access == 8, "of a file without a row"
    assert old.last_access == 7, "kept from before the restart"
    assert put("c", [10]).last_access > 8


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
    match = tree.match("", as_tokens([*P[:3], 40, 50]))
    assert [span.segment.segment_id for span in match.spans] == ["n", "m"]


def test_what_follows_a_match(tree: StoredTree, put: Put) -> None:
    """Also inside of a segment, the last one first, and only if it can be read."""
    put("a", P)
    put("b", [7, 8], P)
    put("inside", [-1, -1], P[:3])
    put("between", [-1, -1], P)
    late = put("behind", [-1, -1], [*P, 7, 8])

    def ends(tokens: Sequence[int]) -> list[tuple[int, str, int]]:
        match = tree.match("", as_tokens(tokens))
        parts = [(end, StoredMatch(match.slice(0, end))) for end in tree.state_positions(match)]
        found = [(end, *tree.end_state_of(part)) for end, part in parts]
        return [(end, span.segment.segment_id, len(span)) for end, span in found]

    assert ends([*P, 7, 8, 9]) == [(8, "behind", 2), (6, "between", 2), (3, "inside", 2)]
    assert ends([*P, 7, 9]) == [(6, "between", 2), (3, "inside", 2)]
    assert ends(P[:5]) == [(3, "inside", 2)] and ends(P[:2]) == []
    tree.touch(tree.match("", as_tokens(P)))
    used = [s for s in tree.segments() if s.hits and s.last_access == tree.order.now]
    assert [segment.segment_id for segment in used] == ["a", "between"]
    with mock.patch.object(tree_module, "_MAX_STATES", 2):
        assert ends([*P, 7, 8, 9]) == [(8, "behind", 2), (6, "between", 2)]
    late.state = SegmentState.SUSPECT
    assert ends([*P, 7, 8]) == [(6, "between", 2), (3, "inside", 2)]
    assert not tree.end_state_of(tree.match("", as_tokens([*P, 7, 8])))


WINDOWED = [stored_segment("a", P, windows_from=first) for first in range(31)]
SPANS = st.builds(
    lambda segment, start, length: StoredSpan(segment, start, start + length),
    st.sampled_from(WINDOWED),
    st.integers(0, 5),
    st.integers(1, 20),
)


@given(spans=st.lists(SPANS, max_size=5), window=st.integers(1, 12), page=st.integers(1, 4))
def test_the_longest_prefix_with_a_whole_window(
    spans: list[StoredSpan], window: int, page: int
) -> None:
    match = StoredMatch(tuple(spans))
    # Of each token, whether layers with windows have it.
    has = [
        at >= span.segment.info.windows_from
        for span in spans
        for at in range(span.start, span.stop)
    ]
    usable = [
        length
        for length in range(0, len(has) + 1, page)
        if all(has[max(length - window, 0) : length])
    ]
    assert match.with_windows(window, page) == max(usable)


@pytest.mark.parametrize(("page", "usable"), [(1, 6), (4, 4), (8, 0)])
def test_states_that_another_page_size_has_left_are_passed_over(
    tree: StoredTree, put: Put, page: int, usable: int
) -> None:
    put("a", P)
    for end in (4, 6):
        put(f"state {end}", [-1, -1], P[:end])
    service: Any = SimpleNamespace(config=None, store=SimpleNamespace(tree=tree))
    planner = LoadPlanner(service, page, states=True)
    assert planner.usable_tokens(tree.match("", as_tokens(P))) == usable


def path_of(segment: StoredSegment) -> Path:
    """Token and quality of each position before a segment."""
    path, tokens = list[tuple[int, Quality]](), segment.prompt()
    for at in reversed(range(segment.info.prefix_len)):
        while segment.info.prefix_len > at:
            assert segment.parent is not None
            segment = segment.parent
        path.append((int(tokens[at]), segment.info.quality))
    return tuple(reversed(path))


@pytest.mark.parametrize("seed", range(8))
def test_against_a_model_without_a_tree(tree: StoredTree, seed: int) -> None:
    chance, model, stored = random.Random(seed), PrefixModel(), dict[str, StoredSegment]()
    for number in range(120):
        known = list(model.segments.values())
        if len(known) > chance.randint(2, 12):
            name = chance.choice(known).name
            tree.lose(stored.pop(name))
            model.lose(name)
        else:
            path = chance.choice(known).path if known else ()
            prefix = [token for token, _ in path[: chance.randint(0, len(path))]]
            prefix += chance.choice([(), (), (), (0,), (1, 1)])
            # A state is behind the tokens that it is of.
            added = chance.choices((0, 1), k=chance.randint(0, 4)) or [STATE_TOKEN]
            quality = chance.choice([EXACT, EXACT, *QUALITIES])
            place = model.place_for("", prefix, added, quality)
            new = stored_segment(str(number), added, prefix, quality=quality)
            assert tree.insert(new, as_tokens(prefix)) == (place is not None)
            if place is not None:
                assert path_of(new) == place
                stored[new.segment_id] = new
                tail = tuple((token, quality) for token in added)
                model.add(Known(new.segment_id, "", place, tail))
        check_tree(tree)
        assert sum(s.info.num_tokens for s in tree.segments() if s.lost) == model.num_holes
        for segment in chance.sample([*model.segments.values()], k=min(len(model.segments), 3)):
            check_found(tree, model, segment)


def check_found(tree: StoredTree, model: PrefixModel, known: Known) -> None:
    """A match along a segment in each quality, and what has its last token or comes behind it."""
    path = [token for token, _ in known.path]
    tokens = as_tokens(path)
    for min_quality in QUALITIES:
        spans = tree.match("", tokens, min_quality=min_quality, only_ready=False).spans
        names = [
            "" if s.segment.lost else s.segment.segment_id for s in spans for _ in range(len(s))
        ]
        assert names == model.holders("", model.follow("", path, min_quality))
    below = list(tree.subtree("", tokens))
    assert {segment.segment_id for segment in below if not segment.lost} == {
        name
        for name, other in model.segments.items()
        if [token for token, _ in other.path][: len(path)] == path
    }
    assert {s for s in tree.segments() if is_in(s, tree, "", tokens)} == {*below}
    for number, segment in enumerate(below):
        if (above := segment.parent) is not None and above in below[:number]:
            assert segment.info.prefix_len < above.stop
