"""The store on SSD, its caches and its reordering against a plain model, over random histories.

Writes wait at a gate until a step lets them through, and steps wait for a rewrite, so that a
history is the same each time; second looks are taken when a step takes them. Every match is read
back, whole or in part, some of it ahead, and its rows compared with those that belong to its
tokens.
"""

from __future__ import annotations

import functools
import random
import shutil
import tempfile
import threading
import uuid
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import SegmentUnreadable, StoreUnavailable
from impress_sglang.management.keeper import Verdict
from impress_sglang.management.store import PrefixStore
from impress_sglang.management.stored import SegmentState, StoredMatch, StoredSegment
from impress_sglang.management.writing import Offer, StoreOutcome
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.segment import Priority, SegmentInfo
from impress_sglang.storage.writer import LayerReader, WriteAbandoned
from impress_sglang.transfer.source import ReadNeeds, SegmentSource
from tests.faults import FaultyFileSystem, Rule
from tests.unit import kv_factory as kv
from tests.unit.prefix_model import QUALITIES, Known, PrefixModel
from tests.unit.prefix_model import Path as TokenPath
from tests.unit.reading import read_rows
from tests.unit.waiting import wait_until

SHAPE = kv.make_shape(query_heads=2, kv_heads=2, key_dim=4, value_dim=4, probe=(0,))
HEAD_GROUPS = kv.make_shape(
    query_heads=4, kv_heads=2, key_dim=4, value_dim=4, dtype=torch.bfloat16, probe=()
)
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
DEMANDS = st.sampled_from(
    [
        ReadNeeds(),
        ReadNeeds(probe=False),
        ReadNeeds(all_keys=True),
        ReadNeeds(whole=True),
        ReadNeeds(whole=True, probe=False),
    ]
)
# What reading ahead is told of a source that is opened.
BEGINNINGS = st.sampled_from(["join", "wait", "wait for one layer", "nothing"])
# Room for a layer of the longest chain of segments, of which each takes 1 MiB, and hardly more.
ROOM_BYTES = 10 << 20


