"""Pages of a cache: how many a chunk takes, and memory; `test_chunk_cache.py` reads them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from impress_sglang.errors import ConfigError
from impress_sglang.storage.direct_io import AlignedMemory
from impress_sglang.storage.layout import KVShape, SegmentLayout
from impress_sglang.tiers import slab as slab_module
from impress_sglang.tiers.slab import PageShape, Slab
from tests.unit.kv_factory import make_shape, row_size
from tests.unit.test_chunk_cache import HEAD_GROUPS, SHAPE

CPU = torch.device("cpu")
# gcd(12, 8) = 4 elements a vector: a key head has 3 of them, a value head 2.
PAGE = PageShape.of(SHAPE, 16)
NO_OTHER_KEYS = make_shape(kv_heads=1, query_heads=1, probe=(0,))


@pytest.mark.parametrize("shape", [SHAPE, HEAD_GROUPS, NO_OTHER_KEYS])
@pytest.mark.parametrize(("chunk_tokens", "num_tokens"), [(16, 35), (32, 40), (8, 8)])
def test_pages_of_each_chunk_in_the_order_of_the_layout(
    shape: KVShape, chunk_tokens: int, num_tokens: int
) -> None:
    """As many as hold its rows, wherever its segment's chunks end; a column without heads none."""
    page = PageShape.of(shape, 16)
    layout = SegmentLayout(shape, chunk_tokens, num_tokens, 4096)

    pages = page.chunk_pages(layout)

    assert (page.unit, page.page_vectors) == (math.gcd(shape.key_dim, shape.value_dim), 16)
    assert pages.dtype == np.uint16 and len(pages) == layout.total_chunks
    whole = []
    for layer in range(shape.num_layers):
        for column in shape.columns:
            whole.append(-(-16 * row_size(shape, column) // page.page_bytes))
            for chunk in range(layout.num_chunks):
                needed = layout.chunk_rows(chunk) * row_size(shape, column)
                found = pages[layout.chunk_index(layer, column, chunk)]
                assert found == -(-needed // page.page_bytes)
    assert page.max_chunk_pages(shape) == max(whole)


def test_reading_nothing_gives_nothing() -> None:
    slab = Slab(PAGE, 0, CPU, option="--impress-host-gb", pin=False)

    assert slab.read_pages(np.empty(0, np.int32)).shape == (0, 64)


def test_memory_that_a_device_has_not_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", refuse)

    with pytest.raises(ConfigError, match=r"--impress-device-gb.*out of memory"):
        Slab(PAGE, 10, torch.device("cuda"), option="--impress-device-gb", pin=False)


@pytest.mark.parametrize(("unit", "pages"), [(5, 3), (64, 100), (8, 0)])
def test_pinned_pages_take_no_more_memory_than_they_have(
    unit: int, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole blocks of it, and not the next power of two; here nothing is locked."""
    locked: list[AlignedMemory] = []
    monkeypatch.setattr(slab_module, "pin_memory", locked.append)
    page = PageShape(unit, 24, torch.float16)
    slab = Slab(page, pages, torch.device("cpu"), option="--impress-host-gb", pin=True)

    assert slab.pages.shape == (pages, page.elements) and slab.pages.dtype == torch.float16
    assert sum(map(len, locked)) == -(-pages * page.page_bytes // 4096) * 4096
    if pages:
        assert slab.page_addresses(np.array([0]))[0] == locked[0].address
        contents = torch.arange(2 * page.elements, dtype=torch.float16).view(2, -1)
        slab.write_pages(np.array([2, 0], np.int32), contents)
        assert torch.equal(slab.read_pages(np.array([0, 2], np.int32)), contents.flip(0))
