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
from tests.unit.coded_factory import SHAPE, CodedCase, CodedPart, check_pool
from tests.unit.kv_factory import make_shape
from tests.unit.store_checks import check_placement
from tests.unit.waiting import wait_until

Coded = Callable[..., CodedCase]
FEW_BITS = {"layers": 2, "key_dim": 64, "value_dim": 64, "raw": 1, "probe": (), "coded": True}
SHAPES = [
    SHAPE,
    dataclasses.replace(SHAPE, code_bits=5.0),
    make_shape(**FEW_BITS, dtype=torch.bfloat16),
    make_shape(**FEW_BITS, dtype=torch.float16),
]
PREFIXES = {
    "one": [CodedPart(700)],
    "several": [CodedPart(300, 17), CodedPart(64), CodedPart(900, 0, 555)],
}


def test_all_of_it_is_read_once(coded: Coded) -> None:
    case = coded(PREFIXES["one"])
    for layer in range(SHAPE.num_layers):
        case.load(layer)
        case.check(layer)
    case.source.close()
    (span,) = case.spans
    read = case.source.stats
    parts = [*span[0].layout.codes, span[0].layout.rows]
    assert len(parts) == SHAPE.num_layers
    assert read.ssd_needed_bytes == sum(part.num_groups * part.group_bytes for part in parts)
    assert read.ssd_bytes == sum(part.num_bytes for part in parts)


@pytest.mark.parametrize(("device_pages", "host_pages"), [(400, 0), (0, 400), (9, 13), (40, 60)])
def test_caches_give_what_the_drive_gave(device_pages: int, host_pages: int, coded: Coded) -> None:
    case = coded(PREFIXES["several"], device_pages=device_pages, host_pages=host_pages)
    assert case.cache is not None
    for _ in range(3):
        for layer in range(SHAPE.num_layers):
            case.load(layer)
            case.check(layer)
            check_placement(case.cache.placement)
        case.source.close()
        stats = case.source.stats
        case.request()
    if device_pages + host_pages == 400:
        assert stats.ssd_bytes == stats.ssd_needed_bytes == stats.ssd_chunks == 0
    assert bool(stats.device_chunks) == bool(device_pages)
    assert bool(stats.host_chunks) == bool(host_pages)


def test_requests_that_take_each_others_buffers_get_the_same_bits(coded: Coded) -> None:
    """With room for one layer of one of them."""
    cases = [coded(PREFIXES["several"]) for _ in range(2)]
    pool = cases[0].pool
    pool.limit_bytes = cases[0].source.layer_bytes
    for case in cases:
        case.source.close()
        case.pool = pool
        case.request()
    for layer in range(SHAPE.num_layers):
        for case in cases:
            case.load(layer)
            case.check(layer)
            assert pool.held_bytes <= pool.limit_bytes
    for case in cases:
        case.close()
    assert pool.used_bytes == 0


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
    left behind.
    """
    chance, shape = random.Random(seed), SHAPES[seed % len(SHAPES)]
    closed = []
    close = buffers.LayerBuffer.close

    def note(buffer: buffers.LayerBuffer) -> None:
        close(buffer)
        closed.append(buffer)

    monkeypatch.setattr(buffers.LayerBuffer, "close", note)
    lengths = [chance.choice([3, 130, 300, 700, 1500]) for _ in range(chance.randint(1, 3))]
    case = coded(
        [CodedPart(length) for length in lengths],
        shape=shape,
        codes=chance.random() < 0.8,
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
    codec = plain_codec(shape)
    for layer in range(shape.num_layers):
        for source in sources:
            if chance.random() < 0.5:
                wait_until(lambda: not any(source.is_reading for source in sources))
            pools = [
                torch.empty(source.num_tokens, shape.num_kv_heads, dim, dtype=shape.dtype)
                for dim in (shape.key_dim, shape.value_dim)
            ]
            rows = Rows(pools[0], pools[1], torch.arange(source.num_tokens))
            fill(layer, source, source.read(layer), rows, codec)
            ahead.top_up()
            for pool, right in zip(pools, case.expected(layer, source.spans), strict=True):
                check_pool(pool, rows.slots, right)
            source.end_layer(layer)
    for source in sources:
        source.close()
        ahead.leave(source)
    wait_until(lambda: all(read.done for buffer in closed for read in buffer.reads))
    # All that was read is counted, and counted once.
    read = sum(one.num_bytes for buffer in closed for one in buffer.reads)
    assert read == sum(source.stats.ssd_bytes for source in sources)
    case.pool._collect()
    assert not (case.pool.used_bytes or case.pool._draining or case.pool._open)
    check_placement(case.cache.placement)
