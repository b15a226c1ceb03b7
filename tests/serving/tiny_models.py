"""Tiny models with random weights, one per architecture family, and prompts for them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

VOCAB = 1000
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 8192,
}
_GROUPED: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    # Wide enough that greedy choices are not near ties.
    "initializer_range": 0.15,
}
FAMILIES = ("llama", "opt", "qwen2", "qwen3")


def make_model(family: str, folder: Path, **overrides: Any) -> Path:
    """Save a model of a family with fixed random weights; returns its folder."""
    import torch
    import transformers

    torch.manual_seed(5)
    if family == "llama":
        config = transformers.LlamaConfig(**{**_GROUPED, **overrides})
    elif family == "qwen2":
        config = transformers.Qwen2Config(**{**_GROUPED, **overrides})
    elif family == "qwen3":
        config = transformers.Qwen3Config(**{**_GROUPED, "head_dim": 16, **overrides})
    else:
        config = transformers.OPTConfig(
            **_COMMON,
            hidden_size=128,
            word_embed_proj_dim=128,
            ffn_dim=256,
            num_hidden_layers=3,
            num_attention_heads=8,
            init_std=0.15,
            **overrides,
        )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def random_tokens(length: int, seed: int) -> list[int]:
    """Token ids without special tokens."""
    return random.Random(seed).choices(range(3, VOCAB), k=length)
