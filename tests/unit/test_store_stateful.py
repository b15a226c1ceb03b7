"""The store on SSD, its caches and its reordering against a plain model, over random histories.

Writes wait at a gate until a step lets them through, and steps wait for a rewrite, so that a
history is the same each time. Every match is read back, whole or in part, some of it ahead, and its
rows compared with those that belong to its tokens.
"""

from __future__ import annotations

import errno
import random
import shutil
import tempfile
import threading
import time
import uuid
from pathlib import Path
from unittest import mock

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from impress_sglang.config import ImpressConfig
from impress_sglang.management.store import PrefixStore, StoreOutcome
from impress_sglang.management.tree import StoredMatch, StoredSegment
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.writer import LayerReader
from impress_sglang.transfer.source import Demand, SegmentSource
from tests.unit.kv_factory import (
    IDENTITY,
    KEYS,
    PROBE,
    SequenceKVs,
    as_tokens,
    heads_of,
    lanes_of,
    make_shape,
    sketch_of,
    streams_of,
)
from tests.unit.prefix_model import Known, PrefixModel
from tests.unit.prefix_model import Path as TokenPath
from tests.unit.reading import read_rows

SHAPE = make_shape(query_heads=2, kv_heads=2, key_dim=4, value_dim=4, probe=(0,))
SKETCHED = make_shape(
    query_heads=4, kv_heads=2, key_dim=4, value_dim=4, dtype=torch.bfloat16, sketch_bits=4
)
Tokens = tuple[int, ...]
# Runs of a few tokens, some longer than a chunk, that begin alike: histories branch and meet often.
RUNS = [(0,), (1,), (0, 0, 1), (0, 1, 1, 0, 1), (2,) * 9, tuple(range(3, 14))]
SEQUENCES = st.lists(st.sampled_from(RUNS), min_size=1, max_size=4).map(
    lambda runs: tuple(token for run in runs for token in run)
)
CHOSEN = st.sets(st.integers(0, 40), min_size=1, max_size=8)
NAMESPACES = st.sampled_from(["", "salt"])
DEMANDS = st.sampled_from(
    [
        Demand(),
        Demand(probe=False),
        Demand(all_keys=True),
        Demand(whole=True),
        Demand(whole=True, probe=False),
    ]
)
# What reading ahead is told of a source that is opened.
BEGINNINGS = st.sampled_from(["join", "wait", "wait for one layer", "nothing"])
# Room for what is read ahead: a few layers, each of which takes 1 MiB.
ROOM_BYTES = 3 << 20


