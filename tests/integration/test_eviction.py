"""Which resident prefix goes first under the policy `impress`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from impress_sglang.paper.history import TokenHistory
from impress_sglang.paper.plugin.eviction import ScoreEviction
from impress_sglang.store.stored import StoredMatch, StoredSegment, StoredSpan
from tests.unit.kv_factory import make_info, make_shape

RETENTION = 0.25
NOTHING = StoredMatch()


@dataclasses.dataclass(eq=False)
class Node:
    """What the strategy sees of SGLang's `TreeNode`."""

    key: list[int]
    parent: Node | None
    last_access_time: float = 0.0
    children: dict[int, Node] = dataclasses.field(default_factory=dict)

    def add(self, *tokens: int) -> Node:
        child = Node(list(tokens), self)
        self.children[tokens[0]] = child
        return child


def use(strategy: ScoreEviction, node: Node, times: int = 1, match: StoredMatch = NOTHING) -> None:
    length, above = 0, node
    while above.parent is not None:
        length, above = length + len(above.key), above.parent
    for _ in range(times):
        strategy.note_request(node, length, match)


def order(strategy: ScoreEviction, **nodes: Any) -> list[str]:
    return sorted(nodes, key=lambda name: strategy.get_priority(nodes[name]))


def stored(num_tokens: int, *selected: int) -> StoredMatch:
    """A stored prefix of which every access selected these tokens."""
    shape = make_shape()
    history = TokenHistory(shape.num_layers, shape.num_head_groups, num_tokens)
    tokens = np.tile(np.array(selected, np.int64), (shape.num_head_groups, 1))
    for layer in range(shape.num_layers):
        history.note(layer, 0, num_tokens, tokens, 0, None)
    segment = StoredSegment(make_info(shape, range(num_tokens)), 1, history=history)
    return StoredMatch((StoredSpan(segment, 0, num_tokens),))


def test_of_two_that_are_used_alike_the_less_important_goes_first() -> None:
    root, strategy = Node([], None), ScoreEviction(1000, RETENTION)
    dense, thin, unknown = root.add(*range(10)), root.add(*range(10, 20)), root.add(*range(20, 30))
    use(strategy, dense, 2, stored(10, 0, 1, 2, 3, 4, 5, 6))
    use(strategy, thin, 2, stored(10, 0))
    use(strategy, unknown, 2)

    assert order(strategy, dense=dense, thin=thin, unknown=unknown) == ["thin", "unknown", "dense"]


def test_importance_and_frequency_are_multiplied() -> None:
    """Three uses of a tenth against one of seven tenths."""
    root, strategy = Node([], None), ScoreEviction(0, RETENTION)
    dense, thin = root.add(*range(10)), root.add(*range(10, 20))
    use(strategy, thin, 3, stored(10, 0))
    use(strategy, dense, 1, stored(10, 0, 1, 2, 3, 4, 5, 6))

    assert order(strategy, dense=dense, thin=thin) == ["thin", "dense"]
    use(strategy, thin, 5, stored(10, 0))
    assert order(strategy, dense=dense, thin=thin) == ["dense", "thin"]


def test_old_popularity_fades_with_a_half_life_and_not_without() -> None:
    for half_life, first in ((5.0, "old"), (0.0, "new")):
        root, strategy = Node([], None), ScoreEviction(half_life, RETENTION)
        old, new = root.add(1), root.add(2)
        use(strategy, old, 40)
        use(strategy, new, 20)

        assert order(strategy, old=old, new=new)[0] == first


def test_the_upper_half_of_a_split_node_keeps_the_uses() -> None:
    root, strategy = Node([], None), ScoreEviction(0, RETENTION)
    lower, other = root.add(1, 2, 3, 4), root.add(9)
    use(strategy, lower, 5)
    upper = Node([1, 2], root)
    root.children[1] = upper
    lower.key, lower.parent, upper.children = [3, 4], upper, {3: lower}
    use(strategy, other, 5)
    use(strategy, upper)

    assert order(strategy, upper=upper, other=other) == ["other", "upper"]


def test_what_is_awaited_goes_last_by_its_turn_and_then_by_its_refresh() -> None:
    root, turns = Node([], None), dict[Node, int]()
    strategy = ScoreEviction(0, RETENTION, turns.get)
    head, tail, popular = root.add(1), root.add(2), root.add(3)
    head.last_access_time, tail.last_access_time = 2.0, 1.0
    use(strategy, tail, 2)
    use(strategy, popular, 5)

    assert order(strategy, head=head, tail=tail, popular=popular) == ["head", "tail", "popular"]
    turns |= {head: 7, tail: 7}
    assert order(strategy, head=head, tail=tail, popular=popular) == ["popular", "tail", "head"]
    turns[tail] = 6
    assert order(strategy, head=head, tail=tail, popular=popular) == ["popular", "head", "tail"]
