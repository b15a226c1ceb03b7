"""Pages of rows: where each row is, and how little padding there is."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.codes.rows.pages import (
    MOST_PAGE_TOKENS,
    PADDING_SHARE,
    PAGE_GRAIN,
    RowPages,
    page_tokens_for,
)

BLOCK = 64


@given(st.integers(1, 400), st.integers(5, 90), st.integers(1, 9))
def test_rows_stand_in_pages_one_after_another(tokens: int, size: int, page: int) -> None:
    pages = RowPages(tokens, size, page, BLOCK)
    rows = torch.randint(1, 256, (tokens, size)).byte()
    memory = torch.empty(pages.layer_bytes, dtype=torch.uint8)
    memory.zero_()
    pages.put_groups(rows, memory)
    assert torch.equal(pages.groups_in(memory)[:tokens], rows)
    assert not pages.page_bytes % BLOCK and not pages.layer_bytes % BLOCK
    assert pages.page_bytes - page * size < BLOCK
    for row in range(tokens):
        at = pages.group_offset(row)
        assert at // pages.page_bytes == row // page < pages.num_pages
        assert torch.equal(memory[at : at + size], rows[row])
        memory[at : at + size] = 0
    assert not memory.any(), "between them are zeros"


@given(st.lists(st.integers(5, 3000), min_size=1, max_size=40))
def test_pages_are_the_shortest_with_little_padding(sizes: list[int]) -> None:
    def padding(tokens: int) -> float:
        whole = sum(RowPages(tokens, own, tokens, 4096).page_bytes for own in sizes)
        return 1 - tokens * sum(sizes) / whole

    found = page_tokens_for(tuple(sizes), 4096)
    assert PAGE_GRAIN <= found <= MOST_PAGE_TOKENS and not found % PAGE_GRAIN
    assert found == MOST_PAGE_TOKENS or padding(found) <= PADDING_SHARE
    assert all(padding(shorter) > PADDING_SHARE for shorter in range(PAGE_GRAIN, found, PAGE_GRAIN))
