"""Refuses unsupported options and models at startup, with one sentence each.

Options and the model's configuration are checked in the main process, before any other process
starts. Options are checked again in the scheduler, where the pool and the attention layers of the
loaded model decide. Unknown options are not refused: `self_test.py` tests whether KVs come back as
they were.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from impress_sglang.config import OFF, ImpressConfig
from impress_sglang.errors import UnsupportedError
from impress_sglang.plugin.pools import EIGHT_BITS, LATENT, full_pool, is_latent, pool_of

# Reasons why options must be off.
_OFF = {
    "finds prefixes through the radix cache": "disable_radix_cache",
    "has its own tiers": "enable_hierarchical_cache enable_hisparse enable_lmcache enable_flexkv "
    "hicache_storage_backend enable_unified_cache_external_linker",
    "drafts and verifies in one process": "decoupled_spec_role",
    "follows one batch at a time": "enable_two_batch_overlap enable_pdmux",
    "writes KVs to slots that do not move": "enable_unified_memory",
    "stores prefixes where they are computed": "enable_pd_role_switch",
    "does not know adapters that draft": "uno_lora_path",
    "checks requests in SGLang's HTTP server": "grpc_mode smg_grpc_mode sidecar enable_http2 "
    "use_ray",
    "does not promise the same bits however a prefix comes back": "enable_deterministic_inference "
    "rl_on_policy_target",
    "loads prefixes for causal attention, not for masks": "enable_mis",
    "keeps KVs and not what was chosen to make them": "enable_return_routed_experts "
    "enable_return_indexer_topk",
    "cannot know what that does to KVs": "forward_hooks debug_tensor_dump_input_file kv_canary",
    "serves models that generate token by token": "is_embedding encoder_only dllm_algorithm "
    "prefill_only_disable_kv_cache",
    "was never tested with that": "enable_torch_compile enable_nvidia_megakernel "
    "enable_amd_monokernel enable_streaming_session enable_session_radix_cache",
}
Rules: TypeAlias = Mapping[str, tuple[str, tuple[object, ...]]]
"""Options by reason, and the values that they may have, the default first."""
_VALUES: Rules = {
    "stores the KVs of draft models that it knows": (
        "speculative_algorithm",
        ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"),
    ),
    "loads prefixes where they are computed, which decode servers do not": (
        "disaggregation_mode",
        ("prefill", "null"),
    ),
    "needs a model and its KVs in one place": ("dcp_size attn_cp_size moe_dp_size dwdp_size", (1,)),
    "stores KVs of 8 to 32 bits, without scales of their own": (
        "kv_cache_dtype",
        ("auto", "bfloat16", "bf16", "float16", "float32", "fp8_e4m3", "fp8_e5m2"),
    ),
    "reports through a single process": ("tokenizer_worker_num detokenizer_worker_num", (1,)),
    "runs on CPUs and CUDA": ("device", ("cuda", "cpu")),
    "knows the attention of SGLang's own models only": ("model_impl", ("auto", "sglang")),
    "is a radix cache backend itself": ("radix_cache_backend", ("impress",)),
}
_IS_OFF: tuple[object, ...] = (None, False, 0, "", "none", "null", "off", [], {})
# For features that depend on the identity of the weights.
_WEIGHTS_SEEN: Rules = {
    "reads all weights at the start, to know whose KVs it stores": (
        "cpu_offload_gb kt_weight_path ple_offload_embedding enable_paged_experts "
        "checkpoint_engine_wait_weights_before_ready weight_cache_mode",
        _IS_OFF,
    ),
    "must see the weights when they were read": ("startup_weight_load_mode", ("serial",)),
    "must see all weights": ("offload_group_size", (-1,)),
}
# For combinations with options of ours, one of which can be dropped instead.
_BESIDE: dict[str, Rules] = {
    "--impress-policy --impress-blend --impress-schedule": {
        "decides by itself what it blends, puts first or loads in part, and several ranks could "
        "not agree": ("tp_size pp_size", (1,))
    },
    "--impress-policy --impress-blend": {
        "has no KVs to send of what it blends or loads in part": ("disaggregation_mode", ("null",)),
        "blends and loads parts with the model's own weights": ("enable_lora lora_paths", _IS_OFF),
    },
    "--impress-blend": {
        "blends the KVs of models without drafts": ("speculative_algorithm", (None, "NGRAM"))
    },
    "--impress-basis": {
        "predicts a layer from the one below, which another stage may have": ("pp_size", (1,))
    },
    "--impress-schedule": {
        "changes places in some orders": ("schedule_policy", ("fcfs", "lpm", "dfs-weight", "hrrn"))
    },
    "--impress-truncate": {
        "cuts the oldest part of a prompt, and not its end": ("allow_auto_truncate", _IS_OFF)
    },
    "--pp-size": {
        "knows no drafts of a pipeline, whose last stage alone makes them": (
            "speculative_algorithm",
            (None,),
        ),
        "has no stages that prefill for others": ("disaggregation_mode", ("null",)),
        "has no stages whose ranks run batches of their own": ("attn_dp_size", (1,)),
        # Name of the option in SGLang 0.5.22.
        "has no stages with batches of their own": ("enable_dp_attention", (False,)),
    },
}

# Required values of environment variables that no option shows, and reasons.
_ENVIRONMENT: dict[str, tuple[object, str]] = {
    "SGLANG_ENABLE_METADATA_GLUE_GRAPH": (False, "prepares decode steps outside of CUDA graphs"),
    "SGLANG_USE_BREAKABLE_CUDA_GRAPH": (False, "loads prefixes in eager passes"),
    "SGLANG_USE_SAGE_ATTENTION_IMPL": ("", "needs keys as they were computed"),
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": (False, "does not promise the same bits"),
    "SGLANG_EXTERNAL_MODEL_PACKAGE": ("", "knows models by SGLang's own classes"),
    "SGLANG_RUST_SERVER": (False, "checks requests in the Python server"),
}

# Change KVs beyond rounding, and are in neither the weights nor the model's configuration. Dtypes
# and shapes are in the shape of KVs, RoPE and --json-model-override-args in the configuration.
_IDENTITY = (
    *("quantization", "enable_tf32_matmul", "fp8_gemm_runner_backend", "fp4_gemm_runner_backend"),
    *("bf16_gemm_backend", "moe_runner_backend", "flashinfer_mxfp4_moe_precision"),
)
_ALSO = ("modelopt_quant", "quantize_and_serve", "rl_quant_profile", "quantization_param_path")
_ENVIRONMENT_IDENTITY = ("SGLANG_ROPE_CACHE_FP32", "SGLANG_NVFP4_CKPT_FP8_GEMM_IN_ATTN")

# RoPE whose angles depend on the position only. `longrope` chooses by the longest request of a
# batch. `mrope` has three positions, which are the same where a prompt has no media.
ROPE_TYPES = frozenset({"default", "linear", "dynamic", "yarn", "deepseek_yarn", "llama3", "mrope"})
_WINDOWED = "sliding_attention"
_LAYER_TYPES = frozenset({"full_attention", "attention", _WINDOWED})
# Attributes that a model's configurations (Hugging Face and SGLang) must not have.
_NOT_CAUSAL = (
    *("attention_chunk_size", "dual_chunk_attention_config", "attn_logit_softcapping"),
    *("num_kv_shared_layers", "cross_attention_layers", "add_cross_attention"),
    *("alibi", "use_alibi", "is_local_attention_model"),
    *("is_hybrid_swa_compress", "is_encoder_decoder"),
    *("use_ngram_embedding", "use_engram", "pointer_head", "decision_config", "joint_head_config"),
)
# Attributes in which attention layers may differ from a plain one: those compared with the pool;
# scales, which are used only for pools of another dtype; those applied to queries, or that make
# keys of latent vectors; and a mark of transformers.
_FREE_IN_LAYERS = """
    layer_id tp_q_head_num tp_k_head_num tp_v_head_num head_dim qk_head_dim v_head_dim
    k_scale v_scale k_scale_float v_scale_float q_scale_float idx_q_scale_float idx_k_scale_float
    idx_v_scale_float quant_method kv_b_proj
    scaling logit_capping_method use_prefill_attention_wrapper _is_hf_initialized
