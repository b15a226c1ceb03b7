"""Reading ahead: which layers, the same rows, each byte counted once, and nothing left over."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from impress_sglang.cost import ReadCost
from impress_sglang.errors import SegmentUnreadable
from impress_sglang.paper.source import PartSource
from impress_sglang.storage import reader as reader_module
from impress_sglang.transfer.ahead import ReadAhead
from impress_sglang.transfer.buffers import BufferPool, PooledMemory
from tests.unit.kv_factory import BLOCK, flip_byte
from tests.unit.reading import wait_for_reads
from tests.unit.source_factory import KINDS, KVS, SHAPES, Part, PartCase, draw_case, random_tokens
from tests.unit.step_engine import counting, reading, stepping
from tests.unit.store_checks import check_placement
from tests.unit.waiting import wait_until

MIB = 1 << 20


@dataclasses.dataclass(eq=False)
class FakeSource:
    """Takes memory for each layer that is read ahead, when it is its turn."""

    requests: FakeRequests
    num_layers: int
    layer_bytes: int = MIB
    layer: int = -1
    next_ahead: int = 0
    memory: dict[int, PooledMemory] = dataclasses.field(default_factory=dict)

    def read_ahead(self) -> None:
        pool = self.requests.pool
        assert self is self.requests.next_source() and pool.has_room(self.requests.room_for(self))
        memory = pool.take(self.layer_bytes, pytest.fail)
        assert memory is not None
        self.memory[self.next_ahead] = memory
        self.next_ahead += 1

    def ask_for(self, layer: int) -> None:
        """As a `StoredSource` when a layer is read: memory of earlier ones is given back."""
        self.layer, self.next_ahead = layer, max(self.next_ahead, layer + 1)
        for earlier in [number for number in self.memory if number < layer]:
            self.requests.pool.put_back(self.memory.pop(earlier), [])


class FakeRequests:
    """Requests that run and that wait, in the order of their arrival; layers are of 1 MiB."""

    def __init__(self, room: int) -> None:
        self.pool = BufferPool(room * MIB)
        self.running: list[FakeSource] = []
        self.waiting: list[FakeSource] = []

    def next_source(self) -> FakeSource | None:
        """Of those that run, the one with the fewest layers ahead; then the first that waits."""
        running, waiting = (
            [source for source in sources if source.next_ahead < source.num_layers]
            for sources in (self.running, self.waiting)
        )
        return min(running or waiting[:1], key=lambda s: s.next_ahead - s.layer, default=None)

    def room_for(self, source: FakeSource) -> int:
        """It leaves room for the next layer of another that runs and has nothing ahead."""
        return MIB + MIB * any(
            other.next_ahead == other.layer + 1 < other.num_layers
            for other in self.running
            if other is not source
        )


STEPS = st.tuples(st.sampled_from(["join", "wait", "ask", "leave", "more room"]), st.integers(0, 3))


@example(room=2, steps=[("join", 0), ("join", 1), ("ask", 0), ("ask", 0)], enabled=True)
@example(room=0, steps=[("wait", 0), ("wait", 1), ("more room", 0)], enabled=True)
@given(
    room=st.integers(0, 8),
    steps=st.lists(STEPS, max_size=40),
    enabled=st.sampled_from([True, True, True, False]),
)
def test_requests_are_read_ahead_in_turn_as_long_as_there_is_room(
    room: int, steps: list[tuple[str, int]], enabled: bool
) -> None:
    requests = FakeRequests(room)
    ahead = ReadAhead(requests.pool, enabled=enabled)
    sources = [FakeSource(requests, 3 + 2 * number) for number in range(4)]
    for step, number in steps:
        source = sources[number]
        runs, waits = source in requests.running, source in requests.waiting
        if step == "wait" and not (runs or waits):
            requests.waiting.append(source)
            ahead.add_waiting(source)
        elif step == "join" and not runs:
            requests.waiting = [other for other in requests.waiting if other is not source]
            requests.running.append(source)
            ahead.add_running(source)
        elif step == "ask" and runs and source.layer + 1 < source.num_layers:
            source.ask_for(source.layer + 1)
        elif step == "leave" and (runs or waits):
            source.ask_for(source.num_layers)
            (requests.running if runs else requests.waiting).remove(source)
            sources[number] = FakeSource(requests, source.num_layers)
            ahead.remove(source)
        elif step == "more room":
            requests.pool.limit_bytes += MIB
        ahead.top_up()

        assert requests.pool.used_bytes <= requests.pool.limit_bytes
        assert enabled or not requests.pool.used_bytes
        if enabled and (left := requests.next_source()) is not None:
            assert not requests.pool.has_room(requests.room_for(left))


def random_reads(
    chance: random.Random, case: PartCase
) -> Iterator[tuple[list[str], torch.Tensor | None]]:
    """What a layer asks for: whole, some tokens, all keys first, or nothing of the probe column."""
    count = chance.randint(1, min(12, case.num_tokens))
    tokens = random_tokens(case, count, chance.randrange(1 << 20))
    mode = chance.choice(["some", "some", "whole", "all keys", "unseen"])
    if mode != "unseen":
        yield ["probe"], None
    if mode == "all keys":
        yield ["keys"], None
        yield ["values"], tokens
    else:
        yield list(KVS), None if mode == "whole" else tokens


class Requests:
    """Requests that take turns, read ahead at any time, and skip layers; rows are checked.

    Whether a read meets damage depends on the moment, and what can be done next on that: steps are
    chosen by a seed, for Hypothesis requires that it draws the same each time.
    """

    def __init__(self, data: st.DataObject, case: PartCase) -> None:
        self.chance, self.case = random.Random(data.draw(st.integers(0, 1 << 32))), case
        self.live: list[PartSource] = []
        self.done: list[PartSource] = []
        # A wrong byte, and by source the files that had one in its time.
        self.wrong: tuple[Path, int] | None = None
        self.suspects = dict[PartSource, set[str]]()

    def run(self, *others: str) -> None:
        steps = ["open", "ahead", "ahead", "read", "read", "read", "close", *others]
        for _ in range(self.chance.randint(2, 20)):
            step = self.chance.choice(steps)
            if step in others:
                getattr(self, step)()
            elif step == "open" or not self.live:
                self.open()
            else:
                source = self.chance.choice(self.live)
                if step == "ahead" and source.next_ahead < source.num_layers:
                    source.read_ahead()
                elif step == "close" or source.layer + 1 == source.num_layers:
                    self.close(source)
                elif step == "read":
                    self.read(source)
            check_placement(self.case.cache.placement)
        self.close(*self.live)
        if self.wrong is not None:
            flip_byte(*self.wrong)
        self.case.source = self.case.make_source()

    def open(self) -> None:
        self.case.cache.placement.advance()
        self.live.append(source := self.case.make_source(whole=self.chance.random() < 0.5))
        self.suspects[source] = set() if self.wrong is None else {self.wrong[0].stem}

    def close(self, *sources: PartSource) -> None:
        for source in sources:
            source.close()
            self.live.remove(source)
            self.done.append(source)

    def read(self, source: PartSource) -> None:
        """Rows stay valid while the rest of their layer is read, and others ahead."""
        chance, self.case.source, given = self.chance, source, []
        layer = chance.randrange(source.layer + 1, source.num_layers)
        try:
            for kinds, tokens in random_reads(chance, self.case):
                given.append((self.case.check_more(layer, kinds, tokens), tokens))
                if source.next_ahead < source.num_layers and chance.random() < 0.5:
                    source.read_ahead()
        except SegmentUnreadable as error:
            assert error.segment_id in self.suspects[source]
            self.close(source)
        for found, tokens in given:
            self.case.check_rows(found, layer, tokens)

    def damage(self) -> None:
        """It comes and goes."""
        if (wrong := self.wrong) is None:
            number = self.chance.randrange(len(self.case.parts))
            layout = self.case.spans[number][0].layout
            place = self.chance.randrange(layout.header_bytes, layout.file_bytes)
            wrong = self.wrong = self.case.paths[number], place
            for source in self.live:
                self.suspects[source].add(wrong[0].stem)
        else:
            self.wrong = None
        flip_byte(*wrong)

    def reopen(self) -> None:
        """Ids are given to other chunks."""
        self.close(*self.live)
        self.case.reopen()


@settings(max_examples=120)
@given(data=st.data(), engine=st.sampled_from(["auto", "auto", "threads", "counting"]))
def test_rows_are_the_stored_bits_whatever_happens_meanwhile(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, engine: str
) -> None:
    """Chunks move between the caches after they were read ahead, and before they are asked for."""
    if engine == "counting":
        check_every_byte_is_counted_once(tmp_path_factory.mktemp("any"), data)
        return
    with reading(data.draw(st.integers(1, 6)), engine) as r:
        case = draw_case(data, tmp_path_factory.mktemp("any"), r)
        # Reads land in NaN of every floating-point type.
        memory = case.pool.take(case.source.layer_bytes, pytest.fail)
        assert memory is not None
        memory.view[:] = b"\xff" * len(memory)
        case.pool.put_back(memory, [])
        Requests(data, case).run("damage", "reopen")
        case.check_everything()
        case.close()


def check_every_byte_is_counted_once(folder: Path, data: st.DataObject) -> None:
    """What the device gave is what the sources counted, and no source reads a block twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_module, "PIECE_BYTES", BLOCK)
        patch.setattr(ReadCost, "gap_bytes", 0)
        with counting() as (reader, engine):
            case = draw_case(data, folder, reader)
            (requests := Requests(data, case)).run()
            sources = requests.done
            # What a source has begun the engine may be told of behind its end.
            for source in sources:
                wait_for_reads(source)
                stats = source.stats
                assert 0 <= stats.ahead_used_bytes <= stats.ahead_bytes <= stats.ssd_bytes
            assert sum(source.stats.ssd_bytes for source in sources) == engine.started_bytes
            if len(sources) == 1:
                assert len(set(engine.started)) == len(engine.started)
            case.close()


