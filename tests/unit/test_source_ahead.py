"""Reading ahead: which layers, the same rows, each byte counted once, and nothing left over."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impress_sglang.cost import ReadCost
from impress_sglang.errors import SegmentUnreadable
from impress_sglang.paper.source import PartSource
from impress_sglang.storage import reader as reader_module
from impress_sglang.transfer.ahead import ReadAhead
from impress_sglang.transfer.buffers import BufferPool, PooledMemory
from tests.unit.kv_factory import flip_byte
from tests.unit.reading import wait_for_reads
from tests.unit.source_factory import (
    BLOCK,
    KVS,
    SHAPES,
    Case,
    Part,
    check_everything,
    draw_case,
    open_case,
    poison,
    random_tokens,
)
from tests.unit.step_engine import counting, reading, stepping
from tests.unit.store_checks import check_placement

MIB = 1 << 20


@dataclasses.dataclass(eq=False)
class FakeSource:
    """Takes memory for each layer that is read ahead, and keeps what it read."""

    pool: BufferPool
    log: list[tuple[str, int]]
    name: str = "a"
    num_layers: int = 6
    layer_bytes: int = MIB
    layer: int = -1
    next_ahead: int = 0
    memory: dict[int, PooledMemory] = dataclasses.field(default_factory=dict)
    gone: bool = False

    def read_ahead(self) -> None:
        assert self.next_ahead < self.num_layers and not self.gone
        self.log.append((self.name, self.next_ahead))
        memory = self.pool.take(self.layer_bytes, pytest.fail)
        assert memory is not None
        self.memory[self.next_ahead] = memory
        self.next_ahead += 1

    def ask_for(self, layer: int) -> None:
        """As a `StoredSource` when a layer is read: memory of earlier ones is given back."""
        self.layer = layer
        self.next_ahead = max(self.next_ahead, layer + 1)
        for earlier in [number for number in self.memory if number < layer]:
            self.pool.give(self.memory.pop(earlier), [])

    def close(self) -> None:
        for memory in self.memory.values():
            self.pool.give(memory, [])
        self.memory.clear()
        self.gone = True


class Bench:
    """Reading ahead with room for so many layers of 1 MiB, and what it asks for, in order."""

    def __init__(self, room: int, *, enabled: bool = True) -> None:
        self.pool = BufferPool(room * MIB)
        self.ahead = ReadAhead(self.pool, enabled=enabled)
        self.log: list[tuple[str, int]] = []

    def source(self, name: str = "a", num_layers: int = 6, size: int = MIB) -> FakeSource:
        return FakeSource(self.pool, self.log, name, num_layers, size)

    def take_log(self) -> list[tuple[str, int]]:
        log, self.log[:] = list(self.log), []
        return log

    def leave(self, source: FakeSource) -> None:
        source.close()
        self.ahead.leave(source)


def layers(name: str, *numbers: int) -> list[tuple[str, int]]:
    return [(name, number) for number in numbers]


def test_the_request_that_is_nearest_to_what_it_has_goes_first() -> None:
    bench = Bench(room=3)
    first, second = bench.source("a", 20), bench.source("b", 20)
    bench.ahead.join(first)
    bench.ahead.join(second)
    assert bench.take_log() == layers("a", 0, 1, 2)
    first.ask_for(2)
    bench.pool.limit_bytes = 100 * MIB

    bench.ahead.top_up()

    # Neither has anything beyond its layer: they take turns.
    assert bench.log[:6] == [("a", 3), ("b", 0), ("a", 4), ("b", 1), ("a", 5), ("b", 2)]
    assert sorted(bench.log) == sorted(layers("a", *range(3, 20)) + layers("b", *range(20)))


def test_who_waits_is_read_after_those_under_way_in_the_order_of_arrival() -> None:
    bench = Bench(room=0)
    waiting = [bench.source(name, 3) for name in "bc"]
    for source in waiting:
        bench.ahead.wait(source)
    assert bench.take_log() == [], "no room"
    bench.pool.limit_bytes = 100 * MIB

    bench.ahead.join(bench.source("a", 4))

    assert bench.log == layers("a", 0, 1, 2, 3) + layers("b", 0, 1, 2) + layers("c", 0, 1, 2)


def test_what_is_off_reads_nothing_ahead() -> None:
    bench = Bench(room=100, enabled=False)
    bench.ahead.join(bench.source())
    bench.ahead.wait(bench.source("b"))
    bench.ahead.top_up()

    assert bench.log == []


STEPS = st.tuples(
    st.sampled_from(["join", "wait", "ask", "leave", "top up"]),
    st.integers(0, 3),
)


@given(room=st.integers(0, 8), steps=st.lists(STEPS, max_size=40))
def test_no_layer_is_read_twice_and_room_is_kept(room: int, steps: list[tuple[str, int]]) -> None:
    bench = Bench(room)
    sources: dict[int, FakeSource] = {}
    live: set[int] = set()
    for step, number in steps:
        source = sources.get(number)
        if step == "wait" and source is None:
            sources[number] = bench.source(str(number))
            bench.ahead.wait(sources[number])
        elif step == "join" and number not in live:
            sources.setdefault(number, bench.source(str(number)))
            live.add(number)
            bench.ahead.join(sources[number])
        elif step == "ask" and number in live and source is not None:
            if source.layer + 1 < source.num_layers:
                source.ask_for(source.layer + 1)
        elif step == "leave" and source is not None:
            bench.leave(sources.pop(number))
            live.discard(number)
        else:
            bench.ahead.top_up()

        for source in sources.values():
            assert list(source.memory) == sorted(source.memory)
        assert bench.pool.used_bytes <= room * MIB


def draw_reads(data: st.DataObject, case: Case) -> Iterator[tuple[list[str], torch.Tensor | None]]:
    """What a layer asks for: whole, some tokens, all keys first, or nothing of the probe column."""
    count = data.draw(st.integers(1, min(12, case.num_tokens)))
    tokens = random_tokens(case, count, data.draw(st.integers(0, 1 << 20)))
    mode = data.draw(st.sampled_from(["some", "some", "whole", "all keys", "unseen"]))
    if mode != "unseen":
        yield ["probe"], None
    if mode == "all keys":
        yield ["keys"], None
        yield ["values"], tokens
    else:
        yield list(KVS), None if mode == "whole" else tokens


class Requests:
    """Requests that take turns, read ahead at any time, and skip layers; rows are checked."""

    def __init__(self, data: st.DataObject, case: Case) -> None:
        self.data, self.case = data, case
        self.live: list[PartSource] = []
        self.done: list[PartSource] = []
        # A wrong byte, and by source the files that had one in its time.
        self.wrong: tuple[Path, int] | None = None
        self.suspects = dict[PartSource, set[str]]()

    def run(self, *others: str) -> None:
        steps = ["open", "ahead", "ahead", "read", "read", "read", "close", *others]
        for _ in range(self.data.draw(st.integers(2, 20))):
            step = self.data.draw(st.sampled_from(steps))
            if step in others:
                getattr(self, step)()
            elif step == "open" or not self.live:
                self.open()
            else:
                source = self.data.draw(st.sampled_from(self.live))
                if step == "ahead" and source.next_ahead < source.num_layers:
                    source.read_ahead()
                elif step == "close" or source.layer + 1 == source.num_layers:
                    self.close(source)
                elif step == "read":
                    self.read(source)
            assert self.case.cache is not None
            check_placement(self.case.cache.placement)
        self.close(*self.live)
        if self.wrong is not None:
            flip_byte(*self.wrong)
        self.case.source = self.case.make_source()

    def open(self) -> None:
        assert self.case.cache is not None
        self.case.cache.placement.advance()
        self.live.append(source := self.case.make_source(whole=self.data.draw(st.booleans())))
        self.suspects[source] = set() if self.wrong is None else {self.wrong[0].stem}

    def close(self, *sources: PartSource) -> None:
        for source in sources:
            source.close()
            self.live.remove(source)
            self.done.append(source)

    def read(self, source: PartSource) -> None:
        """Rows stay valid while the rest of their layer is read, and others ahead."""
        data, self.case.source, given = self.data, source, []
        layer = data.draw(st.integers(source.layer + 1, source.num_layers - 1))
        try:
            for kinds, tokens in draw_reads(data, self.case):
                given.append((self.case.check_more(layer, kinds, tokens), tokens))
                if source.next_ahead < source.num_layers and data.draw(st.booleans()):
                    source.read_ahead()
        except SegmentUnreadable as error:
            assert error.segment_id in self.suspects[source]
            self.close(source)
        for found, tokens in given:
            for kind, rows in found.items():
                self.case.check_rows(rows, layer, kind, tokens)

    def damage(self) -> None:
        """It comes and goes."""
        if (wrong := self.wrong) is None:
            number = self.data.draw(st.integers(0, len(self.case.parts) - 1))
            layout = self.case.spans[number][0].layout
            place = self.data.draw(st.integers(layout.header_bytes, layout.file_bytes - 1))
            wrong = self.wrong = self.case.paths[number], place
            for source in self.live:
                self.suspects[source].add(wrong[0].stem)
        else:
            self.wrong = None
        flip_byte(*wrong)

    def reopen(self) -> None:
        """Ids are given to other chunks."""
        self.close(*self.live)
        self.case.source = self.case.make_source()
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
        poison(case)
        Requests(data, case).run("damage", "reopen")
        check_everything(case)
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

            assert sum(source.stats.ssd_bytes for source in sources) == engine.started_bytes
            for source in sources:
                stats = source.stats
                assert 0 <= stats.ahead_used_bytes <= stats.ahead_bytes <= stats.ssd_bytes
                wait_for_reads(source)
            if len(sources) == 1:
                assert len(set(engine.started)) == len(engine.started)
            case.close()


@pytest.mark.usefixtures("no_gaps")
@pytest.mark.parametrize("name", ["cut-rows-float32", "no-probe-cut-rows", "no-probe-float32"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("reordered", [False, True])
def test_what_is_certain_to_be_wanted_is_read_ahead(
    name: str, whole: bool, reordered: bool, tmp_path: Path
) -> None:
    """The probe column, or all keys without; nothing of it is left, and nothing else was read."""
    certain = ["probe"] if SHAPES[name].probe_kv_heads else ["keys"]
    certain = ["probe", "keys", "values"] if whole else certain
    with counting() as (reader, engine):
        parts = [Part(61, 8, 0, 61), Part(30, 8, 0, 30)]
        case = open_case(tmp_path, SHAPES[name], parts, reader, reordered=reordered)
        source = case.make_source(whole=whole)

        source.read_ahead()
        wait_for_reads(source)

        case.source, begun = source, engine.started_bytes
        assert begun == case.block_bytes(0, certain)
        for kind in certain:
            case.check_more(0, [kind])
        assert engine.started_bytes == begun
        case.check_more(0, sorted({"probe", "keys", "values"} - set(certain)))
        assert engine.started_bytes == case.block_bytes(0)
        source.close()
        assert source.stats.ssd_bytes == engine.started_bytes
        assert source.stats.ahead_bytes == source.stats.ahead_used_bytes == begun
        case.close()


@pytest.mark.usefixtures("single_blocks")
@pytest.mark.parametrize("asked", [False, True])
def test_nothing_reads_from_the_files_of_a_closed_source(tmp_path: Path, asked: bool) -> None:
    """No others begin; when those that were begun have ended, the files can be closed."""
    with stepping(4) as (reader, engine):
        parts = [Part(77, 8, 0, 77), Part(33, 8, 0, 33)]
        case = open_case(tmp_path, SHAPES["cut-rows-float32"], parts, reader)
        source = case.make_source(whole=True)
        for _ in range(2):
            source.read_ahead()
        engine.wait_started(2)
        if asked:
            engine.allow()
            source.read_probe(0)
            engine.stop()
        assert source.is_reading or asked

        in_flight = engine.in_flight
        source.close()
        time.sleep(0.1)
        assert source.is_reading == bool(in_flight)
        engine.allow()
        wait_for_reads(source)

        assert engine.in_flight == 0
        begun = len(engine.started)
        for segment, _, _ in case.spans:
            segment.close()
        # Another file takes the descriptors; nobody reads from it.
        reused = [os.open(tmp_path / "other", os.O_RDONLY | os.O_CREAT) for _ in case.spans]
        assert {segment.descriptor for segment, _, _ in case.spans} == set(reused)
        assert source.stats.ssd_bytes == engine.started_bytes
        for descriptor in reused:
            os.close(descriptor)
    assert len(engine.started) == begun