"""


def check_options(config: ImpressConfig, options: Any) -> None:
    """Refuse options that are known not to work with IMPRESS; `options` is the resolved view.

    Raises `UnsupportedError` or `ConfigError` with one sentence for the first of them.
    """
    check_values(options, {why: (names, _IS_OFF) for why, names in _OFF.items()})
    check_values(options, _VALUES)
    check_values(options)
    if str(options.kv_cache_dtype).startswith("fp8"):
        config.without_codes(f"KVs in {options.kv_cache_dtype} {EIGHT_BITS}")
    used = {
        "--impress-policy": config.needs_parts,
        "--impress-blend": config.blend != OFF,
        "--impress-basis": config.basis,
        "--impress-schedule": config.schedule != OFF,
        "--impress-truncate": config.truncate != OFF,
        "--pp-size": options.pp_size > 1,
    }
    for flags, rules in _BESIDE.items():
        for flag in flags.split():
            if used[flag]:
                check_values(options, rules, f", or {flag}")


def check_values(options: Any, rules: Rules = _WEIGHTS_SEEN, otherwise: str = "") -> None:
    """Refuse options without one of the right values of a rule; raises `UnsupportedError`."""
    for why, (names, right) in rules.items():
        for name in names.split():
            value = getattr(options, name, None)
            if value is not None and value not in right:
                flag = f"--{name.replace('_', '-')}"
                kept = "" if right[0] is None else f" or use {flag} {right[0]}"
                raise UnsupportedError(f"IMPRESS {why}: drop {flag} {value}{otherwise or kept}")


def identity_of_options(options: Any) -> dict[str, object]:
    """Return the options and environment variables that change KVs, for `model_identity`."""
    from sglang.srt.environ import envs

    arguments = {f"--{name}": getattr(options, name, None) for name in _IDENTITY}
    # Only if set, as identities of earlier versions of this package lack them.
    arguments |= {f"--{name}": value for name in _ALSO if (value := getattr(options, name, None))}
    return arguments | {name: getattr(envs, name).get() for name in _ENVIRONMENT_IDENTITY}


def check_environment() -> None:
    """Refuse environment variables that change how requests run; raises `UnsupportedError`."""
    from sglang.srt.environ import envs

    for name, (right, why) in _ENVIRONMENT.items():
        if hasattr(envs, name) and getattr(envs, name).get() != right:
            raise UnsupportedError(f"IMPRESS {why}: unset {name}")


def check_model(model_config: Any, options: ImpressConfig) -> None:
    """Refuse models whose KVs depend on more than tokens and positions, or that are not causal.

    `model_config` is SGLang's. Raises `UnsupportedError` for the first reason.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config

    config = model_config.hf_text_config
    stateful = mambaish_config(model_config) is not None
    if model_config.attention_arch.name != "MHA":
        if options.needs_parts:
            raise UnsupportedError(
                f"--impress-policy {options.policy} needs keys per head, which models with MLA do "
                "not keep"
            )
        options.without_codes(LATENT)
    if not model_config.is_generation:
        raise UnsupportedError("IMPRESS serves generation models only")
    for name in _NOT_CAUSAL:
        if getattr(config, name, None) or getattr(model_config, name, None):
            raise UnsupportedError(f"IMPRESS does not support models with {name}")
    kinds = set(getattr(config, "layer_types", None) or ())
    windows = _WINDOWED in kinds or model_config.is_hybrid_swa
    media = model_config.is_multimodal or model_config.model_is_mrope
    if (windows or stateful or media) and not may_have_windows(options):
        raise UnsupportedError(
            "IMPRESS blends, codes by a basis, and loads parts of prefixes, of models of text "
            "whose layers attend to all tokens: drop --impress-policy, --impress-blend and "
            "--impress-basis"
        )
    # SGLang reports the layers of models with states.
    unknown = set[str]() if stateful else kinds - _LAYER_TYPES
    if unknown:
        raise UnsupportedError(f"IMPRESS does not know layers of type {', '.join(sorted(unknown))}")
    for name in ("rope_parameters", "rope_scaling"):
        ropes = getattr(config, name, None) or {}
        # Layers with windows may rotate keys in another way.
        each = list(ropes.values()) if ropes.keys() <= _LAYER_TYPES else [ropes]
        for rope in (entry or {} for entry in each):
            kind = rope.get("rope_type", rope.get("type", "default"))
            nested = any(isinstance(value, dict) for value in rope.values())
            if kind not in ROPE_TYPES or nested:
                raise UnsupportedError(
                    f"IMPRESS needs positions that count tokens, and knows RoPE of types "
                    f"{', '.join(sorted(ROPE_TYPES))}; this model has {rope}"
                )


