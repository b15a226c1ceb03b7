"""A prefix in codes: the bits that its slots get, what is read for that, and from where."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable

import pytest
import torch

from impress_sglang.codes.coding import Rows
from impress_sglang.transfer import buffers
from impress_sglang.transfer.ahead import ReadAhead
from impress_sglang.transfer.codecs import plain_codec
from impress_sglang.transfer.filling import fill
from impress_sglang.transfer.sources import OpenSpan
from tests.unit.kv_factory import make_shape
from tests.unit.reading import Pools
from tests.unit.source_factory import CODED, CodedCase, Part
from tests.unit.store_checks import check_placement
from tests.unit.waiting import calls_of, wait_until

Coded = Callable[..., CodedCase]
FEW_BITS = {"layers": 2, "key_dim": 64, "value_dim": 64, "raw": 1, "probe": (), "coded": True}
SHAPES = [
    CODED,
    dataclasses.replace(CODED, code_bits=5.0),
    make_shape(**FEW_BITS, dtype=torch.bfloat16),
    make_shape(**FEW_BITS, dtype=torch.float16),
]


@pytest.mark.parametrize(
    ("device_pages", "host_pages"), [(0, 0), (400, 0), (0, 400), (9, 13), (40, 60)]
)
def test_what_was_read_once_comes_from_the_caches(
    device_pages: int, host_pages: int, coded: Coded
) -> None:
    case = coded([Part(700)], device_pages=device_pages, host_pages=host_pages)
    layout, stats = case.spans[0][0].layout, []
    for _ in range(3):
        for layer in range(CODED.num_layers):
            case.load(layer)
            case.check(layer)
            check_placement(case.cache.placement)
        stats.append(case.source.stats)
        case.request()
    parts = [*layout.codes, layout.rows]
    assert len(parts) == CODED.num_layers
    assert stats[0].ssd_needed_bytes == sum(part.num_groups * part.group_bytes for part in parts)
    assert stats[0].ssd_bytes == sum(part.num_bytes for part in parts)
    if device_pages + host_pages == 400:
        assert stats[2].ssd_bytes == stats[2].ssd_needed_bytes == stats[2].ssd_chunks == 0
    assert bool(stats[2].device_chunks) == bool(device_pages)
    assert bool(stats[2].host_chunks) == bool(host_pages)


def spans_of(case: CodedCase, chance: random.Random) -> list[OpenSpan]:
    """Each segment cut at random tokens into up to four spans."""
    found = []
    for segment, tokens, base in case.spans:
        inner = (chance.randrange(1, len(tokens)) for _ in range(chance.randrange(4)))
        for place in itertools.pairwise(sorted({0, len(tokens), *inner})):
            found.append((segment, range(*place), base))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_random_requests(seed: int, coded: Coded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are cut into spans that share groups, with caches and pools of several sizes, and
    read by requests in turn, in codes or as they are: slots hold what was asked for, and nothing is
    left behind. Some take each other's buffers: there is room for one layer of one of them.
    """
    chance, shape = random.Random(seed), SHAPES[seed % len(SHAPES)]
    closed = calls_of(monkeypatch, buffers.LayerBuffer, "close")
    lengths = [chance.choice([3, 130, 300, 700, 1500]) for _ in range(chance.randint(1, 3))]
    case = coded(
        [Part(length) for length in lengths],
        shape=shape,
        codes=chance.random() < 0.8,
        device_pages=chance.choice([0, 0, 30]),
        host_pages=chance.choice([0, 0, 40, 200]),
    )
    if chance.random() < 0.3:
        case.pool.limit_bytes = case.source.layer_bytes
    ahead = ReadAhead(case.pool, enabled=chance.choice([True, True, False]))
    sources = []
    for _ in range(chance.randint(1, 4)):
        spans = spans_of(case, chance)
        sources.append(case.open(spans[: chance.randint(1, len(spans))]))
        ahead.add_running(sources[-1])
    codec = plain_codec(shape)
    for layer in range(shape.num_layers):
        for source in sources:
            if chance.random() < 0.5:
                wait_until(lambda: not any(source.is_reading for source in sources))
            pools, slots = Pools(shape, source.num_tokens), torch.arange(source.num_tokens)
            fill(layer, source, source.read(layer), Rows(*pools(layer), slots), codec)
            ahead.top_up()
            pools.check(layer, slots, case.expected(layer, source.spans))
            assert case.pool.held_bytes <= case.pool.limit_bytes
            if chance.random() < 0.8:
                source.end_layer(layer)
    for source in sources:
        source.close()
        ahead.remove(source)
    reads = [read for call in closed for read in call.args[0].reads]
    wait_until(lambda: all(read.done for read in reads))
    # All that was read is counted, and counted once.
    assert sum(r.num_bytes for r in reads) == sum(source.stats.ssd_bytes for source in sources)
    case.pool._collect()
    assert not (case.pool.used_bytes or case.pool._draining or case.pool._open)
    check_placement(case.cache.placement)
