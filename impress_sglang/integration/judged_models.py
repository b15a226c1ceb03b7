"""What is known of models, their attention layers, and SGLang's environment variables, as data.

A model is served if its class is known to attend as IMPRESS assumes: causal attention over all
earlier tokens, one `RadixAttention` per layer with the same heads, and keys that depend only on the
tokens so far and their positions 0, 1, 2, ... A test reads the source of each class.
"""

from __future__ import annotations

from typing import Any


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# From a file of SGLang's `models` to the known classes in it.
ARCHITECTURES_BY_FILE: dict[str, frozenset[str]] = {
    "llama": _words("LlamaForCausalLM Phi3ForCausalLM InternLM3ForCausalLM IQuestCoderForCausalLM"),
    "mistral": _words("MistralForCausalLM"),
    "mixtral": _words("MixtralForCausalLM"),
    "qwen": _words("QWenLMHeadModel"),
    "qwen2": _words("Qwen2ForCausalLM"),
    "qwen2_moe": _words("Qwen2MoeForCausalLM"),
    "qwen3": _words("Qwen3ForCausalLM"),
    "qwen3_moe": _words("Qwen3MoeForCausalLM"),
    "opt": _words("OPTForCausalLM"),
    "gpt2": _words("GPT2LMHeadModel"),
    "gpt_bigcode": _words("GPTBigCodeForCausalLM"),
    "gpt_j": _words("GPTJForCausalLM"),
    "gemma": _words("GemmaForCausalLM"),
    "glm4": _words("Glm4ForCausalLM"),
    "internlm2": _words("InternLM2ForCausalLM"),
    "exaone": _words("ExaoneForCausalLM"),
    "arcee": _words("ArceeForCausalLM"),
    "apertus": _words("ApertusForCausalLM"),
    "olmo": _words("OlmoForCausalLM"),
    "olmoe": _words("OlmoeForCausalLM"),
    "phi": _words("PhiForCausalLM"),
    "stablelm": _words("StableLmForCausalLM"),
    "starcoder2": _words("Starcoder2ForCausalLM"),
    "dbrx": _words("DbrxForCausalLM"),
    "mimo": _words("MiMoForCausalLM"),
    "teleflm": _words("TeleFLMForCausalLM"),
}
ARCHITECTURES = frozenset().union(*ARCHITECTURES_BY_FILE.values())

# Classes that can be run layer by layer, with fewer rows from layer to layer: `blend_steps.py`.
BLENDED = _words("LlamaForCausalLM MistralForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM")

LAYER_TYPES = _words("full_attention attention")
# RoPE whose angles depend on the position alone. `longrope` chooses by the longest request of a
# batch, `mrope` counts media.
ROPE_TYPES = _words("default linear dynamic yarn llama3")
ROPE_UNSET = _words("mrope_section")

# Fields of a Hugging Face configuration that mean other attention than full causal attention.
CONFIG_UNSET = _words("""
    attention_chunk_size dual_chunk_attention_config attn_logit_softcapping num_kv_shared_layers
    cross_attention_layers add_cross_attention alibi use_alibi
""")
# The same for SGLang's `ModelConfig`, which knows more.
MODEL_UNSET = _words("""
    attention_chunk_size has_attention_sinks is_local_attention_model model_is_mrope
    is_hybrid_swa_compress use_ngram_embedding use_engram pointer_head decision_config
    joint_head_config
""")

# Attributes of `RadixAttention` with the only value that is known to be right.
LAYER_VALUES: dict[str, Any] = {
    "attn_type": "decoder",
    "sliding_window_size": -1,
    "is_cross_attention": False,
    "use_irope": False,
    "logit_cap": 0.0,
    "xai_temperature_len": -1,
    "pos_encoding_mode": "NONE",
}
# Attributes that are compared with the pool, or used as they are.
LAYER_COMPARED = _words("""
    layer_id tp_q_head_num tp_k_head_num tp_v_head_num head_dim qk_head_dim v_head_dim
""")
# Only read where the pool's dtype is not the model's, which is refused.
LAYER_SCALES = _words("""
    k_scale v_scale k_scale_float v_scale_float q_scale_float idx_q_scale_float idx_k_scale_float
    idx_v_scale_float quant_method
""")
LAYER_HARMLESS = _words("scaling logit_capping_method use_prefill_attention_wrapper")
LAYER_ATTRIBUTES = LAYER_VALUES.keys() | LAYER_COMPARED | LAYER_SCALES | LAYER_HARMLESS
# From parameters of the constructor to the attributes that they become.
LAYER_PARAMETERS: dict[str, str] = {
    "num_heads": "tp_q_head_num",
    "num_kv_heads": "tp_k_head_num",
    "quant_config": "quant_method",
    "prefix": "quant_method",
}

