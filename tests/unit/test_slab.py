"""Pages of a cache: how many a chunk takes, and rows that are read out of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from impress_sglang.errors import ConfigError
from impress_sglang.storage.direct_io import AlignedMemory
from impress_sglang.storage.layout import SegmentLayout
from impress_sglang.tiers import slab as slab_module
from impress_sglang.tiers.slab import PageShape, Slab
from tests.unit.kv_factory import columns_of, make_shape, row_size

CPU = torch.device("cpu")
# gcd(12, 8) = 4 elements a vector: a key head has 3 of them, a value head 2.
SHAPE = make_shape(
    layers=2, kv_heads=3, query_heads=3, key_dim=12, value_dim=8, dtype=torch.bfloat16
)
PAGE = PageShape.of(SHAPE, 16)


def test_a_page_holds_one_vector_for_each_token_of_a_chunk() -> None:
    assert (PAGE.unit, PAGE.page_vectors, PAGE.dtype) == (4, 16, torch.bfloat16)
    assert PAGE.page_bytes == 4 * 16 * 2
    assert [PAGE.row_vectors(SHAPE, column) for column in SHAPE.columns] == [3, 6, 6]
    assert PAGE.max_chunk_pages(SHAPE) == 6


def test_equal_dims_make_a_page_of_one_head() -> None:
    page = PageShape.of(make_shape(kv_heads=4, query_heads=8, probe=(0, 1)), 8)

    assert (page.unit, page.page_bytes) == (8, 8 * 8 * 4)
    assert page.max_chunk_pages(make_shape(kv_heads=4, query_heads=8, probe=(0, 1))) == 4


def test_pages_of_each_chunk_in_the_order_of_the_layout() -> None:
    """35 tokens: two whole chunks and one of 3 tokens, in which every page is partly used."""
    layout = SegmentLayout(SHAPE, 16, 35, 4096)

    pages = PAGE.chunk_pages(layout)

    assert pages.tolist() == [3, 3, 1, 6, 6, 2, 6, 6, 2] * 2
    assert pages.dtype == np.uint16
    for layer in range(2):
        for column in SHAPE.columns:
            for chunk in range(3):
                needed = layout.chunk_rows(chunk) * PAGE.row_vectors(SHAPE, column)
                assert pages[layout.chunk_index(layer, column, chunk)] == -(-needed // 16)


def test_a_segment_with_other_chunks_takes_other_pages() -> None:
    assert PAGE.chunk_pages(SegmentLayout(SHAPE, 32, 40, 4096)).tolist()[:6] == [6, 2, 12, 3, 12, 3]
    assert PAGE.chunk_pages(SegmentLayout(SHAPE, 8, 8, 4096)).tolist()[:3] == [2, 3, 3]


def test_a_column_without_heads_takes_none() -> None:
    shape = make_shape(kv_heads=1, query_heads=1, probe=(0,))

    assert (
        PageShape.of(shape, 8).chunk_pages(SegmentLayout(shape, 8, 8, 4096)).tolist()
        == [
            1,
            0,
            1,
        ]
        * 2
    )


def test_pages_of_single_heads() -> None:
    """A page has 16 vectors of 4 elements."""
    shape = make_shape(
        layers=2,
        kv_heads=3,
        query_heads=3,
        key_dim=12,
        value_dim=8,
        dtype=torch.bfloat16,
        probe=(),
    )
    page, layout = PageShape.of(shape, 16), SegmentLayout(shape, 16, 35, 4096)

    assert [page.row_vectors(shape, column) for column in shape.columns] == [0, 3, 3, 3, 2, 2, 2]
    assert [page.row_vectors_of(elements) for elements in (36, 12, 8)] == [9, 3, 2]
    assert page.max_chunk_pages(shape) == 3
    pages = page.chunk_pages(layout)
    assert pages.tolist() == [0, 0, 0, *[3, 3, 1] * 3, *[2, 2, 1] * 3] * 2
    for layer in range(2):
        for column in columns_of(shape):
            for chunk in range(layout.num_chunks):
                needed = layout.chunk_rows(chunk) * row_size(shape, column)
                found = pages[layout.chunk_index(layer, column, chunk)]
                assert found == -(-needed // page.page_bytes)


def contents(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 64, generator=generator).to(torch.bfloat16)


def test_pages_are_read_as_they_were_written() -> None:
    slab = Slab(PAGE, 10, CPU, option="--impress-host-gb", pin=False)
    first, second = contents(3, 1), contents(4, 2)
    slab.write_pages(np.array([7, 0, 3], np.int32), first)
    slab.write_pages(np.array([1, 9, 2, 8], np.int32), second)

    assert torch.equal(slab.read_pages(np.array([0, 7, 3], np.int32)), first[[1, 0, 2]])
    assert torch.equal(slab.read_pages(np.array([8, 1], np.int32)), second[[3, 0]])
    assert slab.device == CPU


@pytest.mark.parametrize("row_vectors", [3, 6])
def test_rows_are_read_out_of_scattered_pages(row_vectors: int) -> None:
    """Rows lie across pages: 16 vectors are no whole number of rows."""
    slab = Slab(PAGE, 20, CPU, option="--impress-host-gb", pin=False)
    pages = np.array([[11, 2, 17, 0, 9, 5], [3, 19, 1, 8, 4, 12]], np.int32)[:, :row_vectors]
    data = [contents(row_vectors, seed) for seed in (1, 2)]
    for own, chunk in zip(pages, data, strict=True):
        slab.write_pages(own, chunk)
    rows = [chunk.view(16, row_vectors * 4) for chunk in data]
    wanted = [(0, 0), (1, 15), (0, 7), (0, 6), (1, 0), (0, 7)]

    found = slab.read_rows(
        np.array([pages[chunk] for chunk, _ in wanted]),
        np.array([offset for _, offset in wanted]),
        row_vectors,
    )

    assert torch.equal(found, torch.stack([rows[chunk][offset] for chunk, offset in wanted]))


def test_columns_after_the_pages_of_a_chunk_do_not_matter() -> None:
    slab = Slab(PAGE, 4, CPU, option="--impress-host-gb", pin=False)
    data = contents(1)
    slab.write_pages(np.array([2], np.int32), data)

    found = slab.read_rows(np.array([[2, -99, 12345]], np.int32), np.array([4]), 3)

    assert torch.equal(found, data.view(-1)[4 * 12 : 5 * 12][None])


def test_reading_nothing_gives_nothing() -> None:
    slab = Slab(PAGE, 0, CPU, option="--impress-host-gb", pin=False)

    assert slab.read_pages(np.empty(0, np.int32)).shape == (0, 64)


def test_memory_that_is_not_there_is_a_config_error_that_names_size_and_option() -> None:
    num_pages = (1 << 50) // PAGE.page_bytes

    with pytest.raises(ConfigError, match=r"1125899\.9 GB.*--impress-host-gb"):
        Slab(PAGE, num_pages, CPU, option="--impress-host-gb", pin=False)


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
