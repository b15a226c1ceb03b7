"""Attention of a Hugging Face causal LM, open to experiments, without a server.

    lab = AttentionLab.load(folder, threads=1)
    prefix = compute_prefix(lab, prefix_ids)
    scores = question_scores(lab, prefix, question_ids)  # [L, Hq, m]

The model runs in float32 on the CPU, one sequence at a time and without a cache of its own. Each
layer's attention is a function `attend(layer, queries, keys, values, scaling)`, which `attending`
sets; tensors have the layout of `impress_sglang`: token, head, dim, with keys and queries after
rotation. Any decoder-only model of transformers will do whose attention goes through
`AttentionInterface` and is a plain softmax over all earlier tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from bench.core.servers import BenchFailed
from impress_sglang.importance.scores import column_sums

# (layer, queries [n, Hq, D], keys [n, G, D], values [n, G, Dv], scaling) -> [n, Hq, Dv].
Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]

IMPLEMENTATION = "attention_lab"
# What some models pass to their attention that a plain softmax leaves out.
_UNSUPPORTED_ARGUMENTS = ("sliding_window", "softcap", "s_aux", "position_bias")


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixKV:
    """Keys and values of a prefix, per layer: float32 [m, G, D] and [m, G, Dv]."""

    token_ids: tuple[int, ...]
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def num_tokens(self) -> int:
        """m."""
        return len(self.token_ids)


class AttentionLab:
    """A causal LM whose attention can be replaced."""

    def __init__(self, model: Any) -> None:
        """Take over a transformers model, whose attention from now on is what `attending` sets.

        Raises:
            BenchFailed: its attention is not a plain softmax over all earlier tokens.
        """
        config = model.config.get_text_config()
        refuse_unsupported(config)
        try:
            model.set_attn_implementation(IMPLEMENTATION)
        except ValueError as error:
            raise BenchFailed(f"{config.model_type}: {error}") from error
        self.model = model.eval()
        self.num_layers: int = config.num_hidden_layers
        self.num_query_heads: int = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None)
        self.num_kv_heads: int = kv_heads or self.num_query_heads
        self.max_tokens: int | None = getattr(config, "max_position_embeddings", None)

    @classmethod
    def load(cls, folder: Path, threads: int | None = None) -> Self:
        """Load a model's folder in float32; `threads` of torch, for the whole process.

        Raises:
            BenchFailed: it cannot be loaded, or see `AttentionLab`.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            refuse_unsupported(AutoConfig.from_pretrained(folder).get_text_config())
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise BenchFailed(f"{folder}: no model that can be loaded: {error}") from error
        return cls(model)

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_query_heads // self.num_kv_heads

    def hidden_states(self, token_ids: Sequence[int], first_position: int = 0) -> Tensor:
        """Final hidden states of some tokens, float32 [n, width], by the attention that is set."""
        inputs = self._inputs(token_ids, first_position)
        with torch.no_grad():
            states: Tensor = self.model.base_model(**inputs).last_hidden_state[0]
        return states

    def logits(self, token_ids: Sequence[int], first_position: int = 0) -> Tensor:
        """Logits after each of some tokens, float32 [n, vocabulary], by the attention that is set.

        This takes 4 bytes times the vocabulary per token: use it for short inputs.
        """
        inputs = self._inputs(token_ids, first_position)
        with torch.no_grad():
            logits: Tensor = self.model(**inputs).logits[0]
        return logits

    def _inputs(self, token_ids: Sequence[int], first_position: int) -> dict[str, Any]:
        stop = first_position + len(token_ids)
        if not token_ids:
            raise BenchFailed("there are no tokens to run the model on")
        if self.max_tokens is not None and stop > self.max_tokens:
            raise BenchFailed(f"{stop} tokens are more than the model's {self.max_tokens}")
        return {
            "input_ids": torch.tensor([list(token_ids)]),
            "position_ids": torch.arange(first_position, stop)[None],
            "use_cache": False,
        }