def may_have_windows(options: ImpressConfig) -> bool:
    """Whether layers may attend to the last tokens only: all KVs of prefixes are restored."""
    return not (options.needs_parts or options.blend != OFF or options.basis)


def check_extra_pools(options: Any, what: str, otherwise: str = "") -> None:
    """Refuse options with which state beside the KVs of all tokens is not restored."""
    rules = {
        f"restores {what} in one stage": ("pp_size", (1,)),
        f"restores {what} without drafts": ("speculative_algorithm", (None, "NGRAM")),
        f"restores {what} where a prefix is computed": ("disaggregation_mode", ("null",)),
    }
    check_values(options, rules, otherwise)


def check_layers(runner: Any, tp_size: int = 1, *, windows: bool = False) -> None:
    """Refuse a model whose layers attend in another way, or whose KVs have another layout.

    `runner` is SGLang's `ModelRunner` after its pools are made; `tp_size` ranks share the heads of
    a layer; with `windows`, layers may attend to the last tokens only. Raises `UnsupportedError`.
    """
    pool, layers = runner.token_to_kv_pool, attention_layers(runner.model)
    if runner.model_config.is_multimodal and not hasattr(runner.model, "pad_input_ids"):
        raise UnsupportedError("IMPRESS cannot tell media from text by the tokens of this model")
    latent, ids = is_latent(full_pool(pool)), [layer.layer_id for layer in layers]
    kept = getattr(pool, "full_attention_layer_id_mapping", None)
    if kept is None:
        kept = range(pool.start_layer, pool.start_layer + pool.layer_num)
    # Some layers attend in two ways, depending on the length.
    if (list(dict.fromkeys(ids)) if latent else ids) != list(kept):
        raise UnsupportedError("IMPRESS needs one attention layer per layer of the KV pool")
    plain = type(layers[0])(1, 1, 1.0, num_kv_heads=1, layer_id=0)
    free = {*_FREE_IN_LAYERS.split(), *(["sliding_window_size"] if windows else [])}
    free |= vars(torch.nn.Module()).keys()
    for layer in layers:
        registered = {*layer._parameters, *layer._buffers, *layer._modules}
        for name in sorted((vars(layer).keys() | registered) - free):
            value = getattr(layer, name)
            if not hasattr(plain, name) or not _alike(value, getattr(plain, name)):
                raise UnsupportedError(
                    f"IMPRESS knows plain causal attention, but layer {layer.layer_id} has {name} "
                    f"{getattr(value, 'value', value)}"
                )
        if latent:
            continue
        layer_pool, number = pool_of(pool, layer.layer_id), f"layer {layer.layer_id} has other"
        heads = layer.tp_q_head_num, layer.tp_k_head_num, layer.tp_v_head_num
        dims = layer.head_dim, layer.qk_head_dim, layer.v_head_dim
        query_heads = runner.model_config.num_attention_heads // tp_size
        if heads != (query_heads, layer_pool.head_num, layer_pool.head_num):
            raise UnsupportedError(f"{number} heads than the KV pool: {heads}")
        if dims != (layer_pool.head_dim, layer_pool.head_dim, layer_pool.v_head_dim):
            raise UnsupportedError(f"{number} widths than the KV pool: {dims}")


def attention_layers(model: Any) -> list[Any]:
    """Return the attention layers of a model, in order; `UnsupportedError` if one is not
    SGLang's."""
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
    strange = {type(layer).__name__ for layer in layers if type(layer) is not RadixAttention}
    if strange or not layers:
        raise UnsupportedError(
            f"IMPRESS does not know the attention of {', '.join(strange) or type(model).__name__}"
        )
    return layers


def _alike(value: object, plain: object) -> bool:
    simple = int, float, str, enum.Enum
    if isinstance(plain, simple):
        # Models may pass 0 for 0.0.
        return isinstance(value, simple) and value == plain
    return type(value) is type(plain)
