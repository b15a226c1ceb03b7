"""Random requests for prefixes in codes: slots hold what was asked for, and nothing is left behind.

Segments are cut into spans that share groups, with caches and pools of several sizes, and read by
requests in turn.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable

import pytest
import torch

from impress_sglang.storage.reader import BlockReader
from impress_sglang.transfer import buffers
from impress_sglang.transfer.ahead import ReadAhead
from impress_sglang.transfer.filling import FillStats, SlotFiller
from impress_sglang.transfer.stored_source import OpenSpan
from tests.unit.coded_factory import SHAPE, CodedCase, CodedPart
from tests.unit.waiting import wait_until

CPU = torch.device("cpu")


def spans_of(case: CodedCase, chance: random.Random) -> list[OpenSpan]:
    """Each segment cut at random tokens into up to four spans."""
    found = []
    for segment, tokens, base in case.spans:
        inner = (chance.randrange(1, len(tokens)) for _ in range(chance.randrange(4)))
        for place in itertools.pairwise(sorted({0, len(tokens), *inner})):
            found.append((segment, range(*place), base))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_slots_hold_what_was_asked_for(
    seed: int, coded: Callable[..., CodedCase], monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    closed = []
    close = buffers.LayerBuffer.close

    def note(buffer: buffers.LayerBuffer, reader: BlockReader) -> None:
        close(buffer, reader)
        closed.append(buffer)

    monkeypatch.setattr(buffers.LayerBuffer, "close", note)
    lengths = [chance.choice([130, 300, 700, 1500]) for _ in range(chance.randint(1, 3))]
    case = coded(
        [CodedPart(own) for own in lengths],
        device_pages=chance.choice([0, 0, 30]),
        host_pages=chance.choice([0, 0, 40, 200]),
    )
    assert case.cache is not None
    ahead = ReadAhead(case.pool, enabled=chance.choice([True, True, False]))
    sources = []
    for _ in range(chance.randint(1, 4)):
        spans = spans_of(case, chance)
        sources.append(case.open(spans[: chance.randint(1, len(spans))]))
        ahead.join(sources[-1])
    filler, stats = SlotFiller(SHAPE, CPU), FillStats()
    for layer in range(SHAPE.num_layers):
        for source in sources:
            if chance.random() < 0.5:
                wait_until(lambda: not any(own.is_reading for own in sources))
            pools = [
                torch.empty(source.num_tokens, SHAPE.num_kv_heads, dim)
                for dim in (SHAPE.key_dim, SHAPE.value_dim)
            ]
            rows = torch.arange(source.num_tokens)
            filler.fill(layer, source, *pools, rows, stats, contextlib.nullcontext)
            ahead.top_up()
            for pool, right in zip(pools, case.expected(layer, source.spans), strict=True):
                assert (pool - right).abs().max() <= 1e-4
            source.end_layer(layer)
    for source in sources:
        source.close()
        ahead.leave(source)
    wait_until(lambda: all(read.done for own in closed for read in own.reads))
    # All that was read is counted, and counted once.
    read = sum(one.num_bytes for own in closed for one in own.reads)
    assert read == sum(source.stats.ssd_bytes for source in sources)
    case.pool._collect()
    assert not (case.pool.used_bytes or case.pool._draining or case.pool._open)
    case.cache.placement.check_integrity()
