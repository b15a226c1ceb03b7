"""A store and the plain model beside it: what the steps of `test_store_stateful.py` do."""

from __future__ import annotations

import functools
import random
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize
from torch import Tensor

from impress_sglang.errors import SegmentUnreadable
from impress_sglang.paper.source import PartSource
from impress_sglang.paper.store import PartStore
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.segment import Priority, SegmentInfo
from impress_sglang.storage.writer import LayerReader, WriteAbandoned
from impress_sglang.store.health import DiskTask, Suspect, Verdict
from impress_sglang.store.stored import SegmentState, StoredSegment
from impress_sglang.store.writing import Offer, StoreOutcome
from tests.unit import kv_factory as kv
from tests.unit.prefix_model import QUALITIES, Known, PrefixModel
from tests.unit.prefix_model import Path as TokenPath
from tests.unit.reading import read_rows
from tests.unit.store_factory import make_config
from tests.unit.waiting import wait_until

SIZES = {"kv_heads": 2, "key_dim": 4, "value_dim": 4}
SHAPES = [
    kv.make_shape(query_heads=2, **SIZES),
    kv.make_shape(dtype=torch.bfloat16, probe=(), **SIZES),
]
Tokens = tuple[int, ...]
# Runs of a few tokens, some longer than a chunk, that begin alike: histories branch and meet often.
RUNS = [(0,), (1,), (0, 0, 1), (0, 1, 1, 0, 1), (2,) * 9, tuple(range(3, 14))]
SEQUENCES = st.lists(st.sampled_from(RUNS), min_size=1, max_size=4).map(
    lambda runs: tuple(token for run in runs for token in run)
)
CHOSEN = st.sets(st.integers(0, 40), min_size=1, max_size=8)
QUALITY = st.sampled_from(QUALITIES)
DAMAGES = st.sampled_from(["none", "removed", "removed", "damaged"])
FAILS = st.sampled_from([False, False, False, True])
NAMESPACES = st.sampled_from(["", "salt"])
# What reading ahead is told of a source that is opened.
BEGINNINGS = st.sampled_from(["join", "wait", "nothing"])
# Room for a layer of the longest chain of segments, of which each takes 1 MiB, and hardly more.
ROOM_BYTES = 10 << 20


