"""The store on SSD against a plain model, over random histories.

Writes wait at a gate until a step lets them through, so that a history is the same each time. Every
match is read back, and its rows compared with those that belong to its tokens.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
import threading
from pathlib import Path
from unittest import mock

import torch
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from impress_sglang.config import ImpressConfig
from impress_sglang.management.store import PrefixStore, StoreOutcome
from impress_sglang.storage.layout import Stream
from impress_sglang.storage.writer import LayerReader
from impress_sglang.transfer.source import SegmentSource, Want
from tests.unit.kv_factory import IDENTITY, SequenceKVs, as_tokens, make_shape
from tests.unit.prefix_model import Known, PrefixModel
from tests.unit.prefix_model import Path as TokenPath

SHAPE = make_shape(query_heads=2, kv_heads=2, key_dim=4, value_dim=4, probe=(0,))
Tokens = tuple[int, ...]
# Runs of a few tokens, some longer than a chunk, that begin alike: histories branch and meet often.
RUNS = [(0,), (1,), (0, 0, 1), (0, 1, 1, 0, 1), (2,) * 9, tuple(range(3, 14))]
SEQUENCES = st.lists(st.sampled_from(RUNS), min_size=1, max_size=4).map(
    lambda runs: tuple(token for run in runs for token in run)
)
NAMESPACES = st.sampled_from(["", "salt"])


def expected_rows(namespace: str, path: TokenPath, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a path, part of which may be approximate."""
    tokens = tuple(token for token, _ in path)
    exact = SequenceKVs(SHAPE, namespace, tokens, approximate=False)
    other = SequenceKVs(SHAPE, namespace, tokens, approximate=True)
    flags = torch.tensor([flag for _, flag in path])[:, None, None]
    return (
        torch.where(flags, other.keys(layer), exact.keys(layer)),
        torch.where(flags, other.values(layer), exact.values(layer)),
    )


class StoreMachine(RuleBasedStateMachine):
    """A store with room for everything: the model knows exactly what must be found."""

    quota = 1.0

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="impress-store-"))
        # Nothing here is about power cuts, and waiting for the disk takes most of the time.
        self.no_sync = mock.patch("os.fsync")
        self.no_sync.start()
        self.gate = threading.Event()
        self.model = PrefixModel()
        self.failing: set[str] = set()
        self.done: list[str] = []
        self.accepted: list[str] = []
        self.sources: list[tuple[SegmentSource, str, TokenPath, int]] = []
        self.open()

    def open(self) -> None:
        config = ImpressConfig(
            ssd_dir=str(self.directory),
            ssd_gb=self.quota,
            min_free_gb=0.0,
            chunk_tokens=8,
            io_threads=2,
        )
        self.store = PrefixStore(config, IDENTITY, SHAPE)

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
            self.store.close_source(self.sources.pop()[0])

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.close_sources()
            self.let_writes_through()
            self.store.close()
            self.no_sync.stop()
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
        before = {segment.segment_id for segment in self.store.tree.segments()}
        path = self.model.follow(namespace, tokens, approximate)
        kvs = SequenceKVs(SHAPE, namespace, tokens, approximate)
        ids: list[str] = []
        outcome = self.store.offer(
            namespace,
            as_tokens(tokens),
            lambda start: self.gated(kvs, start, fails),
            lambda: self.done.append(ids[0]),
            approximate=approximate,
            min_tokens=1,
        )
        after = {segment.segment_id for segment in self.store.tree.segments()}
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
    def open_a_match(
        self, namespace: str, tokens: Tokens, approximate: bool, data: st.DataObject
    ) -> None:
        stored = self.model.follow(namespace, tokens, approximate)
        path = self.model.ready_part(namespace, stored)

        match = self.store.match(namespace, as_tokens(tokens), allow_approximate=approximate)

        assert match.num_tokens == len(path)
        assert match.approximate == any(flag for _, flag in path)
        assume(path)
        start = data.draw(st.integers(0, len(path) - 1))
        source = self.store.open_source(match, start, len(path))
        self.sources.append((source, namespace, path, start))

    @precondition(lambda self: self.sources)
    @rule(data=st.data(), layer=st.integers(0, 1))
    def read_and_close(self, data: st.DataObject, layer: int) -> None:
        """Whatever was evicted or dropped since: an open source gives its rows."""
        number = data.draw(st.integers(0, len(self.sources) - 1))
        source, namespace, path, start = self.sources.pop(number)
        keys, values = expected_rows(namespace, path, layer)

        probe, other, found = source.read(layer, [Want(stream) for stream in Stream])

        assert torch.equal(torch.cat([probe, other], 1), keys[start:])
        assert torch.equal(found, values[start:])
        self.store.close_source(source)

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.model.segments)))
        gone = [self.model.segments[name], *self.model.below_name(name)]

        self.store.drop(name)

        for known in gone:
            self.model.remove(known.name)

    @rule(without_index=st.booleans())
    def restart(self, without_index: bool) -> None:
        self.close_sources()
        self.let_writes_through()
        self.store.close()
        self.done.clear()
        self.accepted.clear()
        if without_index:
            next(self.directory.glob("*/catalog.sqlite")).unlink()
        self.open()
        old, self.model = self.model, PrefixModel()
        order = sorted(old.segments.values(), key=lambda known: (len(known.above), known.name))
        for known in order:
            # Approximate KVs below a branch that an exact one hides by now are lost.
            flag = known.own[0][1]
            prefix = [token for token, _ in known.above]
            above = self.model.place_for(known.namespace, prefix, known.own[0][0], flag)
            if above is not None:
                self.model.add(Known(known.name, known.namespace, above, known.own, True))

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "store"):
            self.store.check_integrity()

    @invariant()
    def same_segments(self) -> None:
        if hasattr(self, "store"):
            segments = {s.segment_id: s for s in self.store.tree.segments()}
            assert set(segments) == set(self.model.segments)
            for name, known in self.model.segments.items():
                assert segments[name].ready == known.ready


class TightStoreMachine(StoreMachine):
    """A store that is full after a few segments: what it evicts is its business, within limits."""

    quota = 5 * 7 * 4096 / 1e9

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
        pinned = {name for source, *_ in self.sources for name in source.segment_ids}
        pending = {k.name for k in self.model.segments.values() if not k.ready}
        before = set(self.model.segments)

        outcome = self.offer(namespace, tokens, approximate, fails)

        left = {segment.segment_id for segment in self.store.tree.segments()}
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


TestStore = StoreMachine.TestCase
TestTightStore = TightStoreMachine.TestCase
# Each example writes and reads many files.
TestStore.settings = TestTightStore.settings = settings(
    max_examples=settings.default.max_examples * 3 // 10
)
