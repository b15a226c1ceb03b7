"""What cannot be served, said at start in one sentence each.

The checks run in the main process, on SGLang's resolved options and the model's configuration,
before any process is started. The list is data: a check is a condition and what to tell the user.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from impress_sglang.errors import UnsupportedError

SUPPORTED_ATTENTION = ("triton", "flashinfer", "torch_native")
# What is used on a device where nothing is asked for; SGLang's own choice may carry no offset.
DEFAULT_ATTENTION = {"cpu": "torch_native", "cuda": "triton"}
SUPPORTED_KV_DTYPES = ("auto", "bfloat16", "bf16", "float16", "float32")

_Check = tuple[Callable[[Any], object], str]

OPTION_CHECKS: tuple[_Check, ...] = (
    (
        lambda o: o.disable_radix_cache,
        "IMPRESS finds prefixes through the radix cache: drop --disable-radix-cache",
    ),
    (
        lambda o: o.enable_hierarchical_cache,
        "IMPRESS has its own tiers: drop --enable-hierarchical-cache",
    ),
    (lambda o: o.enable_lmcache, "IMPRESS has its own tiers: drop --enable-lmcache"),
    (lambda o: o.enable_flexkv, "IMPRESS has its own tiers: drop --enable-flexkv"),
    (
        lambda o: o.enable_unified_cache_external_linker,
        "IMPRESS has its own tiers: drop --enable-unified-cache-external-linker",
    ),
    (
        lambda o: o.radix_cache_backend not in (None, "impress"),
        "IMPRESS is a radix cache backend itself: drop --radix-cache-backend",
    ),
    (
        lambda o: o.speculative_algorithm is not None,
        "IMPRESS does not support speculative decoding: drop --speculative-algorithm",
    ),
    (lambda o: o.pp_size > 1, "IMPRESS does not support pipeline parallelism: use --pp-size 1"),
    (
        lambda o: o.tp_size > 1,
        "IMPRESS does not support tensor parallelism yet, because ranks would have to agree on "
        "every stored prefix: use --tp-size 1",
    ),
    (
        lambda o: o.enable_dp_attention,
        "IMPRESS does not support DP attention: drop --enable-dp-attention",
    ),
    (
        lambda o: o.dp_size > 1,
        "IMPRESS does not support data parallelism, whose replicas would share one store: run one "
        "server per replica, each with its own --impress-ssd-dir",
    ),
    (
        lambda o: o.dcp_size > 1,
        "IMPRESS does not support decode context parallelism: use --dcp-size 1",
    ),
    (
        lambda o: o.attn_cp_size > 1,
        "IMPRESS does not support context parallelism: use --attn-cp-size 1",
    ),
    (
        lambda o: o.enable_two_batch_overlap,
        "IMPRESS does not support two-batch overlap: drop --enable-two-batch-overlap",
    ),
    (
        lambda o: o.enable_pdmux,
        "IMPRESS does not support PD multiplexing: drop --enable-pdmux",
    ),
    (
        lambda o: o.enable_unified_memory,
        "IMPRESS writes KVs to slots that do not move: drop --enable-unified-memory",
    ),
    (
        lambda _: _captures_metadata(),
        "IMPRESS prepares each decode step outside of CUDA graphs: unset "
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH",
    ),
    (
        lambda o: o.page_size not in (None, 1),
        "IMPRESS supports page size 1 only: use --page-size 1",
    ),
    (
        lambda o: o.disaggregation_mode not in (None, "null"),
        "IMPRESS does not support prefill/decode disaggregation: drop --disaggregation-mode",
    ),
    (
        lambda o: bool(o.enable_lora or o.lora_paths),
        "IMPRESS does not support LoRA yet: drop --enable-lora and --lora-paths",
    ),
    (
        lambda o: o.kv_cache_dtype not in SUPPORTED_KV_DTYPES,
        "IMPRESS stores KVs in the model's dtype: use --kv-cache-dtype auto",
    ),
    (
        lambda o: o.tokenizer_worker_num > 1,
        "IMPRESS reports through a single tokenizer process: use --tokenizer-worker-num 1",
    ),
)

MODEL_CHECKS: tuple[_Check, ...] = (
    (
        lambda m: m.attention_arch.name == "MLA",
        "IMPRESS needs keys per head, which MLA models do not keep",
    ),
    (
        lambda m: m.attention_arch.name != "MHA" or _has_linear_layers(m),
        "IMPRESS does not support hybrid models with state-space or linear attention layers",
    ),
    (
        lambda m: _sliding_window(m),
        "IMPRESS does not support sliding-window models: their window counts positions, which a "
        "partly loaded prefix does not have",
    ),
    (
        lambda m: getattr(m.hf_text_config, "attn_temperature_len", -1) > 0,
        "IMPRESS does not support attention whose temperature counts positions, which a partly "
        "loaded prefix does not have",
    ),
    (lambda m: m.is_encoder_decoder, "IMPRESS does not support encoder-decoder models"),
    (lambda m: m.is_multimodal, "IMPRESS does not support multimodal models yet"),
    (lambda m: not m.is_generation, "IMPRESS serves generation models only"),
)


def check_options(options: Any) -> None:
    """Refuse SGLang options that cannot be combined with IMPRESS; `options` is the resolved view.

    Raises:
        UnsupportedError: with one sentence for the first option that does not fit.
    """
    _run(OPTION_CHECKS, options)


def check_attention(prefill: str | None, decode: str | None) -> None:
    """Refuse attention backends that do not carry the start offset of sink rows.

    Raises:
        UnsupportedError: naming the backend.
    """
    for name in (prefill, decode):
        if name not in SUPPORTED_ATTENTION:
            raise UnsupportedError(
                f"IMPRESS supports --attention-backend {'|'.join(SUPPORTED_ATTENTION)}, which can "
                f"start a request's row at an offset; this server would use {name}"
            )
    if prefill != decode:
        raise UnsupportedError(
            f"IMPRESS does not support {prefill} for prefill with {decode} for decode: use one "
            f"--attention-backend of {'|'.join(SUPPORTED_ATTENTION)} for both"
        )


def check_model(model_config: Any) -> None:
    """Refuse models whose attention IMPRESS cannot serve; `model_config` is SGLang's.

    Raises:
        UnsupportedError: with one sentence for the first reason.
    """
    _run(MODEL_CHECKS, model_config)


def _run(checks: tuple[_Check, ...], subject: Any) -> None:
    for is_unsupported, sentence in checks:
        if is_unsupported(subject):
            raise UnsupportedError(sentence)


def _captures_metadata() -> bool:
    from sglang.srt.environ import envs

    captures: bool = envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get()
    return captures


def _has_linear_layers(model_config: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    layer_types = getattr(model_config.hf_text_config, "layer_types", None) or ()
    return mambaish_config(model_config) is not None or any("linear" in t for t in layer_types)


def _sliding_window(model_config: Any) -> bool:
    config = model_config.hf_text_config
    layer_types = getattr(config, "layer_types", None) or ()
    if model_config.is_hybrid_swa or any("sliding" in kind for kind in layer_types):
        return True
    # Qwen2 configurations name a window that they do not use.
    window = getattr(config, "sliding_window", None)
    return bool(window) and getattr(config, "use_sliding_window", True) and not layer_types