# Variables that change the layout of KVs or bypass hooks, with the value that is known to be right.
ENVIRONMENT: dict[str, tuple[object, str]] = {
    "SGLANG_ENABLE_METADATA_GLUE_GRAPH": (
        False,
        "IMPRESS prepares each decode step outside of CUDA graphs",
    ),
    "SGLANG_USE_HND_KVCACHE": (False, "IMPRESS writes KVs token by token"),
    "SGLANG_AITER_KV_CACHE_LAYOUT": ("nhd", "IMPRESS writes KVs token by token"),
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": (False, "IMPRESS needs a KV pool that does not grow"),
    "SGLANG_EXTERNAL_MODEL_PACKAGE": ("", "IMPRESS knows the attention of SGLang's own models"),
    "SGLANG_USE_BREAKABLE_CUDA_GRAPH": (False, "IMPRESS loads prefixes in eager passes"),
    "SGLANG_USE_SAGE_ATTENTION_IMPL": ("", "IMPRESS needs keys as they were computed"),
    "SGLANG_USE_AITER_UNIFIED_ATTN": (False, "IMPRESS does not know this attention"),
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": (
        False,
        "IMPRESS does not promise the same bits however a prefix comes back",
    ),
    "SGLANG_RUST_SERVER": (False, "IMPRESS checks requests in the Python server"),
}
# Variables that change KVs, and are part of the model identity.
ENVIRONMENT_IDENTITY = _words("SGLANG_ROPE_CACHE_FP32 SGLANG_NVFP4_CKPT_FP8_GEMM_IN_ATTN")
# Change only how the same result is computed, or concern models and hardware that are refused.
ENVIRONMENT_HARMLESS = _words("""
    SGLANG_USE_ATTN_TP_NGRAM SGLANG_ENABLE_METRICS_DP_ATTENTION SGLANG_NATIVE_MOVE_KV_CACHE
    USE_ROCM_AITER_ROPE_BACKEND SGLANG_OPT_USE_FUSED_QK_NORM_ROPE
    SGLANG_OPT_FUSED_QK_NORM_ROPE_VERIFY SGLANG_MLX_USE_CUSTOM_ROPE
    SGLANG_NPU_USE_SCATTER_PA_KV_CACHE SGLANG_NPU_USE_TRITON_PREFIX_KV_CACHE_STORE
    SGLANG_NPU_ATTN_BACKEND_NEEDS_CPU_SEQ_LENS SGLANG_TRITON_DECODE_ATTN_STATIC_KV_SPLITS
    SGLANG_DISABLE_LEAN_ATTENTION SGLANG_TRITON_COMPACT_EXTEND_ATTENTION
    SGLANG_TRITON_FP8_PREFILL_ATTN SGLANG_TRITON_DENSE_PREFILL_ATTN
    SGLANG_DETERMINISTIC_NCCL_NCHANNELS SGLANG_ROPE_CACHE_SAFETY_MARGIN SGLANG_ROPE_CACHE_ALIGN
    SGLANG_OPT_FP8_WO_A_FUSED_INVROPE SGLANG_OPT_DSV41_TARGET_VERIFY_METADATA_GLUE
    SGLANG_OPT_SKIP_GLUED_REPLAY_VIEW SGLANG_OPT_USE_INKLING_FUSED_ATTN_PROLOGUE
    SGLANG_DSA_TOPK_FLASHINFER_DETERMINISTIC SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD
    SGLANG_DISABLE_M3_FP8_ATTN_GEMM SGLANG_MINIMAX_NPU_NATIVE_ATTN SGLANG_K3_SP_ATTN_RES
""")