@pytest.mark.usefixtures("no_gaps")
@pytest.mark.parametrize("name", ["cut-rows", "no-probe-cut-rows", "no-probe-gqa-float32"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("reordered", [False, True])
def test_what_is_certain_to_be_wanted_is_read_ahead(
    name: str, whole: bool, reordered: bool, tmp_path: Path
) -> None:
    """The probe column, or all keys without; nothing of it is left, and nothing else was read."""
    certain = KINDS if whole else ["probe"] if SHAPES[name].probe_kv_heads else ["keys"]
    with counting() as (reader, engine):
        case = PartCase(tmp_path, [Part(61), Part(30)], reader, SHAPES[name], reordered=reordered)
        source = case.make_source(whole=whole)

        source.read_ahead()
        wait_for_reads(source)

        case.source, begun = source, engine.started_bytes
        assert begun == BLOCK * case.blocks(0, certain)
        for kind in certain:
            case.check_more(0, [kind])
        assert engine.started_bytes == begun
        case.check_more(0, [kind for kind in KINDS if kind not in certain])
        assert engine.started_bytes == BLOCK * case.blocks(0)
        source.close()
        assert source.stats.ssd_bytes == engine.started_bytes
        assert source.stats.ahead_bytes == source.stats.ahead_used_bytes == begun
        case.close()


@pytest.mark.usefixtures("single_blocks")
@pytest.mark.parametrize("asked", [False, True])
def test_nothing_reads_from_the_files_of_a_closed_source(tmp_path: Path, asked: bool) -> None:
    """No others begin; when those that were begun have ended, the files can be closed."""
    with stepping(4) as (reader, engine):
        case = PartCase(tmp_path, [Part(77), Part(33)], reader, SHAPES["cut-rows"])
        source = case.make_source(whole=True)
        for _ in range(2):
            source.read_ahead()
        engine.wait_started(2)
        if asked:
            engine.allow()
            source.read_probe(0)
            engine.stop()
        assert source.is_reading or asked

        source.close()
        # What ended last may be taken in after that.
        wait_until(lambda: source.is_reading == bool(engine.in_flight))
        engine.allow()
        wait_for_reads(source)

        assert engine.in_flight == 0
        assert source.stats.ssd_bytes == engine.started_bytes
        case.close()
    assert source.stats.ssd_bytes == engine.started_bytes