def expected_rows(
    shape: KVShape, namespace: str, own: TokenPath, above: TokenPath, layer: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of `own` after `above`, each of its quality."""
    path = above + own
    tokens = tuple(token for token, _ in path)
    kvs = {q: kv.SequenceKVs(shape, namespace, tokens, q) for q in {q for _, q in path}}
    keys = {quality: own.keys(layer) for quality, own in kvs.items()}
    values = {quality: own.values(layer) for quality, own in kvs.items()}
    places = range(len(above), len(path))
    return (
        torch.stack([keys[path[place][1]][place] for place in places]),
        torch.stack([values[path[place][1]][place] for place in places]),
    )


class StoreMachine(RuleBasedStateMachine):
    """A store with room for everything: the model knows exactly what must be found."""

    quota = 1.0
    shape = SHAPE

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="impress-store-"))
        # Of two files as new as each other the first by name is kept: names must be repeatable.
        numbers = random.Random(1)
        self.same_ids = mock.patch("uuid.uuid4", lambda: uuid.UUID(int=numbers.getrandbits(128)))
        self.same_ids.start()
        # A disk that has failed is asked again at once.
        self.no_pause = mock.patch.multiple(
            "impress_sglang.storage.health", FIRST_PAUSE_S=0.0, LONGEST_PAUSE_S=0.0
        )
        self.no_pause.start()
        self.files = FaultyFileSystem()
        self.gate = threading.Event()
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
        self.sources: list[tuple[SegmentSource, str, TokenPath, int]] = []
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
        # One head of a chunk; a whole chunk of the largest column takes two.
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
            host_gb=(9 * page_bytes + 0.5) / 1e9,
            buffer_gb=16 * 2**20 / 1e9,
            reorder_interval=0.0,
            policy="paper",
            retention=0.25,
        )
        self.store = PrefixStore(config, kv.IDENTITY, self.shape, files=self.files)
        self.looks: list[tuple[SegmentInfo, Future[Verdict]]] = []
        self.take_look = self.store._keeper.look
        mock.patch.object(self.store._keeper, "look", self.hold_look).start()
        self.store._memory.pool.limit_bytes = ROOM_BYTES
        self.waiting: list[SegmentSource] = []
        self.learn_names()

    def hold_look(self, info: SegmentInfo, *, last: bool = False) -> Future[Verdict]:
        assert not last, "every look can see"
        look: Future[Verdict] = Future()
        self.looks.append((info, look))
        return look

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
                    self.note_new_file(self.model.segments[name])
        return {self.names[segment.segment_id] for segment in live}

    def note_new_file(self, known: Known) -> None:
        """A suspect that was rewritten is good: the old file was read to its end."""
        if known.state is SegmentState.SUSPECT:
            known.state = SegmentState.READY

    def wait_for_rewrite(self) -> None:
        job = self.store.reorders._job
        if job is not None:
            job.future.exception()

    def poll(self) -> None:
        self.wait_for_rewrite()
        self.store.poll()
        self.learn_names()

    def let_writes_through(self) -> None:
        self.gate.set()
        self.store.writes.drain()
        self.gate.clear()
        assert sorted(self.done) == sorted(self.accepted), "one callback for each accepted offer"
        for name in self.pending:
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
        self.waiting = [own for own in self.waiting if own is not source]
        self.store.close_source(source)
        wait_until(lambda: not source.is_reading)
        self.store._readers.settle()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.close_sources()
            self.let_writes_through()
            self.store.close()
            self.same_ids.stop()
            self.no_pause.stop()
            shutil.rmtree(self.directory)

    def gated(self, kvs: kv.SequenceKVs, start: int, fails: bool, ids: list[str]) -> LayerReader:
        read = kvs.read_from(start)

        def wait_and_read(layer: int) -> tuple[Tensor, Tensor]:
            assert self.gate.wait(60)
            if fails and layer == 1:
                raise RuntimeError("a test")
            if ids[0] in self.abandoned:
                raise WriteAbandoned("a test")
            return read(layer)

        return wait_and_read

    def expected_outcome(self, namespace: str, tokens: Tokens, quality: Quality) -> StoreOutcome:
        """With room for everything."""
        start, stop = self.model.missing(namespace, tokens, quality)
        if start == len(tokens):
            return StoreOutcome.KNOWN
        return StoreOutcome.ACCEPTED if start < stop else StoreOutcome.UNREACHABLE

    def offer(self, namespace: str, tokens: Tokens, quality: Quality, fails: bool) -> StoreOutcome:
        before = self.learn_names()
        path = self.model.follow(namespace, tokens, quality)
        start, stop = self.model.missing(namespace, tokens, quality)
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
        after = self.learn_names()
        if outcome is not StoreOutcome.ACCEPTED:
            return outcome
        ids.extend(after - before)
        info = self.stored[ids[0]].info
        # Where there is little room it may take the place of another that begins alike.
        assert info.prefix_len <= start
        if info.prefix_len == start:
            assert info.num_tokens == stop - start
        own = tuple((token, quality) for token in info.tokens.tolist())
        above = path[: info.prefix_len]
        self.model.add(Known(ids[0], namespace, above, own, SegmentState.PENDING))
        self.accepted.append(ids[0])
        self.pending.append(ids[0])
        if fails:
            self.failing.add(ids[0])
        return outcome

    @rule(namespace=NAMESPACES, tokens=SEQUENCES, quality=QUALITY, fails=FAILS)
    def offer_a_prefix(self, namespace: str, tokens: Tokens, quality: Quality, fails: bool) -> None:
        self.offer_a_prefix_of(namespace, tokens, quality, fails)

    @precondition(lambda self: self.model.above_holes())
    @rule(data=st.data(), tail=SEQUENCES, fails=FAILS)
    def offer_what_was_lost(self, data: st.DataObject, tail: Tokens, fails: bool) -> None:
        """All of it, or a part, with what follows it or something else."""
        names = [known.name for known in self.model.above_holes()]
        known = self.model.segments[data.draw(st.sampled_from(names))]
        start = len(self.model.held_part(known.namespace, known.above))
        stop = data.draw(st.integers(start + 1, len(known.path)) | st.just(len(known.path)))
        tokens = tuple(token for token, _ in known.path[:stop])
        self.offer_a_prefix_of(known.namespace, tokens + tail, known.path[start][1], fails)

    def offer_a_prefix_of(
        self, namespace: str, tokens: Tokens, quality: Quality, fails: bool
    ) -> None:
        expected = self.expected_outcome(namespace, tokens, quality)
        assert self.offer(namespace, tokens, quality, fails) is expected

    @precondition(lambda self: self.pending)
    @rule(count=st.integers(1, 3))
    def abandon_writes(self, count: int) -> None:
        before = set(self.abandoned)
        left = [name for name in self.pending if name not in before]

        self.store.writes.abandon(lambda: len(self.abandoned - before) >= count)

        assert self.abandoned - before == set(left[::-1][:count]), "the latest first"

    @rule()
    def finish_writes(self) -> None:
        self.let_writes_through()

    @rule(namespace=NAMESPACES, tokens=SEQUENCES, least=QUALITY, data=st.data())
    def open_any_match(
        self, namespace: str, tokens: Tokens, least: Quality, data: st.DataObject
    ) -> None:
        self.open_match(data, namespace, tokens, least)

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data(), tail=SEQUENCES)
    def open_a_match(self, data: st.DataObject, tail: Tokens) -> None:
        self.open_a_match_of(data, tail)

    def open_a_match_of(self, data: st.DataObject, tail: Tokens) -> None:
        known = self.model.segments[data.draw(st.sampled_from(list(self.model.segments)))]
        path = tuple(token for token, _ in known.path)
        self.open_match(data, known.namespace, path + tail, known.quality)

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
        self, data: st.DataObject, namespace: str, tokens: Tokens, least: Quality
    ) -> None:
        self.poll()
        stored = self.model.follow(namespace, tokens, least)
        path = self.model.ready_part(namespace, stored)

        self.wait_for_rewrite()
        match = self.store.match(namespace, kv.as_tokens(tokens), least=least)
        self.learn_names()

        assert match.num_tokens == len(path)
        assert match.quality == functools.reduce(Quality.worst, (q for _, q in path), EXACT)
        if not path:
            return
        start = data.draw(st.integers(0, len(path) - 1))
        if data.draw(st.sampled_from([False, False, True])):
            self.measure(match)
        stored = self.store.forecast.stored_bytes(match.slice(start, len(path)))
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
        wait_until(lambda: not measured.is_reading)

    @precondition(lambda self: self.waiting)
    @rule()
    def begin_what_waits(self) -> None:
        self.store.ahead.join(self.waiting.pop(0))

    @precondition(lambda self: self.sources)
    @rule(data=st.data(), waste_budget=st.sampled_from([0.0, 0.3, 100.0]))
    def read_ahead(self, data: st.DataObject, waste_budget: float) -> None:
        source = self.sources[data.draw(st.integers(0, len(self.sources) - 1))][0]
        if source.next_ahead < source.num_layers:
            source.read_ahead(waste_budget)

    def check_rows(self, number: int, layer: int, selected: Tensor | None) -> SegmentSource:
        """Whatever was evicted, dropped or rewritten since: an open source gives its rows.

        `selected` [head groups, k] are the tokens of each head group, None for all.
        """
        source, namespace, path, start = self.sources[number]
        shape = self.shape
        keys, values = expected_rows(shape, namespace, path[start:], path[:start], layer)

        own_keys = keys
        if shape.probe_kv_heads:
            assert torch.equal(source.read_probe(layer), keys[:, kv.heads_of(shape, kv.PROBE)])
            own_keys = keys[:, kv.heads_of(shape, kv.KEYS)]
        found = read_rows(source, layer, selected)

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

    def read_selection(self, number: int, layer: int, chosen: set[int], seed: int) -> None:
        size = self.sources[number][0].num_tokens
        # Each head group has its own tokens, of which there are as many.
        tokens = {token % size for token in chosen}
        selected = torch.tensor(
            [
                sorted({(token + 7 * head_group) % size for token in tokens})
                for head_group in range(kv.head_groups_of(self.shape))
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
        self.store.reorders.enqueue(force=True)
        while at_once and self.store.reorders.summary()["pending"]:
            self.go_on_reordering()

    @precondition(lambda self: self.store.reorders.summary()["pending"])
    @rule()
    def go_on_reordering(self) -> None:
        self.poll()

    def ready(self) -> list[str]:
        return [known.name for known in self.model.segments.values() if known.ready]

    @precondition(lambda self: self.ready())
    @rule(data=st.data(), damage=DAMAGES)
    def report(self, data: st.DataObject, damage: str) -> None:
        self.poll()
        if self.ready():
            self.damage_and_report(data.draw(st.sampled_from(self.ready())), damage)

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

    @precondition(lambda self: self.built_on())
    @rule(data=st.data(), reads=st.booleans(), tail=SEQUENCES, fails=FAILS)
    def lose_what_others_build_on(
        self, data: st.DataObject, reads: bool, tail: Tokens, fails: bool
    ) -> None:
        """While a request reads it, if `reads`; and at times it is offered again."""
        self.let_writes_through()
        self.poll()
        if not self.built_on():
            return
        name = data.draw(st.sampled_from(self.built_on()))
        known = self.model.segments[name]
        tokens = tuple(token for token, _ in known.path)
        if reads:
            self.open_match(data, known.namespace, tokens, known.quality)
        if known.ready:
            self.damage_and_report(name, "removed")
            self.take_second_looks()
        if data.draw(st.booleans()):
            self.offer_a_prefix_of(known.namespace, tokens + tail, known.quality, fails)

    @rule()
    def take_second_looks(self) -> None:
        """They are behind what is being written."""
        self.let_writes_through()
        self.poll()
        for info, look in self.looks:
            verdict = self.take_look(info).result()
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

    @precondition(lambda self: self.ready())
    @rule(data=st.data())
    def fail_and_recover(self, data: st.DataObject) -> None:
        """Nothing is lost by a disk that does not answer for a while."""
        self.let_writes_through()
        self.poll()
        if not self.ready():
            return
        known = self.model.segments[data.draw(st.sampled_from(self.ready()))]
        tokens = kv.as_tokens([token for token, _ in known.path])
        self.wait_for_rewrite()
        match = self.store.match(known.namespace, tokens, least=known.quality)
        self.learn_names()
        if not match.num_tokens:
            return
        self.files.faults.add(Rule("EIO", "open", "*.kv"))
        try:
            self.store.close_source(self.store.open_source(match, 0, match.num_tokens, ReadNeeds()))
        except StoreUnavailable as error:
            self.store.report(error)
            self.model.segments[self.names[error.segment_id]].state = SegmentState.SUSPECT
            assert self.store.health.state == "degraded"
            assert self.offer("", (5,), EXACT, fails=False) is StoreOutcome.UNAVAILABLE
        finally:
            self.files.faults.clear()
        wait_until(self.is_well)

    def is_well(self) -> bool:
        self.poll()
        return self.store.health.state == "ok"

    @precondition(lambda self: self.age > 10)
    @rule(without_index=st.booleans())
    def restart(self, without_index: bool) -> None:
        self.age = 0
        self.close_sources()
        self.take_second_looks()
        self.store.check_index()
        self.store.close()
        self.done.clear()
        self.accepted.clear()
        if without_index:
            next(self.directory.glob("*/catalog.sqlite")).unlink()
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
            place = known.namespace, tuple(token for token, _ in known.above), known.own
            newest.setdefault(place, known)
        for known in sorted(newest.values(), key=lambda known: (len(known.above), *age(known))):
            # KVs below a hole are lost.
            prefix, own = ([token for token, _ in path] for path in (known.above, known.own))
            # The index says where it stood.
            place = () if without_index else known.above
            above = self.model.place_for(known.namespace, prefix, own, known.quality, place)
            if above is not None:
                name = before[known.name].segment_id
                self.model.add(Known(name, known.namespace, above, known.own))

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
                assert self.stored[name].state is known.state
            lost = [s for s in self.store.tree.segments() if s.state is SegmentState.LOST]
            assert sum(s.info.num_tokens for s in lost) == self.model.num_holes


class TightStoreMachine(StoreMachine):
    """A store that is full after a few segments: what it evicts is its business, within limits."""

    # 5 segments of up to 8 tokens: a header, and a disk block for each column of 2 layers.
    quota = 5 * (1 + 2 * len(kv.columns_of(SHAPE))) * 4096 / 1e9

    def offer_a_prefix_of(
        self, namespace: str, tokens: Tokens, quality: Quality, fails: bool
    ) -> None:
        expected = self.expected_outcome(namespace, tokens, quality)
        path = self.model.follow(namespace, tokens, quality)
        pinned = {
            self.names[segment_id]
            for source, *_ in self.sources
            for segment_id in source.segment_ids
            if self.stored[self.names[segment_id]].segment_id == segment_id
        }
        states = {known.name: known.state for known in self.model.segments.values()}
        before = set(self.model.segments)
        holes = len(self.model.held_part(namespace, path)) < len(path)

        outcome = self.offer(namespace, tokens, quality, fails)

        left = self.learn_names()
        if outcome is StoreOutcome.ACCEPTED and not holes:
            path = path[: len(self.model.segments[self.accepted[-1]].above)]
        keep = {name for name, _, _ in self.model.spans(namespace, path)}
        gone = before - left
        assert not gone & (keep | pinned)
        on_disk = (SegmentState.READY, SegmentState.SUSPECT)
        assert all(states[name] in on_disk for name in gone)
        for name in gone:
            below = self.model.below(self.model.segments[name])
            # What was stored in its place begins alike.
            assert not {known.name for known in below} & left & before, "leaves first"
        for name in gone:
            self.model.lose(name)
        refused = (StoreOutcome.KNOWN, StoreOutcome.UNREACHABLE)
        if expected in refused or outcome in refused:
            assert outcome is expected

    @invariant()
    def quota_holds(self) -> None:
        if hasattr(self, "store"):
            summary = self.store.summary()
            assert summary["used_bytes"] <= summary["quota_bytes"]


class HeadGroupsMachine(StoreMachine):
    shape = HEAD_GROUPS


class TightHeadGroupsMachine(TightStoreMachine):
    shape = HEAD_GROUPS
    quota = 5 * (1 + 2 * len(kv.columns_of(HEAD_GROUPS))) * 4096 / 1e9


TestStore = StoreMachine.TestCase
TestTightStore = TightStoreMachine.TestCase
TestHeadGroups = HeadGroupsMachine.TestCase
TestTightHeadGroups = TightHeadGroupsMachine.TestCase
# Each example writes and reads many files.
EXAMPLES = settings.default.max_examples
TestStore.settings = TestTightStore.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=40
)
TestHeadGroups.settings = TestTightHeadGroups.settings = settings(
    max_examples=EXAMPLES // 2, stateful_step_count=40
)
