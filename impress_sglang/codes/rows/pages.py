"""Where the rows of a layer are on disk; no I/O.

A row is the codes of a token in a layer. Rows stand one after another in pages, which begin at a
block of the drive; the last page has the remaining rows. Pages of all layers hold as many tokens,
though rows of one layer may be longer than those of another.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from impress_sglang.codes.pages import Pages

# Pages have so many tokens, or a multiple.
PAGE_GRAIN = 64
MOST_PAGE_TOKENS = 1024
# At most this share of whole pages is padding, unless they have the most tokens.
PADDING_SHARE = 1 / 64


@dataclasses.dataclass(frozen=True)
class RowPages(Pages):
    """Sizes, in bytes, of the rows of one layer of `num_tokens` tokens."""

    num_tokens: int
    row_bytes: int
    page_tokens: int
    block_bytes: int

    group_tokens = 1
    total_units = 0
    planes_bytes = 0

    @property
    def num_groups(self) -> int:
        """Number of rows."""
        return self.num_tokens

    @property
    def group_bytes(self) -> int:
        """Bytes of what is restored at once: a row."""
        return self.row_bytes

    @property
    def page_groups(self) -> int:
        """Rows of a page."""
        return self.page_tokens

    @property
    def layer_bytes(self) -> int:
        """Bytes of all pages."""
        return self.base_bytes


@functools.lru_cache(maxsize=16)
def page_tokens_for(rows: Sequence[int], block_bytes: int) -> int:
    """Tokens of a page, given the bytes of a row in each layer: the fewest with little padding."""
    for tokens in range(PAGE_GRAIN, MOST_PAGE_TOKENS, PAGE_GRAIN):
        pages = [RowPages(tokens, own, tokens, block_bytes).page_bytes for own in rows]
        if sum(pages) - tokens * sum(rows) <= PADDING_SHARE * sum(pages):
            return tokens
    return MOST_PAGE_TOKENS
