"""Attention of a Hugging Face causal LM, open to experiments, without a server.

    lab = AttentionLab.load(folder)
    prefix = lab.prefix(prefix_ids)
    logits = lab.logits(question_ids, prefix.num_tokens, attend)

The model runs in float32 on the CPU, one sequence at a time and without a cache of its own. Each
layer's attention is a function `attend(layer, queries, keys, values, scaling)`; tensors have the
layout of `impress_sglang`: token, head, dim, with keys and queries after rotation. Any decoder-only
model of transformers will do whose attention goes through `AttentionInterface` and is a plain
softmax over all earlier tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM

from bench.core.session import BenchFailed

# (layer, queries [n, Hq, D], keys [n, G, D], values [n, G, Dv], scaling) -> [n, Hq, Dv].
Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]

IMPLEMENTATION = "attention_lab"
# What some models pass to their attention that a plain softmax leaves out.
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixKV:
    """Keys and values of a prefix of `num_tokens`, per layer: float32 [m, G, D] and [m, G, Dv]."""

    num_tokens: int
    keys: list[Tensor]
    values: list[Tensor]


class AttentionLab:
    """A causal LM whose attention is given with each run."""

    def __init__(self, model: Any) -> None:
        """Take over a transformers model.

        Raises:
            BenchFailed: its attention cannot be replaced.
        """
        config = model.config.get_text_config()
        try:
            model.set_attn_implementation(IMPLEMENTATION)
        except ValueError as error:
            raise BenchFailed(f"{config.model_type}: {error}") from error
        self._model = model.eval()
        self.num_layers: int = config.num_hidden_layers
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.group_size: int = config.num_attention_heads // kv_heads
        """Query heads that share a KV head."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load a model's folder in float32.

        Raises:
            BenchFailed: it cannot be loaded, or see `AttentionLab`.
        """
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise BenchFailed(f"{folder}: no model that can be loaded: {error}") from error
        return cls(model)

    def logits(self, token_ids: Sequence[int], first_position: int, attend: Attend) -> Tensor:
        """Logits after each of some tokens, float32 [n, vocabulary].

        This takes 4 bytes times the vocabulary per token: use it for short inputs.
        """
        logits: Tensor = self._run(self._model, token_ids, first_position, attend).logits[0]
        return logits

    def prefix(self, token_ids: Sequence[int]) -> PrefixKV:
        """Compute the keys and values of a prefix in full.

        Raises:
            BenchFailed: the model does not use the attention of the lab in every layer.
        """
        rows: dict[int, tuple[Tensor, Tensor]] = {}

        def keep(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
            rows[layer] = k.contiguous(), v.contiguous()
            return attention_after(k[:0], v[:0], q, k, v, scaling)

        self._run(self._model.base_model, token_ids, 0, keep)
        if sorted(rows) != list(range(self.num_layers)):
            raise BenchFailed(
                f"{len(rows)} of {self.num_layers} layers use transformers' AttentionInterface; "
                "only models where all do can be measured"
            )
        keys, values = zip(*(rows[layer] for layer in range(self.num_layers)), strict=True)
        return PrefixKV(len(token_ids), list(keys), list(values))

    def _run(
        self, module: Any, token_ids: Sequence[int], first_position: int, attend: Attend
    ) -> Any:
        positions = torch.arange(first_position, first_position + len(token_ids))[None]
        _attending.append(attend)
        try:
            with torch.no_grad():
                return module(
                    input_ids=torch.tensor([list(token_ids)]),
                    position_ids=positions,
                    use_cache=False,
                )
        finally:
            _attending.pop()


def attention_after(
    prefix_keys: Tensor,
    prefix_values: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
) -> Tensor:
    """Attention of new tokens to rows of a prefix and, causally, to themselves.

    Args:
        prefix_keys: [k, G, D]; a row may be of another token for each head.
        prefix_values: [k, G, Dv].
        queries: [n, Hq, D].
        keys: [n, G, D] of the new tokens.
        values: [n, G, Dv] of the new tokens.
        scaling: factor of the attention logits.

    Returns:
        [n, Hq, Dv].
    """
    num_new, num_old = len(queries), len(prefix_keys)
    visible = torch.ones(num_new, num_old + num_new, dtype=torch.bool).tril(num_old)
    query = queries.transpose(0, 1)[None]
    key = torch.cat([prefix_keys, keys]).transpose(0, 1)[None]
    value = torch.cat([prefix_values, values]).transpose(0, 1)[None]
    output = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, scale=scaling, enable_gqa=True
    )
    return output[0].transpose(0, 1)


# The attention of the run under way is the last one.
_attending: list[Attend] = []


def _forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: [1, heads, n, D] each, to [1, n, heads, D]."""
    given = [name for name in _UNSUPPORTED if arguments.get(name) is not None]
    if attention_mask is not None:
        given.append("attention_mask")
    if given:
        raise BenchFailed(f"the model's attention needs {', '.join(given)}")
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return _attending[-1](module.layer_idx, q, k, v, factor)[None], None


AttentionInterface.register(IMPLEMENTATION, _forward)
