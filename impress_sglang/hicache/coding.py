"""Pages of keys and values in few bits, by the codes that any model has (`codes.groups`).

HiCache does not say which page begins a sequence, nor what queries look at: the first tokens of
each page, which may be attention sinks, are kept as they are, and all channels count alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from impress_sglang.codes.groups.codec import DIM_GRAIN, GROUP_TOKENS, GroupLayout, encode_layer
from impress_sglang.codes.groups.slots import restore
from impress_sglang.codes.rows.fit import SINK_TOKENS
from impress_sglang.errors import UnsupportedError
from impress_sglang.threads import compute_alone


class PageCodec:
    """Codes of pages [2, L, T, H, D], keys and values of 16 or 32 bits."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, rate: int) -> None:
        """`shape` of a page; `rate`: bits per element. Raises `UnsupportedError` without codes."""
        _, layers, tokens, heads, dim = shape
        floats = (torch.float32, torch.bfloat16, torch.float16)
        if tokens % GROUP_TOKENS or dim % DIM_GRAIN or dtype not in floats:
            raise UnsupportedError(
                f"pages have few bits where they have a multiple of {GROUP_TOKENS} tokens "
                f"(--page-size), heads of a multiple of {DIM_GRAIN} and 16 or 32 bits: drop bits"
            )
        self._shape, self._dtype = shape, dtype
        self._layout = GroupLayout(heads, dim, dim, rate)
        self._code_bytes = layers * tokens // GROUP_TOKENS * self._layout.group_bytes

    def encode(self, page: Tensor) -> Tensor:
        """The bytes of a page; `NotCodable` if no range holds its keys or values."""
        # On a thread of HiCache's, beside the model.
        compute_alone()
        keys, values = page.flatten(1, 2)
        codes = encode_layer(self._layout, keys, values)
        first = page[:, :, :SINK_TOKENS].contiguous().view(-1).view(torch.uint8)
        return torch.cat([codes.flatten(), first])

    def decode(self, content: Tensor) -> Tensor:
        """The page that bytes stand for."""
        codes, first = content[: self._code_bytes], content[self._code_bytes :].clone()
        page = torch.empty(self._shape, dtype=self._dtype)
        keys, values = page.flatten(1, 2)
        groups, rows = codes.view(-1, self._layout.group_bytes), torch.arange(len(keys))
        restore(self._layout, groups, 0, rows, keys, values)
        sinks = page[:, :, :SINK_TOKENS]
        sinks.copy_(first.view(self._dtype).view(sinks.shape))
        return page
