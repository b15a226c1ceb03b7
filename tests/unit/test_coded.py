"""A prefix in codes: the bits that its slots get, what is read for that, and from where."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from impress_sglang.errors import PrefixUnreadable
from tests.unit.coded_factory import SHAPE, CodedCase, CodedPart
from tests.unit.kv_factory import flip_byte, make_shape

Coded = Callable[..., CodedCase]
PREFIXES = {
    "one": [CodedPart(700)],
    "short": [CodedPart(3)],
    "inside": [CodedPart(1500, 70, 1337)],
    "several": [CodedPart(300, 17), CodedPart(64), CodedPart(900, 0, 555)],
}


def load_all(case: CodedCase) -> None:
    """Load all layers as the request under way does; checks slots."""
    for layer in range(case.shape.num_layers):
        case.load(layer)
        case.check(layer)


@pytest.mark.parametrize("bits", [5.0, 6.0])
@pytest.mark.parametrize("name", PREFIXES)
def test_slots_get_what_codes_say(name: str, bits: float, coded: Coded) -> None:
    load_all(coded(PREFIXES[name], shape=dataclasses.replace(SHAPE, code_bits=bits)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pools_of_few_bits(dtype: torch.dtype, coded: Coded) -> None:
    shape = make_shape(layers=1, key_dim=64, value_dim=64, dtype=dtype, probe=(), coded=True)
    load_all(coded(PREFIXES["several"], shape=shape))


def test_all_of_it_is_read_once(coded: Coded) -> None:
    case = coded(PREFIXES["one"])
    load_all(case)
    case.source.close()
    (span,) = case.spans
    read = case.source.stats
    pages = span[0].layout.codes[0]
    assert read.ssd_needed_bytes == pages.num_groups * pages.group_bytes * SHAPE.num_layers
    assert read.ssd_bytes == pages.num_bytes * SHAPE.num_layers


@pytest.mark.parametrize(("device_pages", "host_pages"), [(400, 0), (0, 400), (9, 13), (40, 60)])
def test_caches_give_what_the_drive_gave(device_pages: int, host_pages: int, coded: Coded) -> None:
    case = coded(PREFIXES["several"], device_pages=device_pages, host_pages=host_pages)
    assert case.cache is not None
    for _ in range(3):
        for layer in range(SHAPE.num_layers):
            case.load(layer)
            case.check(layer)
            case.cache.placement.check_integrity()
        case.source.close()
        stats = case.source.stats
        case.request()
    if device_pages + host_pages == 400:
        assert stats.ssd_bytes == 0 and stats.ssd_chunks == 0
    assert stats.device_chunks + stats.host_chunks > 0


def test_a_damaged_block_is_found(coded: Coded) -> None:
    case = coded(PREFIXES["one"])
    flip_byte(case.paths[0], case.spans[0][0].layout.place(1, codes=True)[0] + 5)
    case.load(0)
    with pytest.raises(PrefixUnreadable, match="checksum"):
        case.load(1)


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
