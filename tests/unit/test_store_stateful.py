"""The store on SSD, its caches and its reordering against a plain model, over random histories.

Writes wait at a gate until a step lets them through; rewrites and second looks are done when a step
does them: a history is the same each time. Every match is read back, whole or in part, some of it
ahead, and its rows compared with those that belong to its tokens.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from impress_sglang.storage.quality import Quality
from impress_sglang.store.health import Verdict
from impress_sglang.store.prefix_hashes import prefix_digest
from impress_sglang.store.stored import SegmentState
from tests.unit import kv_factory as kv
from tests.unit import store_history
from tests.unit.prefix_model import Known, PrefixModel
from tests.unit.store_checks import check_store
from tests.unit.store_factory import check_index, purge
from tests.unit.store_history import CHOSEN, DAMAGES, FAILS, NAMESPACES, QUALITY, SEQUENCES, Tokens


class StoreMachine(store_history.StoreHistory):
    """The model knows exactly what must be found."""

    @rule(namespace=NAMESPACES, tokens=SEQUENCES, quality=QUALITY, fails=FAILS)
    def offer_a_prefix(self, namespace: str, tokens: Tokens, quality: Quality, fails: bool) -> None:
        self.offer(namespace, tokens, quality, fails)

    @precondition(lambda self: self.model.above_holes())
    @rule(data=st.data(), tail=SEQUENCES, fails=FAILS)
    def offer_what_was_lost(self, data: st.DataObject, tail: Tokens, fails: bool) -> None:
        """All of it, or a part, with what follows it or something else."""
        names = [known.name for known in self.model.above_holes()]
        known = self.model.segments[data.draw(st.sampled_from(names))]
        start = len(self.model.held_part(known.namespace, known.above))
        stop = data.draw(st.integers(start + 1, len(known.path)) | st.just(len(known.path)))
        tokens = tuple(token for token, _ in known.path[:stop])
        self.offer(known.namespace, tokens + tail, known.path[start][1], fails)

    @precondition(lambda self: self.pending)
    @rule()
    def abandon_writes(self) -> None:
        self.store.writes.abandon()
        assert set(self.pending) <= set(self.abandoned)

    @rule()
    def finish_writes(self) -> None:
        self.let_writes_through()

    @rule(namespace=NAMESPACES, tokens=SEQUENCES, min_quality=QUALITY, data=st.data())
    def open_any_match(
        self, namespace: str, tokens: Tokens, min_quality: Quality, data: st.DataObject
    ) -> None:
        self.open_match(data, namespace, tokens, min_quality)

    @precondition(lambda self: self.sources)
    @rule(data=st.data(), chosen=st.none() | CHOSEN)
    def read(self, data: st.DataObject, chosen: set[int] | None) -> None:
        """As a request does it, from the layer on that was read last."""
        number = data.draw(st.integers(0, len(self.sources) - 1))
        for layer in range(max(self.sources[number][0].layer, 0), self.shape.num_layers):
            self.read_layer(number, layer, chosen)
            if data.draw(st.booleans()):
                break
            self.store.ahead.top_up()

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data(), tail=SEQUENCES)
    def open_a_match(self, data: st.DataObject, tail: Tokens) -> None:
        """Of what is stored; and read all of it at once, at times."""
        known = self.model.segments[data.draw(st.sampled_from(list(self.model.segments)))]
        path = tuple(token for token, _ in known.path)
        before = len(self.sources)
        self.open_match(data, known.namespace, path + tail, known.quality)
        if len(self.sources) > before and data.draw(st.booleans()):
            chosen = data.draw(CHOSEN)
            for layer in range(self.shape.num_layers):
                self.read_layer(before, layer, chosen)
                self.store.ahead.top_up()
            self.close_one(before)

    @precondition(lambda self: self.waiting)
    @rule()
    def begin_what_waits(self) -> None:
        self.store.ahead.add_running(self.waiting.pop(0))

    @precondition(lambda self: self.sources)
    @rule(data=st.data())
    def read_ahead(self, data: st.DataObject) -> None:
        source = self.sources[data.draw(st.integers(0, len(self.sources) - 1))][0]
        if source.next_ahead < source.num_layers:
            source.read_ahead()

    @precondition(lambda self: self.sources)
    @rule(data=st.data())
    def close_a_source(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.sources) - 1))
        self.close_one(number)

    @rule(at_once=st.booleans())
    def reorder(self, at_once: bool) -> None:
        self.store.enqueue_rewrites(force=True)
        self.wait_for_removals()
        while at_once and self.store.rewrites["pending"] and not self.store.worker.removing_bytes:
            self.go_on_reordering()

    @precondition(lambda self: self.store.rewrites["pending"])
    @rule()
    def go_on_reordering(self) -> None:
        self.poll()

    @precondition(lambda self: self.held_rewrite)
    @rule()
    def write_anew(self) -> None:
        self.finish_rewrite()

    @precondition(lambda self: self.ready())
    @rule(data=st.data(), damage=DAMAGES)
    def report(self, data: st.DataObject, damage: str) -> None:
        self.poll()
        if self.ready():
            self.damage_and_report(data.draw(st.sampled_from(self.ready())), damage)

    @precondition(lambda self: self.built_on())
    @rule(data=st.data())
    def lose_what_others_build_on(self, data: st.DataObject) -> None:
        self.let_writes_through()
        self.poll()
        if names := self.built_on():
            self.damage_and_report(data.draw(st.sampled_from(names)), "removed")
            self.take_second_looks()

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data())
    def purge(self, data: st.DataObject) -> None:
        """All that begins with a prefix: whoever reads or writes it, and behind holes as well."""
        self.poll()
        known = self.model.segments[data.draw(st.sampled_from(list(self.model.segments)))]
        stop = data.draw(st.integers(1, len(known.path)) | st.just(len(known.path)))
        prefix = [token for token, _ in known.path[:stop]]
        purge(self.store, prefix, known.namespace)
        for segment in list(self.model.segments.values()):
            begins = [token for token, _ in segment.path[:stop]] == prefix
            if begins and segment.namespace == known.namespace:
                self.model.lose(segment.name)

    @rule()
    def take_second_looks(self) -> None:
        """They are behind what is being written."""
        self.let_writes_through()
        self.poll()
        for info, look in self.looks:
            verdict = self.store.worker.submit(self.store.worker.recheck, info).result()
            name = self.names[info.segment_id]
            known = self.model.segments.get(name)
            if known is not None and known.state is SegmentState.SUSPECT:
                if verdict is Verdict.GOOD:
                    known.state = SegmentState.READY
                else:
                    self.model.lose(name)
            look.set_result(verdict)
        self.looks.clear()
        self.poll()

    @precondition(lambda self: self.age > 10)
    @rule(without_index=st.booleans())
    def restart(self, without_index: bool) -> None:
        self.age = 0
        self.close_sources()
        self.take_second_looks()
        check_index(self.store)
        self.finish_rewrite()
        self.store.close()
        on_disk = {s.segment_id: s.file_bytes for s in self.store.tree.segments() if s.on_disk}
        files = self.directory.glob("*/segments/*/*")
        assert {path.stem: path.stat().st_size for path in files} == on_disk
        self.done.clear()
        self.accepted.clear()
        if without_index:
            for path in self.directory.glob("*/journal"):
                path.unlink()
        before, self.stored = self.stored, {}
        self.names.clear()
        self.open()
        old, self.model = self.model, PrefixModel()
        assert all(known.ready for known in old.segments.values())

        def age(known: Known) -> tuple[int, int, str]:
            stored = before[known.name]
            last_access = 0 if without_index else stored.last_access
            return -stored.info.generation, -last_access, stored.segment_id

        newest: dict[object, Known] = {}
        for known in sorted(old.segments.values(), key=age):
            # The same tokens may have been stored twice, below a parent and a better one.
            place = known.namespace, tuple(token for token, _ in known.above), known.tail
            newest.setdefault(place, known)
        for known in sorted(newest.values(), key=lambda known: (len(known.above), *age(known))):
            # KVs below a hole are lost.
            prefix, tokens = ([token for token, _ in path] for path in (known.above, known.tail))
            # The index says where it stood.
            place = () if without_index else known.above
            above = self.model.place_for(known.namespace, prefix, tokens, known.quality, place)
            if above is not None:
                name = before[known.name].segment_id
                self.model.add(Known(name, known.namespace, above, known.tail))

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "store"):
            self.age += 1
            check_store(self.store)
            placement = self.store.cache.placement
            assert list(placement.capacity.values()) == [6, 9], "the caches are not out of play"
            stats, summary = self.store.stats, self.store.summary()
            assert stats.bytes_read_ahead_used <= stats.bytes_read_ahead <= stats.bytes_read
            assert summary["used_bytes"] <= summary["quota_bytes"]
            if not self.sources:
                assert summary["buffer_used_bytes"] == 0, "closed sources give their memory back"

    @invariant()
    def same_segments(self) -> None:
        if hasattr(self, "store"):
            assert self.learn_names() == set(self.model.segments)
            for name, known in self.model.segments.items():
                assert self.stored[name].state is known.state
                info, above = self.stored[name].info, kv.as_tokens([t for t, _ in known.above])
                assert info.prefix_len == len(above)
                assert info.prefix_digest == prefix_digest(info.namespace, above)
            lost = [s for s in self.store.tree.segments() if s.state is SegmentState.LOST]
            assert sum(s.info.num_tokens for s in lost) == self.model.num_holes


class TightStoreMachine(StoreMachine):
    tight = True


TestStore = StoreMachine.TestCase
TestTightStore = TightStoreMachine.TestCase
# Each example writes and reads many files.
TestStore.settings = TestTightStore.settings = settings(
    max_examples=settings.default.max_examples * 3 // 2, stateful_step_count=40
)