def expected_rows(
    shape: KVShape, namespace: str, own: TokenPath, above: TokenPath, layer: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of `own` after `above`, part of which may be approximate."""
    path = above + own
    tokens = tuple(token for token, _ in path)
    exact = SequenceKVs(shape, namespace, tokens, approximate=False)
    other = SequenceKVs(shape, namespace, tokens, approximate=True)
    flags = torch.tensor([flag for _, flag in path])[:, None, None]
    return (
        torch.where(flags, other.keys(layer), exact.keys(layer))[len(above) :],
        torch.where(flags, other.values(layer), exact.values(layer))[len(above) :],
    )


class StoreMachine(RuleBasedStateMachine):
    """A store with room for everything: the model knows exactly what must be found."""

    quota = 1.0
    shape = SHAPE

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="impress-store-"))
        # Nothing here is about power cuts, and waiting for the disk takes most of the time.
        self.no_sync = mock.patch("os.fsync")
        self.no_sync.start()
        # Of two files for one place the first by name is kept, so names must be the same each time.
        numbers = random.Random(1)
        self.same_ids = mock.patch("uuid.uuid4", lambda: uuid.UUID(int=numbers.getrandbits(128)))
        self.same_ids.start()
        self.gate = threading.Event()
        self.model = PrefixModel()
        # The model goes on calling a segment by its first name when it is rewritten.
        self.stored: dict[str, StoredSegment] = {}
        self.names: dict[str, str] = {}
        self.failing: set[str] = set()
        self.age = 0
        self.done: list[str] = []
        self.accepted: list[str] = []
        self.sources: list[tuple[SegmentSource, str, TokenPath, int]] = []
        self.open()
        # Something to read from the first step on.
        for tokens in (tuple(range(3, 14)), (0, 1, 1, 0, 1)):
            self.offer("", tokens, approximate=False, fails=False)
        self.let_writes_through()

    def open(self) -> None:
        # One head of a chunk; a whole chunk of the largest stream takes two.
        page_bytes = 8 * 4 * self.shape.dtype.itemsize
        config = ImpressConfig(
            ssd_dir=str(self.directory),
            ssd_gb=self.quota,
            min_free_gb=0.0,
            chunk_tokens=8,
            io_depth=2,
            readahead=0.5,
            device_gb=6 * page_bytes / 1e9,
            # A quarter is for what is read ahead.
            host_gb=(12 * page_bytes + 0.5) / 1e9,
            reorder_interval=0.0,
        )
        self.store = PrefixStore(config, IDENTITY, self.shape)
        self.store._pool.limit_bytes = ROOM_BYTES
        self.waiting: list[SegmentSource] = []
        self.learn_names()

    def learn_names(self) -> set[str]:
        """Names of the segments in the tree; a new one has the name of its file."""
        live = list(self.store.tree.segments())
        known = {id(stored): name for name, stored in self.stored.items()}
        for segment in live:
            name = known.get(id(segment), segment.segment_id)
            self.stored[name] = segment
            self.names[segment.segment_id] = name
        return {self.names[segment.segment_id] for segment in live}

    def wait_for_rewrite(self) -> None:
        job = self.store._reorderer._job
        if job is not None:
            job.future.exception()

    def let_writes_through(self) -> None:
        self.gate.set()
        self.store.drain()
        self.gate.clear()
        assert self.done == self.accepted, "one callback for each accepted offer, in order"
        for name in self.accepted:
            if name in self.model.segments and name in self.failing:
                for known in [self.model.segments[name], *self.model.below_name(name)]:
                    self.model.remove(known.name)
        for known in self.model.segments.values():
            known.ready = True
        self.failing.clear()

    def close_sources(self) -> None:
        while self.sources:
            self.close_one(len(self.sources) - 1)

    def close_one(self, number: int) -> None:
        source = self.sources.pop(number)[0]
        self.waiting = [own for own in self.waiting if own is not source]
        self.store.close_source(source)
        assert not source.is_reading

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.close_sources()
            self.let_writes_through()
            self.store.close()
            self.no_sync.stop()
            self.same_ids.stop()
            shutil.rmtree(self.directory)

    def gated(self, kvs: SequenceKVs, start: int, fails: bool) -> LayerReader:
        read = kvs.read_from(start)

        def wait_and_read(layer: int) -> tuple[Tensor, Tensor]:
            assert self.gate.wait(60)
            if fails and layer == 1:
                raise OSError(errno.EIO, "a test")
            return read(layer)

        return wait_and_read

    def offer(self, namespace: str, tokens: Tokens, approximate: bool, fails: bool) -> StoreOutcome:
        before = self.learn_names()
        path = self.model.follow(namespace, tokens, approximate)
        kvs = SequenceKVs(self.shape, namespace, tokens, approximate)
        ids: list[str] = []
        outcome = self.store.offer(
            namespace,
            as_tokens(tokens),
            lambda start: self.gated(kvs, start, fails),
            lambda: self.done.append(ids[0]),
            approximate=approximate,
            min_tokens=1,
        )
        after = self.learn_names()
        if outcome is StoreOutcome.ACCEPTED:
            ids.extend(after - before)
            self.accepted.append(ids[0])
            own = tuple((token, approximate) for token in tokens[len(path) :])
            self.model.add(Known(ids[0], namespace, path, own, ready=False))
            if fails:
                self.failing.add(ids[0])
        return outcome

    @rule(
        namespace=NAMESPACES,
        tokens=SEQUENCES,
        approximate=st.booleans(),
        fails=st.sampled_from([False, False, False, True]),
    )
    def offer_a_prefix(
        self, namespace: str, tokens: Tokens, approximate: bool, fails: bool
    ) -> None:
        known = len(self.model.follow(namespace, tokens, approximate)) == len(tokens)

        outcome = self.offer(namespace, tokens, approximate, fails)

        assert outcome is (StoreOutcome.KNOWN if known else StoreOutcome.ACCEPTED)

    @rule()
    def finish_writes(self) -> None:
        self.let_writes_through()

    @rule(namespace=NAMESPACES, tokens=SEQUENCES, approximate=st.booleans(), data=st.data())
    def open_any_match(
        self, namespace: str, tokens: Tokens, approximate: bool, data: st.DataObject
    ) -> None:
        self.open_match(data, namespace, tokens, approximate)

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data(), tail=SEQUENCES)
    def open_a_match(self, data: st.DataObject, tail: Tokens) -> None:
        self.open_a_match_of(data, tail)

    def open_a_match_of(self, data: st.DataObject, tail: Tokens) -> None:
        known = self.model.segments[data.draw(st.sampled_from(list(self.model.segments)))]
        path = tuple(token for token, _ in known.path)
        self.open_match(data, known.namespace, path + tail, known.own[0][1])

    @precondition(lambda self: self.sources)
    @rule(data=st.data(), chosen=CHOSEN, seed=st.integers(0, 3))
    def read_a_selection_of_all_layers(
        self, data: st.DataObject, chosen: set[int], seed: int
    ) -> None:
        """As a request does it, from the layer on that was read last."""
        number = data.draw(st.integers(0, len(self.sources) - 1))
        for layer in range(max(self.sources[number][0].layer, 0), self.shape.num_layers):
            self.read_selection(number, layer, chosen, seed)
            self.store.ahead.top_up()

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data(), tail=SEQUENCES, chosen=CHOSEN, seed=st.integers(0, 3))
    def serve_a_request(
        self, data: st.DataObject, tail: Tokens, chosen: set[int], seed: int
    ) -> None:
        before = len(self.sources)
        self.open_a_match_of(data, tail)
        if len(self.sources) > before:
            for layer in range(self.shape.num_layers):
                self.read_selection(before, layer, chosen, seed)
                self.store.ahead.top_up()
            self.close_one(before)

    def open_match(
        self, data: st.DataObject, namespace: str, tokens: Tokens, approximate: bool
    ) -> None:
        stored = self.model.follow(namespace, tokens, approximate)
        path = self.model.ready_part(namespace, stored)
        self.wait_for_rewrite()

        match = self.store.match(namespace, as_tokens(tokens), allow_approximate=approximate)

        assert match.num_tokens == len(path)
        assert match.approximate == any(flag for _, flag in path)
        if not path:
            return
        start = data.draw(st.integers(0, len(path) - 1))
        if data.draw(st.sampled_from([False, False, True])):
            self.measure(match)
        stored = self.store.stored_bytes(match, start, len(path), probe=True)
        source = self.store.open_source(match, start, len(path), data.draw(DEMANDS))
        # In proportion to the tokens of the spans, and so by no more than rounding too much.
        layer_bytes = source.layer_bytes * self.shape.num_layers
        assert 0 <= stored.expected(0.1) <= stored.expected(1.0) <= layer_bytes + 1
        self.sources.append((source, namespace, path, start))
        beginning = data.draw(BEGINNINGS)
        if beginning == "join":
            self.store.ahead.join(source)
        elif beginning != "nothing":
            self.store.ahead.wait(source, 0.0 if "one" in beginning else 1e9)
            self.waiting.append(source)

    def measure(self, match: StoredMatch) -> None:
        """Read some of it; when that ends, it is over at the next look-up, so steps wait for it."""
        self.store.measure_reading(match)
        measured = self.store._measuring
        assert measured is not None
        deadline = time.monotonic() + 30
        while measured.is_reading:
            assert time.monotonic() < deadline
            time.sleep(1e-4)

    @precondition(lambda self: self.waiting)
    @rule()
    def begin_what_waits(self) -> None:
        self.store.ahead.join(self.waiting.pop(0))

    @precondition(lambda self: self.sources)
    @rule(data=st.data(), waste=st.sampled_from([0.0, 0.3, 100.0]))
    def read_ahead(self, data: st.DataObject, waste: float) -> None:
        source = self.sources[data.draw(st.integers(0, len(self.sources) - 1))][0]
        if source.next_ahead < source.num_layers:
            source.read_ahead(waste)

    def check_rows(self, number: int, layer: int, selected: Tensor | None) -> SegmentSource:
        """Whatever was evicted, dropped or rewritten since: an open source gives its rows.

        `selected` [lanes, k] are the tokens of each lane, None for all.
        """
        source, namespace, path, start = self.sources[number]
        shape = self.shape
        keys, values = expected_rows(shape, namespace, path[start:], path[:start], layer)

        probe = source.read_probe(layer)
        found = read_rows(source, layer, selected)

        self.check_probe(probe, keys, source, layer)
        own_keys = keys if shape.sketch_bits else keys[:, heads_of(shape, KEYS)]
        for rows, whole in ((found.keys, own_keys), (found.values, values)):
            assert rows is not None
            if selected is None:
                assert torch.equal(rows, whole)
            elif len(selected) == 1:
                assert torch.equal(rows, whole[selected[0]])
            else:
                heads = [whole[own, head] for head, own in enumerate(selected)]
                assert torch.equal(rows, torch.stack(heads, 1))
        return source

    def check_probe(self, probe: Tensor, keys: Tensor, source: SegmentSource, layer: int) -> None:
        """Keys of probe heads; or sketches, which depend on all keys of their segment."""
        if not self.shape.sketch_bits:
            assert torch.equal(probe, keys[:, heads_of(self.shape, PROBE)])
            return
        first = 0
        for span in source._spans:
            stop = first + len(span)
            tables = span.segment.sketch_tables
            assert tables is not None
            low, step = torch.from_numpy(tables[layer].copy())
            exact, found = keys[first:stop].float(), probe[first:stop]
            assert ((found - exact).abs() <= step / 2 + 1e-3).all()
            assert (exact >= low - 1e-3).all() and (exact <= low + 15 * step + 1e-3).all()
            if (span.start, span.stop) == (0, span.segment.info.num_tokens):
                assert torch.equal(found, sketch_of(exact, 4))
            first = stop
        assert first == len(probe) == len(keys)

    def read_selection(self, number: int, layer: int, chosen: set[int], seed: int) -> None:
        size = self.sources[number][0].num_tokens
        # Each lane has its own tokens, of which there are as many.
        tokens = {token % size for token in chosen}
        selected = torch.tensor(
            [
                sorted({(token + 7 * lane) % size for token in tokens})
                for lane in range(lanes_of(self.shape))
            ]
        )
        source = self.check_rows(number, layer, selected)
        heads = self.shape.num_query_heads
        scores = torch.rand(heads, size, generator=torch.Generator().manual_seed(seed))
        source.note_selection(layer, selected, scores)

    @precondition(lambda self: self.sources)
    @rule(data=st.data())
    def read_everything(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.sources) - 1))
        first = max(self.sources[number][0].layer, 0)
        layer = data.draw(st.integers(first, self.shape.num_layers - 1))
        self.check_rows(number, layer, None).note_whole(layer)

    @precondition(lambda self: self.sources)
    @rule(data=st.data())
    def close_a_source(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.sources) - 1))
        self.close_one(number)

    @rule(at_once=st.booleans())
    def reorder(self, at_once: bool) -> None:
        self.store.reorder(force=True)
        while at_once and self.store.reorder_summary()["pending"]:
            self.go_on_reordering()

    @precondition(lambda self: self.store.reorder_summary()["pending"])
    @rule()
    def go_on_reordering(self) -> None:
        self.wait_for_rewrite()
        self.store.poll()

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.model.segments)))
        gone = [self.model.segments[name], *self.model.below_name(name)]

        self.store.drop(self.stored[name].segment_id)

        for known in gone:
            self.model.remove(known.name)

    @precondition(lambda self: self.age > 10)
    @rule(without_index=st.booleans())
    def restart(self, without_index: bool) -> None:
        self.age = 0
        self.close_sources()
        self.let_writes_through()
        self.store.close()
        self.done.clear()
        self.accepted.clear()
        if without_index:
            next(self.directory.glob("*/catalog.sqlite")).unlink()
        before, self.stored = self.stored, {}
        self.names.clear()
        self.open()
        old, self.model = self.model, PrefixModel()
        # Of one place in the tree the store takes the latest version, then the first file.
        infos = {name: before[name].info for name in old.segments}
        order = sorted(
            old.segments.values(),
            key=lambda known: (
                len(known.above),
                -infos[known.name].generation,
                infos[known.name].segment_id,
            ),
        )
        for known in order:
            # Approximate KVs below a branch that an exact one hides by now are lost.
            flag = known.own[0][1]
            prefix = [token for token, _ in known.above]
            above = self.model.place_for(known.namespace, prefix, known.own[0][0], flag)
            if above is not None:
                name = infos[known.name].segment_id
                self.model.add(Known(name, known.namespace, above, known.own, True))

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "store"):
            self.age += 1
            self.store.check_integrity()
            placement = self.store.cache.placement
            assert list(placement.capacity.values()) == [6, 9], "the caches are not out of play"
            stats, summary = self.store.stats, self.store.summary()
            assert stats.bytes_read_ahead_used <= stats.bytes_read_ahead <= stats.bytes_read
            if not self.sources and self.store._measuring is None:
                assert summary["buffer_used_bytes"] == 0, "closed sources give their memory back"

    @invariant()
    def same_segments(self) -> None:
        if hasattr(self, "store"):
            assert self.learn_names() == set(self.model.segments)
            for name, known in self.model.segments.items():
                assert self.stored[name].ready == known.ready


class TightStoreMachine(StoreMachine):
    """A store that is full after a few segments: what it evicts is its business, within limits."""

    # 5 segments of up to 8 tokens: a header, and a disk block for each stream of 2 layers.
    quota = 5 * (1 + 2 * len(streams_of(SHAPE))) * 4096 / 1e9

    @rule(
        namespace=NAMESPACES,
        tokens=SEQUENCES,
        approximate=st.booleans(),
        fails=st.sampled_from([False, False, False, True]),
    )
    def offer_a_prefix(
        self, namespace: str, tokens: Tokens, approximate: bool, fails: bool
    ) -> None:
        path = self.model.follow(namespace, tokens, approximate)
        keep = {name for name, _, _ in self.model.spans(namespace, path)}
        pinned = {
            self.names[segment_id]
            for source, *_ in self.sources
            for segment_id in source.segment_ids
            if self.stored[self.names[segment_id]].segment_id == segment_id
        }
        pending = {k.name for k in self.model.segments.values() if not k.ready}
        before = set(self.model.segments)

        outcome = self.offer(namespace, tokens, approximate, fails)

        left = self.learn_names()
        evicted = before - left
        assert not evicted & (keep | pinned | pending)
        for name in evicted:
            assert not {k.name for k in self.model.below_name(name)} & left, "leaves first"
        for name in evicted:
            self.model.remove(name)
        assert (outcome is StoreOutcome.KNOWN) == (len(path) == len(tokens))

    @invariant()
    def quota_holds(self) -> None:
        if hasattr(self, "store"):
            summary = self.store.summary()
            assert summary["used_bytes"] <= summary["quota_bytes"]


class SketchStoreMachine(StoreMachine):
    shape = SKETCHED


class TightSketchStoreMachine(TightStoreMachine):
    shape = SKETCHED
    quota = 5 * (1 + 2 * len(streams_of(SKETCHED))) * 4096 / 1e9


TestStore = StoreMachine.TestCase
TestTightStore = TightStoreMachine.TestCase
TestSketchStore = SketchStoreMachine.TestCase
TestTightSketchStore = TightSketchStoreMachine.TestCase
# Each example writes and reads many files.
TestStore.settings = TestTightStore.settings = settings(
    max_examples=settings.default.max_examples * 3 // 5, stateful_step_count=35
)
TestSketchStore.settings = TestTightSketchStore.settings = TestStore.settings
