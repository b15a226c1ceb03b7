"""The tree of stored prefixes against a plain model, over random histories."""

from __future__ import annotations

import dataclasses
from collections import Counter

from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from impress_sglang.storage.quality import Quality
from impress_sglang.storage.segment import Priority
from impress_sglang.store.places import Places
from impress_sglang.store.prefix_hashes import prefix_digest
from impress_sglang.store.purges import is_in
from impress_sglang.store.stored import SegmentState, StoredMatch, StoredSegment
from impress_sglang.store.tree import StoredTree
from tests.unit.kv_factory import as_tokens, stored_segment
from tests.unit.prefix_model import QUALITIES, Known, Path, PrefixModel
from tests.unit.store_checks import check_tree

Tokens = tuple[int, ...]
# Few tokens and short sequences, so that histories branch and meet often.
SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)
QUALITY = st.sampled_from(QUALITIES)
STATES = st.sampled_from([SegmentState.PENDING, SegmentState.READY, SegmentState.SUSPECT])
NAMESPACES = st.sampled_from(["", "other"])


class TreeMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.tree = StoredTree()
        self.model = PrefixModel()
        self.segments: dict[str, StoredSegment] = {}
        self.count = 0

    def new_segment(
        self, namespace: str, prefix: Tokens, tokens: Tokens, quality: Quality, state: SegmentState
    ) -> StoredSegment:
        self.count += 1
        fields = {"quality": quality, "priority": Priority(sum(tokens) % len(Priority))}
        name = f"s{self.count}"
        return stored_segment(name, tokens, prefix, namespace=namespace, state=state, **fields)

    def add_to_model(self, segment: StoredSegment, above: Path) -> None:
        info = segment.info
        own = tuple((token, info.quality) for token in info.tokens.tolist())
        self.segments[segment.segment_id] = segment
        self.model.add(Known(segment.segment_id, info.namespace, above, own, segment.state))

    def pick(self, data: st.DataObject) -> Known:
        return self.model.segments[data.draw(st.sampled_from(sorted(self.model.segments)))]

    @rule(namespace=NAMESPACES, tokens=SEQUENCES, quality=QUALITY, state=STATES)
    def store_what_is_new(
        self, namespace: str, tokens: Tokens, quality: Quality, state: SegmentState
    ) -> None:
        """As the store does it: match first, then insert the rest."""
        match = self.tree.match(namespace, as_tokens(tokens), least=quality, only_ready=False)
        path = self.model.follow(namespace, tokens, quality)
        assert match.num_tokens == len(path)
        start, stop = self.model.missing(namespace, tokens, quality)
        assume(start < stop)
        segment = self.new_segment(namespace, tokens[:start], tokens[start:stop], quality, state)

        assert self.tree.insert(segment, as_tokens(tokens[:start]))
        self.add_to_model(segment, path[:start])

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data(), tokens=SEQUENCES, quality=QUALITY)
    def insert_after_a_prefix_with_a_hole(
        self, data: st.DataObject, tokens: Tokens, quality: Quality
    ) -> None:
        """The prefix is a stored path that lacks the last tokens of one of its segments."""
        known = self.pick(data)
        spans = self.model.spans(known.namespace, known.path)
        number = data.draw(st.integers(0, len(spans) - 1))
        stop = sum(b - a for _, a, b in spans[: number + 1])
        hole = data.draw(st.integers(1, spans[number][2] - spans[number][1]))
        prefix = tuple(token for token, _ in known.path[: stop - hole] + known.path[stop:])
        segment = self.new_segment(known.namespace, prefix, tokens, quality, SegmentState.READY)
        above = self.model.place_for(known.namespace, prefix, tokens, quality)

        assert self.tree.insert(segment, as_tokens(prefix)) == (above is not None)
        if above is not None:
            self.add_to_model(segment, above)

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data(), state=STATES)
    def change_state(self, data: st.DataObject, state: SegmentState) -> None:
        known = self.pick(data)
        self.segments[known.name].state = known.state = state

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        """Or it is needed when others go."""
        segment = self.segments[self.pick(data).name]

        self.tree.order.note(segment)

        assert next(self.tree.order.latest()).last_access == segment.last_access
        assert segment.level >= segment.info.priority

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        name = self.pick(data).name

        self.tree.lose(self.segments[name])
        self.model.lose(name)

    @precondition(lambda self: self.model.above_holes())
    @rule(data=st.data(), state=STATES)
    def fill_a_hole(self, data: st.DataObject, state: SegmentState) -> None:
        """Perhaps in part, and perhaps with what follows it, or with what leaves it."""
        names = sorted(known.name for known in self.model.above_holes())
        known = self.model.segments[data.draw(st.sampled_from(names))]
        start = len(self.model.held_part(known.namespace, known.above))
        stop = data.draw(st.integers(start + 1, len(known.path)))
        tokens = tuple(token for token, _ in known.path[:stop])
        tail = data.draw(st.lists(st.integers(0, 2), max_size=2).map(tuple))
        self.store_what_is_new(known.namespace, tokens + tail, known.path[start][1], state)

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        """As a reordered segment replaces another one."""
        name = self.pick(data).name
        segment = self.segments.pop(name)
        self.count += 1
        info = dataclasses.replace(
            segment.info, segment_id=f"s{self.count}", generation=segment.info.generation + 1
        )

        self.tree.replace(segment, info, segment.file_bytes + 1)

        self.segments[info.segment_id] = segment
        self.model.rename(name, info.segment_id)

    @rule(namespace=NAMESPACES, tokens=SEQUENCES, least=QUALITY, only_ready=st.booleans())
    def match(self, namespace: str, tokens: Tokens, least: Quality, only_ready: bool) -> None:
        path = self.model.follow(namespace, tokens, least)
        if only_ready:
            path = self.model.ready_part(namespace, path)

        found = self.tree.match(namespace, as_tokens(tokens), least=least, only_ready=only_ready)

        assert spans_of(found) == self.model.spans(namespace, path)

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data(), lose=st.booleans())
    def restart(self, data: st.DataObject, lose: bool) -> None:
        """All segments, in any order, into a new tree; at times one file is gone."""
        names = data.draw(st.permutations(sorted(self.model.segments)))[int(lose) :]
        again = [self.segments[name].apart(state=SegmentState.READY, above="") for name in names]
        old, self.model, self.tree = self.model, PrefixModel(), StoredTree()
        others, lost = Places(self.tree).restore(again)
        kept = [own for own in again if own not in others]
        expected_lost = []
        for segment in sorted(kept, key=lambda s: (s.info.prefix_len, *age(s))):
            prefix = [token for token, _ in old.segments[segment.segment_id].above]
            info = segment.info
            above = self.model.place_for(info.namespace, prefix, info.tokens.tolist(), info.quality)
            if above is None:
                expected_lost.append(segment.segment_id)
            else:
                self.add_to_model(segment, above)

        assert sorted(s.segment_id for s in lost) == sorted(expected_lost)
        for other in others:
            same = [own for own in kept if same_place(own, other)]
            assert len(same) == 1 and age(same[0]) < age(other)

    @invariant()
    def integrity(self) -> None:
        check_tree(self.tree)
        holes = [s for s in self.tree.segments() if s.state is SegmentState.LOST]
        live = {s.segment_id for s in self.tree.segments()} - {s.segment_id for s in holes}
        assert live == set(self.model.segments)
        ends = Counter(
            (hole.info.namespace, hole.info.prefix_len + count)
            for hole in holes
            for count in range(1, hole.info.num_tokens + 1)
        )
        missing = self.model.places - set(self.model.owner)
        assert ends == Counter((namespace, len(path)) for namespace, path in missing)

    @invariant()
    def nodes_are_cut_where_others_hang(self) -> None:
        """A node may have been cut for a segment that is gone by now."""
        for name, segment in self.segments.items():
            if name in self.model.segments:
                starts = [node.start for node in segment.path]
                assert starts == sorted(set(starts)) and starts[-1] < segment.info.num_tokens
                assert set(self.model.node_starts(name)) <= set(starts)

    @invariant()
    def every_segment_stands_after_its_own_prefix(self) -> None:
        """The digest in a segment is that of the tokens it is found after."""
        for known in self.model.segments.values():
            tokens = as_tokens([token for token, _ in known.above])
            info = self.segments[known.name].info
            assert info.prefix_len == len(tokens)
            assert info.prefix_digest == prefix_digest(info.namespace, tokens)

    @invariant()
    def what_is_below_a_prefix_is_found(self) -> None:
        """In all qualities, behind holes as well, and what stands behind others before them."""
        paths = {
            name: (own.namespace, tuple(token for token, _ in own.path))
            for name, own in self.model.segments.items()
        }
        for namespace, prefix in paths.values():
            found = list(self.tree.below(namespace, as_tokens(prefix)))
            live = {own.segment_id for own in found if own.state is not SegmentState.LOST}
            assert live == {
                name
                for name, (other, tokens) in paths.items()
                if other == namespace and tokens[: len(prefix)] == prefix
            }
            place = self.tree, namespace, as_tokens(prefix)
            assert {own for own in self.tree.segments() if is_in(own, *place)} == set(found)
            for number, own in enumerate(found):
                above = own.parent
                assert above not in found[:number] or own.info.prefix_len < end_of(above)


def spans_of(match: StoredMatch) -> list[tuple[str, int, int]]:
    """As the model tells them: holes next to each other are one, without a name."""
    spans: list[tuple[str, int, int]] = []
    for span in match.spans:
        lost = span.segment.state is SegmentState.LOST
        if lost and spans and not spans[-1][0]:
            spans[-1] = ("", 0, spans[-1][2] + len(span))
        else:
            spans.append(("" if lost else span.segment.segment_id, span.start, span.stop))
    return spans


def end_of(segment: StoredSegment) -> int:
    return segment.info.prefix_len + segment.info.num_tokens


def age(segment: StoredSegment) -> tuple[int, int, str]:
    return -segment.info.generation, -segment.last_access, segment.segment_id


def same_place(left: StoredSegment, right: StoredSegment) -> bool:
    fields = ("namespace", "prefix_digest", "quality")
    same = all(getattr(left.info, name) == getattr(right.info, name) for name in fields)
    return same and left.info.tokens.tolist() == right.info.tokens.tolist()


TestTree = TreeMachine.TestCase
# Steps are cheap here, and the histories that matter are long ones.
TestTree.settings = settings(max_examples=2 * settings.default.max_examples)
