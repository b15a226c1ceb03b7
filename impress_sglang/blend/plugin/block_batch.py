"""A batch of one request by itself, for blocks that we have the model compute."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from torch import Tensor


def block_batch(token_ids: Tensor, start: int) -> ForwardBatch:
    """Make a batch of one request that extends by `token_ids`, int64 [n], at position `start`.

    It has nothing of the running batch, which belongs to other tokens.
    """
    device, length = token_ids.device, len(token_ids)
    end = start + length
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=token_ids,
        positions=torch.arange(start, end, device=device),
        req_pool_indices=torch.zeros(1, dtype=torch.int64, device=device),
        seq_lens=torch.tensor([end], device=device),
        seq_lens_cpu=torch.tensor([end]),
        seq_lens_sum=end,
        # We write to the pool ourselves, but some models write keys and values before they attend:
        # these go to slot 0, which belongs to no request.
        out_cache_loc=torch.zeros(length, dtype=torch.int64, device=device),
        out_cache_loc_is_physical=True,
        extend_num_tokens=length,
        extend_seq_lens=torch.tensor([length], dtype=torch.int32, device=device),
        extend_seq_lens_cpu=[length],
        extend_prefix_lens=torch.tensor([start], dtype=torch.int32, device=device),
        extend_prefix_lens_cpu=[start],
        extend_start_loc=torch.zeros(1, dtype=torch.int32, device=device),
        global_num_token_non_padded_cpu=length,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
