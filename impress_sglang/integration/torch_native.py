"""IMPRESS on SGLang's torch_native backend, which reads each request's row by itself."""

from __future__ import annotations

import time

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

from impress_sglang.attention.rectangular import rectangular_attention
from impress_sglang.integration.attention import PrefixAttention
from impress_sglang.timeline import ATTENTION, NO_TIMELINE


class ImpressTorchNativeBackend(PrefixAttention, TorchNativeAttnBackend):
    """torch_native with rectangular attention, over each row from its start on.

    It attends for one request after the other, so that each one's time is noted here.
    """

    offset_rows = True
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
        assert encoder_lens is None and not is_cross_attn
        return self._attend_rows(
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            extend_seq_lens.tolist(),
            scaling,
            causal,
            sliding_window_size,
        )

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
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> Tensor:
        assert encoder_lens is None and not is_cross_attn
        # A decode step extends each row by one token, which sees all of it.
        return self._attend_rows(
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            [1] * len(seq_lens),
            scaling,
            True,
            sliding_window_size,
        )

    def _attend_rows(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        new_lens: list[int],
        scaling: float | None,
        causal: bool,
        window: int | None,
    ) -> Tensor:
        """Attention of each request's last new tokens over its row, from the row's start on."""
        starts = self._starts.on_device[req_pool_indices].tolist()
        requests = {row.index: row.request for row in self._rows}
        first = 0
        for index, (row, kv_len, new_len) in enumerate(
            zip(req_pool_indices.tolist(), seq_lens.tolist(), new_lens, strict=True)
        ):
            began = time.perf_counter()
            request = requests.get(index)
            timeline = NO_TIMELINE if request is None else request.timeline
            slots = req_to_token[row, starts[index] : kv_len]
            with timeline.span(ATTENTION, self._layer):
                output[first : first + new_len] = rectangular_attention(
                    query[first : first + new_len],
                    k_cache[slots],
                    v_cache[slots],
                    scaling=scaling,
                    causal=causal,
                    window=window,
                )
            if request is not None:
                request.stats.attention_ms += (time.perf_counter() - began) * 1e3
            first += new_len
        return output
