"""IMPRESS on SGLang's torch_native backend, which reads the rows of requests one by one."""

from __future__ import annotations

import time
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

from impress_sglang.paper.plugin.attention import PrefixAttention
from impress_sglang.plugin.rectangular import rectangular_attention


class ImpressTorchNativeBackend(PrefixAttention, TorchNativeAttnBackend):
    """torch_native with rectangular attention, over each row from its start on.

    It attends for one request after the other, so the time of each is recorded here.
    """

    times_each = True

    def _run_sdpa_forward_extend(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        extend_prefix_lens: Tensor,
        extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> Tensor:
        """Attend, for each request's new tokens, over its row from the row's start on."""
        assert encoder_lens is None and not is_cross_attn
        starts = self._starts.on_device[req_pool_indices].tolist()
        requests = {row.index: row.request for row in self._rows}
        lengths = zip(
            req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True
        )
        first = 0
        for index, (row, kv_len, new_len) in enumerate(lengths):
            began = time.perf_counter()
            request = requests.get(index)
            slots = req_to_token[row, starts[index] : kv_len]
            output[first : first + new_len] = rectangular_attention(
                query[first : first + new_len],
                k_cache[slots],
                v_cache[slots],
                scaling=scaling,
                causal=causal,
                window=sliding_window_size,
            )
            if request is not None:
                request.stats.attention_ms += (time.perf_counter() - began) * 1e3
            first += new_len
        return output

    def _run_sdpa_forward_decode(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Attend for a decode step, as an extend of each row by one token that sees all of it."""
        one = torch.ones_like(seq_lens)
        return self._run_sdpa_forward_extend(
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            seq_lens - one,
            one,
            encoder_lens,
            **{**options, "causal": True},
        )
