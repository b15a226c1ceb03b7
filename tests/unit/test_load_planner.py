"""What of a match can be used, where prefixes need states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from impress_sglang.serving.load_planner import LoadPlanner
from impress_sglang.store.tree import StoredTree
from tests.unit.kv_factory import as_tokens, stored_segment


@pytest.mark.parametrize(("page", "usable"), [(1, 6), (4, 4), (8, 0)])
def test_states_that_another_page_size_has_left_are_passed_over(page: int, usable: int) -> None:
    tree, tokens = StoredTree(), as_tokens(range(9))
    tree.insert(stored_segment("a", tokens), tokens[:0])
    for end in (4, 6):
        tree.insert(stored_segment(f"state {end}", [-1, -1]), tokens[:end])
    service: Any = SimpleNamespace(config=None, store=SimpleNamespace(tree=tree))
    planner, match = LoadPlanner(service, page, states=True), tree.match("", tokens)
    assert planner.usable(match) == usable
