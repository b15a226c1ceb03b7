"""A server of Qwen3-Next on a CPU: what SGLang has in Triton alone, in torch.

Its layers are dense, as experts need kernels that a CPU has not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.arg_groups import mamba_hook
from sglang.srt.layers.attention import hybrid_linear_attn_backend
from sglang.srt.layers.attention.linear import gdn_backend
from sglang.srt.layers.attention.linear.kernels import gdn_triton
from sglang.srt.models import qwen3_next
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

# Else the last inputs of convolutions are rounded where a pass ends.
os.environ["SGLANG_MAMBA_CONV_DTYPE"] = "float32"
# Tokens between the states that a pass gives.
CHUNK = 64


def _spans(starts: Tensor) -> Iterator[slice]:
    ends = starts.tolist()
    return map(slice, ends, ends[1:])


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, conv_states: Tensor, **how: Any
) -> Tensor:
    """[dimensions, tokens] of several requests, whose states are the last inputs."""
    out = torch.empty_like(x)
    width = weight.shape[1] - 1
    rows = zip(how["cache_indices"].tolist(), how["has_initial_state"].tolist(), strict=True)
    for span, (slot, known) in zip(_spans(how["query_start_loc"]), rows, strict=True):
        before = conv_states[slot] if known else torch.zeros_like(conv_states[slot])
        whole = torch.cat([before, x[:, span]], 1)
        summed = F.conv1d(whole[None], weight[:, None], bias, groups=len(weight))[0]
        out[:, span] = F.silu(summed)
        conv_states[slot] = whole[:, -width:]
    return out


def convolve_next(
    x: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None, _: str, **how: Any
) -> Tensor:
    """[requests, dimensions]: one token of each."""
    slots = how["conv_state_indices"].long()
    whole = torch.cat([states[slots], x[..., None]], 2)
    states[slots] = whole[..., 1:].to(states.dtype)
    out = (whole * weight).sum(-1)
    return F.silu(out if bias is None else out + bias)


def gates(a_log: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms of decays, and shares of what is new, [1, tokens, heads]."""
    decay = -a_log.float().exp() * F.softplus(a.float() + bias)
    return decay[None], b.float().sigmoid()[None]


def _apply(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, share: Tensor) -> Tensor:
    """Tokens [tokens, heads, ...] after `state` [heads, values, keys], which changes."""
    ratio = v.shape[1] // k.shape[1]
    rows = (x[None] for x in (q.repeat_interleave(ratio, 1), k.repeat_interleave(ratio, 1), v))
    how = {"initial_state": state.mT[None], "output_final_state": True}
    out, new = torch_chunk_gated_delta_rule(
        *rows, decay[None], share[None], use_qk_l2norm_in_kernel=True, **how
    )
    state.copy_(new[0].mT)
    return out[0]  # type: ignore[no-any-return]


def extend(*, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **how: Any) -> Any:
    """[1, tokens, heads, dimensions] of several requests."""
    out, states, kept = torch.empty_like(v), how["initial_state"], []
    slots = how["initial_state_indices"].tolist()
    for span, slot in zip(_spans(how["cu_seqlens"]), slots, strict=True):
        for first in range(span.start, span.stop, CHUNK):
            kept.append(states[slot].clone())
            part = slice(first, min(first + CHUNK, span.stop))
            out[0, part] = _apply(states[slot], *(x[0, part] for x in (q, k, v, g, beta)))
    return out, None, torch.stack(kept)[None]


def decode(*, mixed_qkv: Tensor, a: Tensor, b: Tensor, out: Tensor, **how: Any) -> None:
    """One token of each request, [requests, dimensions]."""
    decays, shares = gates(how["A_log"], a, b, how["dt_bias"])
    heads, dim, width = how["initial_state"].shape[1:]
    size = (mixed_qkv.shape[1] - heads * dim) // 2
    for row, slot in enumerate(how["ssm_state_indices"].tolist()):
        q, k, v = mixed_qkv[row : row + 1].split([size, size, heads * dim], 1)
        both = q.view(1, -1, width), k.view(1, -1, width), v.view(1, heads, dim)
        gated = decays[0, row : row + 1], shares[0, row : row + 1]
        out[row] = _apply(how["initial_state"][slot], *both, *gated)


def keep(
    convs: Tensor, states: Tensor, slots: Tensor, mask: Tensor, kept: Tensor, _: int, **__: Any
) -> None:
    """Copy states of requests where a prefix may end."""
    for pool in (convs, states):
        pool[kept[mask].long()] = pool[slots[mask].long()]


def split(
    qkvz: Tensor, ba: Tensor, heads: int, v_heads: int, dim: int, v_dim: int
) -> tuple[Tensor, ...]:
    """The parts of projections [tokens, ...], whose rows have one head after the other."""
    each = v_heads // heads
    sizes = [dim, dim, each * v_dim, each * v_dim]
    q, k, v, z = qkvz.unflatten(1, (heads, -1)).split(sizes, 2)
    b, a = (x.reshape(-1, v_heads) for x in ba.unflatten(1, (heads, -1)).split(each, 2))
    mixed = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    return mixed, z.reshape(-1, v_heads, v_dim), b, a


class Dense(qwen3_next.Qwen2MoeMLP):  # type: ignore[misc]
    """Instead of experts."""

    num_fused_shared_experts = 0

    def __init__(self, *, config: Any, prefix: str, **_: Any) -> None:
        sizes = config.hidden_size, config.intermediate_size
        super().__init__(*sizes, config.hidden_act, None, prefix=prefix, reduce_results=False)

    def forward(self, x: Tensor, forward_batch: Any = None) -> Any:
        return super().forward(x)


class Norm(torch.nn.Module):
    """The norm of a layer's output, with a gate."""

    def __init__(self, size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) * F.silu(gate)


mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
hybrid_linear_attn_backend.track_mamba_states_if_needed = keep
gdn_backend.causal_conv1d_fn = convolve
gdn_backend.causal_conv1d_update = convolve_next
gdn_backend.fused_gdn_gating = gates
gdn_triton.chunk_gated_delta_rule = extend
gdn_triton.fused_recurrent_gated_delta_rule_packed_decode = decode
qwen3_next.Qwen2MoeSparseMoeBlock = Dense
qwen3_next.fused_qkvzba_split_reshape_cat = split
qwen3_next.RMSNormGated = qwen3_next.FusedRMSNormGated = Norm
# A build for GPUs takes the first of them for the place of norms.
torch.get_device_module = lambda *_: torch.cpu
MambaAttnBackendBase = hybrid_linear_attn_backend.MambaAttnBackendBase
MambaAttnBackendBase._track_pools = lambda _: None
torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
