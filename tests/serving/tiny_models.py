"""Tiny models with random weights, one per architecture family, and prompts for them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB = 1000
# The last ones of a vocabulary.
_MEDIA_TOKENS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
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
_LEARNED: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 128,
    "word_embed_proj_dim": 128,
    "ffn_dim": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "init_std": 0.15,
}
# Of 64 and 16 elements, and dense: experts need kernels that a CPU has not.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 4,
    "moe_layer_freq": 1,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    # Others are refused on a CPU.
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
WINDOW = 64
_KINDS = ["sliding_attention", "full_attention"] * 2
_WINDOWS: dict[str, Any] = {
    "num_hidden_layers": len(_KINDS),
    "sliding_window": WINDOW,
    "layer_types": _KINDS,
}
# SGLang keeps windows in a pool of their own where a configuration says so.
_OWN_POOL: dict[str, Any] = {
    "head_dim": 16,
    "logit_scale": 1.0,
    "is_hybrid_swa": True,
    "hybrid_layer_pattern": [int("sliding" in kind) for kind in _KINDS],
}
# Each second layer has a state.
_STATES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mlp_only_layers": [0, 1, 2, 3],
    "num_experts": 2,
    "num_experts_per_tok": 1,
}
# Three positions of each token turn 2, 3 and 3 pairs of its elements.
_MEDIA: dict[str, Any] = {
    "text_config": {
        **_GROUPED,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    },
    "vision_config": {
        "depth": 1,
        "embed_dim": 32,
        "hidden_size": 128,
        "num_heads": 2,
        "in_chans": 3,
    },
    **{name: VOCAB - 4 + k for k, name in enumerate(_MEDIA_TOKENS)},
}


# The library's class of a family's configuration, and what it is made of.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _GROUPED),
    "qwen2": ("Qwen2", _GROUPED),
    "qwen3": ("Qwen3", {**_GROUPED, "head_dim": 16}),
    "opt": ("OPT", _LEARNED),
    "deepseek_v2": ("DeepseekV2", {**_GROUPED, **_LATENT}),
    "cohere2": ("Cohere2", {**_GROUPED, **_WINDOWS, **_OWN_POOL}),
    "gemma3": ("Gemma3Text", {**_GROUPED, **_WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 16}),
    "olmo3": ("Olmo3", {**_GROUPED, **_WINDOWS}),
    "qwen3_next": ("Qwen3Next", {**_GROUPED, **_STATES}),
    "qwen2_vl": ("Qwen2VL", _MEDIA),
}
# What SGLang finds in the file of a configuration, and the library does not write.
_ALSO: dict[str, dict[str, Any]] = {
    # SGLang has one class for both.
    "olmo3": {"architectures": ["Olmo2ForCausalLM"]},
    # The library has the kinds of layers instead.
    "qwen3_next": {"full_attention_interval": 2},
}


def make_model(family: str, folder: Path, **overrides: Any) -> Path:
    """Save a model of a family with fixed random weights; returns its folder."""
    import transformers

    torch.manual_seed(5)
    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**options, **overrides})
    auto = "AutoModelForImageTextToText" if family == "qwen2_vl" else "AutoModelForCausalLM"
    model = getattr(transformers, auto).from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | _ALSO.get(family, {})))
    return folder


def _verifying(folder: Path, family: str = "llama") -> tuple[Path, Any]:
    """A model of one layer, saved and as an object.

    All embeddings have the same norm. Attention counts less than in others, so that few bits change
    about as many tokens as of a real model, 1 of 100. Else it is 8, which no draft foresees.
    """
    import transformers

    model = make_model(family, folder / "target", num_hidden_layers=1, rms_norm_eps=1e-12)
    target = transformers.AutoModelForCausalLM.from_pretrained(model)
    embeddings = target.model.embed_tokens.weight.data
    # That of padding, which may be drafted, has no norm.
    embeddings[0] = 1.0
    embeddings /= embeddings.square().mean(1, keepdim=True).sqrt()
    target.model.layers[0].self_attn.o_proj.weight.data /= 16
    target.save_pretrained(model)
    return model, target


def make_draft(folder: Path) -> tuple[Path, Path]:
    """A Llama of one layer, and one with twice its KV heads, each of which is there twice.

    The answers are the same, and KVs have another shape.
    """
    import transformers

    model, target = _verifying(folder)
    config, weights, draft = target.config, target.state_dict(), folder / "draft"
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            heads = weight.view(config.num_key_value_heads, -1, weight.shape[1])
            weights[name] = heads.repeat_interleave(2, 0).flatten(0, 1)
    config.num_key_value_heads *= 2
    twice = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    twice.load_state_dict(weights)
    twice.save_pretrained(draft)
    return model, draft


def make_basis(model: Path, path: Path, ranks: int = 1) -> Path:
    """Bases of a model, for one rank and for so many."""
    import transformers

    from impress_sglang.cli.calibrate import Prompts, calibrated

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    texts = {str(seed): random_tokens(500, seed=seed) for seed in range(600, 606)}
    for bases in calibrated(Prompts(loaded), texts, sorted({1, ranks})):
        for basis in bases:
            basis.save(path)
    return path


def make_eagle(folder: Path) -> tuple[Path, Path]:
    """A Llama of one layer, and a draft of EAGLE's kind that answers nearly as it does.

    The norm before the layer, which drafts do not have, changes nothing. Of what a draft sees, the
    embedding of the next token counts.
    """
    model, target = _verifying(folder)
    weights = target.state_dict()
    draft, size = folder / "draft", target.config.hidden_size
    target.config.architectures = ["LlamaForCausalLMEagle"]
    target.config.save_pretrained(draft)
    found = {
        name.removeprefix("model."): value.clone()
        for name, value in weights.items()
        if "input_layernorm" not in name and "model.norm" not in name
    }
    found["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
    found["fc.bias"] = torch.zeros(size)
    save_file(found, draft / "model.safetensors")
    return model, draft


def make_eagle3(folder: Path) -> tuple[Path, Path]:
    """A Llama of one layer, and a draft of EAGLE-3's kind whose first token is nearly its own.

    What the layer attends to counts most, so that it does not matter that drafts add it to what the
    model knew one token before.
    """
    import transformers

    model = make_model("llama", folder / "target", num_hidden_layers=1)
    target = transformers.AutoModelForCausalLM.from_pretrained(model)
    weights = target.state_dict()
    weights["model.layers.0.self_attn.o_proj.weight"] *= 20
    target.load_state_dict(weights)
    target.save_pretrained(model)
    found = {
        name.removeprefix("model.").replace("layers.0", "midlayer"): value.clone()
        for name, value in weights.items()
    }
    for name in ("q", "k", "v"):
        name = f"midlayer.self_attn.{name}_proj.weight"
        found[name] = torch.cat([found[name], torch.zeros_like(found[name])], 1)
    config, draft = target.config, folder / "draft"
    config.architectures = ["LlamaForCausalLMEagle3"]
    config.draft_vocab_size = config.vocab_size
    config.eagle_config = {"eagle_aux_hidden_state_layer_ids": [-1]}
    config.save_pretrained(draft)
    save_file(found, draft / "model.safetensors")
    return model, draft


def make_mtp(folder: Path) -> tuple[Path, Path]:
    """A MiMo of one layer that predicts two tokens: its second layer is the first one again."""
    model, target = _verifying(folder, "qwen2")
    target.config.architectures = ["MiMoForCausalLM"]
    target.config.save_pretrained(model)
    weights, size = target.state_dict(), target.config.hidden_size
    layer = {name: value for name, value in weights.items() if ".layers.0." in name}
    second = {name.replace("layers", "mtp_layers"): value for name, value in layer.items()}
    begin = "model.mtp_layers.0."
    second[f"{begin}final_layernorm.weight"] = weights["model.norm.weight"]
    for name in ("token", "hidden"):
        second[f"{begin}{name}_layernorm.weight"] = torch.ones(size)
    second[f"{begin}input_proj.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size)], 1)
    found = {name: value.clone() for name, value in (weights | second).items()}
    save_file(found, model / "model.safetensors", {"format": "pt"})
    return model, model


def make_adapter(folder: Path, seed: int) -> Path:
    """An adapter (LoRA) of the attention of the tiny Llama, which changes its answers."""
    generator, weights, sizes = torch.Generator().manual_seed(seed), {}, {"q": 128, "k": 32}
    for layer in range(_GROUPED["num_hidden_layers"]):
        for name, size in (sizes | {"v": 32, "o": 128}).items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj.lora_"
            weights[f"{module}A.weight"] = torch.randn(8, 128, generator=generator) * 0.1
            weights[f"{module}B.weight"] = torch.randn(size, 8, generator=generator) * 0.5
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none"}
    config |= {"target_modules": [f"{name}_proj" for name in "qkvo"], "task_type": "CAUSAL_LM"}
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def random_tokens(length: int, seed: int) -> list[int]:
    """Token ids without special tokens."""
    return random.Random(seed).choices(range(3, VOCAB), k=length)