def causal_attention(
    layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float
) -> Tensor:
    """Plain attention of tokens that have nothing before them; what holds unless another is set."""
    del layer
    query, key, value = (t.transpose(0, 1)[None] for t in (queries, keys, values))
    output = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return output[0].transpose(0, 1)


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


_attend: ContextVar[Attend] = ContextVar("attend", default=causal_attention)


@contextlib.contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Within it, all labs attend by `attend`."""
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)


def compute_prefix(lab: AttentionLab, token_ids: Sequence[int]) -> PrefixKV:
    """Compute the keys and values of a prefix in full.

    Raises:
        BenchFailed: the model does not use the attention of the lab in every layer.
    """
    keys: dict[int, Tensor] = {}
    values: dict[int, Tensor] = {}

    def keep(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        keys[layer], values[layer] = k.contiguous(), v.contiguous()
        return causal_attention(layer, q, k, v, scaling)

    with attending(keep):
        lab.hidden_states(token_ids)
    prefix = PrefixKV(tuple(token_ids), _per_layer(lab, keys), _per_layer(lab, values))
    heads = {key.shape[1] for key in prefix.keys}
    if heads != {lab.num_kv_heads}:
        raise BenchFailed(f"layers have {heads} KV heads, the configuration {lab.num_kv_heads}")
    return prefix


def question_scores(lab: AttentionLab, prefix: PrefixKV, question_ids: Sequence[int]) -> Tensor:
    """Importance of each prefix token for a question that attends to all of them.

    Args:
        lab: the model that computed `prefix`.
        prefix: m tokens.
        question_ids: the tokens after them.

    Returns:
        float32 [L, Hq, m]: attention weights, summed over the question's tokens.
    """
    scores: dict[int, Tensor] = {}

    def score(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        old_keys, old_values = prefix.keys[layer], prefix.values[layer]
        scores[layer] = column_sums(q, old_keys, old_keys[:0], k, scaling)
        return attention_after(old_keys, old_values, q, k, v, scaling)

    with attending(score):
        lab.hidden_states(question_ids, prefix.num_tokens)
    return torch.stack(_per_layer(lab, scores))


def refuse_unsupported(config: Any) -> None:
    """Raise for a model whose attention is not a plain softmax over all earlier tokens.

    Raises:
        BenchFailed: the message says what the model has.
    """
    layer_types = getattr(config, "layer_types", None) or ()
    kinds = set(layer_types) - {"full_attention"}
    # Configurations also name windows that they do not use.
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and not layer_types:
        kinds.add("sliding_attention")
    if getattr(config, "kv_lora_rank", None):
        kinds.add("multi-head latent attention")
    if getattr(config, "attention_chunk_size", None):
        kinds.add("chunked_attention")
    if getattr(config, "is_encoder_decoder", False):
        kinds.add("an encoder")
    if kinds:
        raise BenchFailed(
            f"{config.model_type} has {', '.join(sorted(kinds))}; only decoders whose layers all "
            "attend to all earlier tokens can be measured"
        )


def _per_layer(lab: AttentionLab, found: dict[int, Tensor]) -> list[Tensor]:
    if sorted(found) != list(range(lab.num_layers)):
        raise BenchFailed(
            f"{lab.model.config.model_type}: {len(found)} of {lab.num_layers} layers use "
            "transformers' AttentionInterface; only models where all do can be measured"
        )
    return [found[layer] for layer in range(lab.num_layers)]


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
    given = [name for name in _UNSUPPORTED_ARGUMENTS if arguments.get(name) is not None]
    if attention_mask is not None:
        given.append("attention_mask")
    if given:
        raise BenchFailed(f"the model's attention needs {', '.join(given)}")
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    output = _attend.get()(module.layer_idx, q, k, v, factor)
    return output[None], None


AttentionInterface.register(IMPLEMENTATION, _forward)