def expected_rows(
    shape: KVShape, namespace: str, tail: TokenPath, above: TokenPath, layer: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of `tail` after `above`, each of its quality."""
    path = above + tail
    tokens = tuple(token for token, _ in path)
    kvs = {q: kv.SequenceKVs(shape, namespace, tokens, q) for q in {q for _, q in path}}
    rows = {q: (sequence.keys(layer), sequence.values(layer)) for q, sequence in kvs.items()}
    places = [(rows[path[place][1]], place) for place in range(len(above), len(path))]
    keys, values = (torch.stack([both[kind][place] for both, place in places]) for kind in (0, 1))
    return keys, values


class StoreHistory(RuleBasedStateMachine):
    """A store with room for everything, and what the model says of it."""

    # Full after a few segments, or with room for everything.
    tight = False

    @initialize(shape=st.sampled_from(SHAPES))
    def start(self, shape: KVShape) -> None:
        self.shape = shape
        self.directory = Path(tempfile.mkdtemp(prefix="impress-store-"))
        # Of two files as new as each other the first by name is kept: names must be repeatable.
        numbers = random.Random(1)
        self.same_ids = mock.patch("uuid.uuid4", lambda: uuid.UUID(int=numbers.getrandbits(128)))
        self.same_ids.start()
        self.gate, self.blocked = threading.Event(), threading.Event()
        self.model = PrefixModel()
        # The model goes on calling a segment by its first name when it is rewritten.
        self.stored: dict[str, StoredSegment] = {}
        self.names: dict[str, str] = {}
        self.age = 0
        self.done: list[str] = []
        self.accepted: list[str] = []
        # Of the accepted ones those that are not written, in order, and those that never will be.
        self.pending: list[str] = []
        self.failing: set[str] = set()
        self.abandoned: set[str] = set()
        self.sources: list[tuple[PartSource, str, TokenPath, int]] = []
        self.open()
        # Something to read from the first step on, and something that builds on it.
        first = (0, 1, 1, 0, 1)
        for tokens, quality in (
            (tuple(range(3, 14)), EXACT),
            (first, EXACT),
            (first + RUNS[2], EXACT),
            (first + RUNS[2] + RUNS[1], QUALITIES[1]),
        ):
            self.offer("", tokens, quality, fails=False)
        self.let_writes_through()

    def open(self) -> None:
        # A chunk of a column.
        page_bytes = 4096
        # Of up to 8 tokens: a header, and a disk block for each column of 2 layers.
        segment_bytes = (1 + 2 * len(kv.columns_of(self.shape))) * page_bytes
        options = {
            "ssd_gb": 5 * segment_bytes / 1e9 if self.tight else 1.0,
            "readahead": 0.5,
            "device_gb": 6 * page_bytes / 1e9,
            # A quarter is for what is read ahead.
            "host_gb": (9 * page_bytes + 0.5) / 1e9,
            "buffer_gb": 16 * 2**20 / 1e9,
        }
        config = make_config(self.directory, **options)
        self.store = PartStore(config, kv.IDENTITY, self.shape)
        self.looks: list[tuple[SegmentInfo, Future[Verdict]]] = []
        self.begin_task = self.store._disk.begin
        mock.patch.object(self.store._disk, "begin", self.hold_look).start()
        self.held_rewrite: tuple[Callable[[], Future[Any]], Future[Any]] | None = None
        self.run_rewrite = self.store._rewriter.submit
        mock.patch.object(self.store._rewriter, "submit", self.hold_rewrite).start()
        self.store._memory.buffers.limit_bytes = ROOM_BYTES
        self.waiting: list[PartSource] = []
        self.learn_names()

    def hold_look(self, task: DiskTask | Suspect) -> Future[Any]:
        if isinstance(task, DiskTask):
            return self.begin_task(task)
        look: Future[Verdict] = Future()
        self.looks.append((task.segment.info, look))
        return look

    def hold_rewrite(self, *run: Any) -> Future[Any]:
        assert self.held_rewrite is None, "one at a time"
        self.held_rewrite = functools.partial(self.run_rewrite, *run), Future()
        return self.held_rewrite[1]

    def learn_names(self) -> set[str]:
        """Names of the segments in the tree, without holes; a new one has that of its file."""
        live = [s for s in self.store.tree.segments() if s.state is not SegmentState.LOST]
        known = {id(stored): name for name, stored in self.stored.items()}
        for segment in live:
            name = known.get(id(segment), segment.segment_id)
            self.stored[name] = segment
            if self.names.get(segment.segment_id) != name:
                self.names[segment.segment_id] = name
                if name in self.model.segments:
                    # A suspect that was rewritten is good: the old file was read to its end.
                    self.model.segments[name].state = SegmentState.READY
        return {self.names[segment.segment_id] for segment in live}

    def finish_rewrite(self) -> None:
        """Its file is there then, and the store does not know until it polls."""
        if self.held_rewrite is not None:
            (rewrite, future), self.held_rewrite = self.held_rewrite, None
            error = (done := rewrite()).exception()
            future.set_result(done.result()) if error is None else future.set_exception(error)

    def wait_for_removals(self) -> None:
        """But not for those behind a write that waits at the gate."""
        wait_until(lambda: not self.store.worker.removing_bytes or self.blocked.is_set())

    def poll(self) -> None:
        self.finish_rewrite()
        self.wait_for_removals()
        self.store.poll()
        self.wait_for_removals()
        self.learn_names()

    def let_writes_through(self) -> None:
        stats = self.store.stats
        before = stats.segments_abandoned, stats.segments_failed
        self.gate.set()
        self.store.writes.drain()
        self.gate.clear()
        self.blocked.clear()
        assert sorted(self.done) == sorted(self.accepted), "one callback for each accepted offer"
        assert stats.segments_abandoned == before[0] + len(self.abandoned)
        assert stats.segments_failed == before[1] + len(self.failing - self.abandoned)
        for name in filter(self.model.segments.get, self.pending):
            if name in self.failing | self.abandoned:
                self.model.lose(name)
            else:
                self.model.segments[name].state = SegmentState.READY
        self.learn_names()
        self.pending.clear()
        self.failing.clear()
        self.abandoned.clear()

    def close_sources(self) -> None:
        while self.sources:
            self.close_one(len(self.sources) - 1)

    def close_one(self, number: int) -> None:
        source = self.sources.pop(number)[0]
        self.waiting = [other for other in self.waiting if other is not source]
        self.store.close_source(source)
        wait_until(lambda: not source.is_reading)
        self.store.readers.release_closed()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.close_sources()
            self.let_writes_through()
            self.finish_rewrite()
            self.store.close()
            self.same_ids.stop()
            shutil.rmtree(self.directory)

    def gated(self, kvs: kv.SequenceKVs, start: int, fails: bool, ids: list[str]) -> LayerReader:
        read = kvs.read_from(start)

        def wait_and_read(layer: int) -> tuple[Tensor, Tensor]:
            self.blocked.set()
            assert self.gate.wait(60)
            if fails and layer == 1:
                raise RuntimeError("a test")
            if ids[0] in self.abandoned:
                raise WriteAbandoned("a test")
            return read(layer)

        return wait_and_read

    def offer(self, namespace: str, tokens: Tokens, quality: Quality, fails: bool) -> None:
        # What is being removed still takes room, for how long depends on the machine.
        self.wait_for_removals()
        model = self.model
        states = {known.name: known.state for known in model.segments.values()}
        path = model.follow(namespace, tokens, quality)
        start, stop = model.missing(namespace, tokens, quality)
        holes = len(model.held_part(namespace, path)) < len(path)
        kvs = kv.SequenceKVs(self.shape, namespace, tokens, quality)
        ids: list[str] = []
        outcome = self.store.writes.offer(
            namespace,
            Offer(
                kv.as_tokens(tokens),
                lambda start: self.gated(kvs, start, fails, ids),
                lambda: self.done.append(ids[0]),
                lambda: self.abandoned.add(ids[0]),
                quality=quality,
                min_tokens=1,
                priority=Priority(sum(tokens) % len(Priority)),
            ),
        )
        left = self.learn_names()
        expected = StoreOutcome.ACCEPTED if start < stop else StoreOutcome.PREFIX_MISSING
        expected = StoreOutcome.ALREADY_STORED if start == len(tokens) else expected
        no_space = self.tight and outcome is StoreOutcome.NO_SPACE
        assert outcome is (StoreOutcome.NO_SPACE if no_space else expected)
        if outcome is StoreOutcome.ACCEPTED:
            ids.extend(left - states.keys())
            info = self.stored[ids[0]].info
            # Where there is little room it may take the place of another that begins alike.
            assert info.prefix_len <= start
            if info.prefix_len == start:
                assert info.num_tokens == stop - start
            tail = tuple((token, quality) for token in info.tokens.tolist())
            above = path[: info.prefix_len]
            model.add(Known(ids[0], namespace, above, tail, SegmentState.PENDING))
            self.accepted.append(ids[0])
            self.pending.append(ids[0])
            # One that is purged before it is at the gate would end, and let removals pass.
            wait_until(self.blocked.is_set)
            if fails:
                self.failing.add(ids[0])
            path = path if holes else above
        if gone := states.keys() - left:
            assert self.tight and outcome is StoreOutcome.ACCEPTED, "nothing is evicted in vain"
            self.check_evicted(gone, left, {*model.holders(namespace, path)}, states)

    def check_evicted(
        self, gone: set[str], left: set[str], keep: set[str], states: dict[str, SegmentState]
    ) -> None:
        """What is evicted is the store's business, within limits."""
        opened = {name for source, *_ in self.sources for name in source.segment_ids}
        pinned = {self.names[segment_id] for segment_id in opened}
        assert not gone & keep
        assert not any(self.stored[name].segment_id in opened for name in gone & pinned)
        assert all(states[name] in (SegmentState.READY, SegmentState.SUSPECT) for name in gone)
        for name in gone:
            below = {known.name for known in self.model.below(self.model.segments[name])}
            # What was stored in its place begins alike.
            assert not below & left & states.keys(), "leaves first"
        for name in gone:
            self.model.lose(name)

    def open_match(
        self, data: st.DataObject, namespace: str, tokens: Tokens, min_quality: Quality
    ) -> None:
        self.poll()
        stored = self.model.follow(namespace, tokens, min_quality)
        path = self.model.held_part(namespace, stored, ready=True)

        match = self.store.match(namespace, kv.as_tokens(tokens), min_quality=min_quality)
        self.learn_names()

        assert match.num_tokens == len(path)
        assert match.quality == functools.reduce(Quality.worst, (q for _, q in path), EXACT)
        if not path:
            return
        start = data.draw(st.integers(0, len(path) - 1))
        spans = match.slice(start, len(path))
        part = self.store.expected_bytes(spans, 0.1)
        whole = self.store.readers.bytes_to_read(spans, codes=False)
        source = self.store.open_part(match, start, len(path), whole=data.draw(st.booleans()))
        # In proportion to the tokens of the spans, and so by no more than rounding too much.
        layer_bytes = source.layer_bytes * self.shape.num_layers
        assert 0 <= part <= whole + 1 and whole <= layer_bytes + 1
        self.sources.append((source, namespace, path, start))
        beginning = data.draw(BEGINNINGS)
        if beginning == "join":
            self.store.ahead.add_running(source)
        elif beginning == "wait":
            self.store.ahead.add_waiting(source)
            self.waiting.append(source)

    def read_layer(self, number: int, layer: int, chosen: set[int] | None) -> None:
        """Whatever was evicted, dropped or rewritten since: an open source gives its rows.

        Each head group has its own tokens, of which there are as many as `chosen`, None for all.
        """
        source, namespace, path, start = self.sources[number]
        shape, size, selected = self.shape, source.num_tokens, None
        if chosen is not None:
            groups = range(kv.head_groups_of(shape))
            tokens = {token % size for token in chosen}
            rows = [sorted({(token + 7 * group) % size for token in tokens}) for group in groups]
            selected = torch.tensor(rows)
        keys, values = expected_rows(shape, namespace, path[start:], path[:start], layer)

        own_keys = keys
        if shape.probe_kv_heads:
            assert torch.equal(source.read_probe(layer), keys[:, kv.heads_of(shape, kv.PROBE)])
            own_keys = keys[:, kv.heads_of(shape, kv.KEYS)]
        found = read_rows(source, layer, selected)

        for rows_found, whole in zip(found, (own_keys, values), strict=True):
            assert rows_found is not None
            if selected is None:
                assert torch.equal(rows_found, whole)
            elif len(selected) == 1:
                assert torch.equal(rows_found, whole[selected[0]])
            else:
                heads = [whole[tokens, head] for head, tokens in enumerate(selected)]
                assert torch.equal(rows_found, torch.stack(heads, 1))
        if selected is not None:
            chance = torch.Generator().manual_seed(size)
            scores = torch.rand(shape.num_query_heads, size, generator=chance)
            source.record_selection(layer, selected.numpy(), scores)

    def ready(self) -> list[str]:
        return [known.name for known in self.model.segments.values() if known.ready]

    def damage_and_report(self, name: str, damage: str) -> None:
        """Who has a file open goes on reading the old one."""
        segment_id = self.stored[name].segment_id
        (path,) = self.directory.glob(f"*/segments/*/{segment_id}.kv")
        content = bytearray(path.read_bytes())
        if damage != "none":
            path.unlink()
        if damage == "damaged":
            content[-4096] ^= 1
            path.write_bytes(content)

        self.store.report(SegmentUnreadable(segment_id, "a test"))

        self.model.segments[name].state = SegmentState.SUSPECT

    def built_on(self) -> list[str]:
        segments = self.model.segments
        return [name for name in self.ready() if self.model.below(segments[name])]
