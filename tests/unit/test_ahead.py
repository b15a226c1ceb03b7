"""Which layers of which sources are read ahead, when there is room and when there is not."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.transfer.ahead import ReadAhead
from impress_sglang.transfer.buffers import BufferPool, PooledMemory, Tenant

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
        memory = self.pool.take(self.layer_bytes, Tenant(self, pytest.fail))
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

        for own in sources.values():
            assert list(own.memory) == sorted(own.memory)
        assert bench.pool.used_bytes <= room * MIB
