"""Random passes over prefixes in codes: slots hold what levels say, and nothing is left behind.

Segments are cut into parts that share units; one or two loads bring them, for one to four requests
of a pass in different bits, with caches, pools and floors of several sizes; then the same again on
what is resident, after a part was cut.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from impress_sglang.precision.codec import NUM_PLANES
from impress_sglang.storage.reader import BlockReader
from impress_sglang.transfer import buffers
from impress_sglang.transfer.ahead import ReadAhead
from impress_sglang.transfer.coded_loader import CodedLoader
from impress_sglang.transfer.loader import LoadStats
from impress_sglang.transfer.resident import PartLoad, PartUse, ResidentPart
from impress_sglang.transfer.slots import LayerSlots
from tests.unit.coded_factory import SHAPE, CodedCase, CodedPart, in_slots, restored
from tests.unit.test_coded_loader import FLOORS
from tests.unit.waiting import wait_until

LAYERS = SHAPE.num_layers


@dataclasses.dataclass
class Piece:
    """A part of a segment, which has this number in the case."""

    segment: int
    part: ResidentPart


def pieces_of(case: CodedCase, chance: random.Random) -> list[Piece]:
    """Each segment cut at random tokens into up to four parts."""
    found, first = [], 0
    for number, span in enumerate(case.spans):
        inner = (chance.randrange(1, len(span)) for _ in range(chance.randrange(4)))
        for start, stop in itertools.pairwise(sorted({0, len(span), *inner})):
            slots = case.slots[first + start : first + stop]
            own = span.segment.segment_id, span.layout, LAYERS, start, stop, slots
            found.append(Piece(number, ResidentPart(*own)))
        first += len(span)
    return found


def check_slots(case: CodedCase, pieces: Sequence[Piece], layer: int) -> None:
    """The slots of all parts that have a layer hold what their levels say."""
    for piece in pieces:
        part = piece.part
        if part.layers_loaded <= layer:
            continue
        codes = next(own[2] for own in case._codes if own[:2] == (piece.segment, layer))
        levels = torch.from_numpy(part.levels(layer)).long()[None, :, None].expand(len(part), -1, 1)
        for pool, own in zip((case.pools[layer], case.pools[LAYERS + layer]), codes, strict=True):
            expected = restored(own, levels, slice(part.start, part.stop))
            slack = 2 * torch.finfo(pool.dtype).eps * float(expected.abs().max()) + 1e-5
            assert (pool[part.slots].float() - expected).abs().max() <= slack


@dataclasses.dataclass
class Asking:
    """A request of a pass."""

    uses: Sequence[PartUse]
    planes: int
    loads: list[PartLoad]
    stats: LoadStats = dataclasses.field(default_factory=LoadStats)

    @classmethod
    def of(cls, uses: Sequence[PartUse], chance: random.Random) -> Asking:
        loads = dict.fromkeys(own.part.load[0] for own in uses if own.part.load is not None)
        planes = chance.choice([0, 0, *range(1, NUM_PLANES + 1)])
        for load in loads:
            load.source.want(planes)
        return cls(uses, planes, [*loads])


def load_pass(
    case: CodedCase, pieces: Sequence[Piece], loader: CodedLoader, chance: random.Random
) -> list[PartLoad]:
    """Load, or raise, parts for some requests; returns the loads, which have ended."""
    assert case.cache is not None
    case.cache.placement.advance()
    ahead = ReadAhead(case.pool, chance.choice([0.2, 0.2, 0.0]))
    planes = chance.choice([0, 0, 1, 2])
    apart = len(pieces) > 1 and chance.random() < 0.5
    loads = []
    for group in (pieces[::2], pieces[1::2]) if apart else (pieces,):
        spans = [
            dataclasses.replace(case.spans[own.segment], start=own.part.start, stop=own.part.stop)
            for own in group
        ]
        source = case.open(spans, planes, in_slots([own.part for own in group]))
        loads.append(PartLoad(source, [own.part for own in group]))
        ahead.join(source)
    parts = [own.part for own in pieces]
    requests = [Asking.of([PartUse(own, own.start, own.stop) for own in parts], chance)]
    for _ in range(chance.randrange(4)):
        *whole, last = parts[: chance.randint(1, len(parts))]
        uses = [PartUse(own, own.start, own.stop) for own in whole]
        stop = chance.randint(last.start + 1, last.stop)
        requests.insert(0, Asking.of([*uses, PartUse(last, last.start, stop)], chance))
    for own in requests:
        for load in own.loads:
            load.pending += 1
    for layer in range(LAYERS):
        for own in requests:
            if chance.random() < 0.5:
                wait_until(lambda: not any(load.source.is_reading for load in loads))
            slots = torch.cat([use.slots for use in own.uses])
            now = LayerSlots.of(case.pools[layer], case.pools[LAYERS + layer], slots)
            loader.load(layer, own.uses, own.planes, now, own.stats)
            ahead.top_up()
            for use in own.uses:
                assert (use.part.levels(layer) >= own.planes).all()
            for loaded in range(LAYERS):
                check_slots(case, pieces, loaded)
            for load in own.loads:
                load.end_layer(layer)
    for own in requests:
        for load in own.loads:
            if load.leave():
                load.source.close()
                ahead.leave(load.source)
    return loads


@pytest.mark.parametrize("seed", range(40))
def test_slots_hold_what_levels_say(
    seed: int, coded: Callable[..., CodedCase], monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    closed = []
    close = buffers.LayerBuffer.close

    def note(buffer: buffers.LayerBuffer, reader: BlockReader) -> None:
        close(buffer, reader)
        closed.append(buffer)

    monkeypatch.setattr(buffers.LayerBuffer, "close", note)
    lengths = [chance.choice([130, 300, 700, 1500]) for _ in range(chance.randint(1, 3))]
    case = coded(
        [CodedPart(own) for own in lengths],
        floors=chance.choice([None, FLOORS]),
        device_pages=chance.choice([0, 0, 30]),
        host_pages=chance.choice([0, 0, 40, 200]),
    )
    assert case.cache is not None
    case.source.close()
    closed.clear()
    pieces = pieces_of(case, chance)
    loader = CodedLoader()
    loads: list[PartLoad] = []
    for _ in range(2):
        loads += load_pass(case, pieces, loader, chance)
        wait_until(lambda: all(read.done for own in closed for read in own.reads))
        # All that was read is counted, and counted once.
        read = sum(one.num_bytes for own in closed for one in own.reads)
        assert read == sum(load.source.stats.ssd_bytes for load in loads)
        case.pool._collect()
        assert not (case.pool.used_bytes or case.pool._draining or case.pool._open)
        case.cache.check_integrity()
        assert all(own.part.loaded and own.part.load is None for own in pieces)
        place = chance.randrange(len(pieces))
        piece = pieces[place]
        if len(piece.part) > 1:
            at = chance.randrange(piece.part.start + 1, piece.part.stop)
            pieces.insert(place + 1, Piece(piece.segment, piece.part.cut(at)))
        for part in (own.part for own in pieces[place : place + 2]):
            for planes in range(NUM_PLANES + 1):
                lacking = [(part.planes <= plane).mean() for plane in range(planes)]
                assert part.has(planes) == (not any(lacking))
                assert part.lacking(planes).tolist() == lacking
                assert not part.lacking(planes, brought=NUM_PLANES).any()
