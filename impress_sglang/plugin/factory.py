"""Builds a tree cache with its store, and the inputs that both ways of loading take from a
model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding, RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from torch import Tensor

from impress_sglang.codes.rotation import KeyRotation
from impress_sglang.config import ImpressConfig
from impress_sglang.errors import UnsupportedError
from impress_sglang.plugin.compat import DRAFTS_ATTRIBUTE, warn_if_untested
from impress_sglang.plugin.impress_tree_cache import ImpressTreeCache
from impress_sglang.plugin.pools import (
    PoolLayers,
    full_pool,
    kinds_of_states,
    kv_format_of,
    window_pool,
)
from impress_sglang.plugin.rank_groups import counts_of
from impress_sglang.plugin.self_test import check_kvs
from impress_sglang.plugin.unsupported import identity_of_options
from impress_sglang.serving.metrics import ServingMetrics
from impress_sglang.serving.ranks import ALONE, Ranks
from impress_sglang.serving.service import Service
from impress_sglang.storage.layout import KVShape
from impress_sglang.store.identity import model_identity, weights_digest
from impress_sglang.store.policies import Policy, make_policy
from impress_sglang.transfer.codecs import Codec, warm_up

_Cache = TypeVar("_Cache", bound=ImpressTreeCache)

# Parameters of a Hugging Face configuration that name a model or its training, not its KVs.
_NOT_ARCHITECTURE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "use_cache"})
# Rotations whose factors depend on the position only, as rows of `cos_sin_cache`.
_KNOWN_ROTATIONS = (
    RotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)


def build_tree_cache(
    cache_class: type[_Cache],
    service_class: Callable[..., Service],
    context: Any,
    config: ImpressConfig,
    shape: KVShape,
    layers: PoolLayers,
    read_identity: Callable[[], str],
    codec: Codec | None = None,
    ranks: Ranks = ALONE,
    drafts: Sequence[Any] = (),
) -> _Cache:
    """Make a tree cache of a class, and its store, for SGLang's `TreeCacheBuildContext`."""
    runner, device, self_test = context.tp_worker.model_runner, layers(0)[0].device, None
    # Kernels first: opening the store takes much memory.
    if make_policy(config).stores:
        warm_up(shape, device, codec)
        self_test = check_kvs([runner, *drafts], layers, config.policy, shape, codec)
    warn_if_untested()
    hidden_size = runner.model_config.hidden_size
    service = service_class(config, shape, read_identity(), device, hidden_size, codec)
    service.self_test_seconds, service.counts = self_test, counts_of(context)
    # Purging and sharing by score read nodes, which the other core does not expose.
    context.params.tree_core_backend = "python"
    arguments = service, runner.model, layers, runner.forward_stream, read_identity, ranks
    cache = create_unified_radix_cache(
        context, cache_class=lambda params: cache_class(params, *arguments, runner.lora_manager)
    )
    assert isinstance(cache, cache_class)
    if cache.metrics_collector is not None:
        service.metrics = ServingMetrics(cache.metrics_collector.labels)
    return cache


def draft_runners(tp_worker: Any) -> tuple[Any, ...]:
    """Return SGLang's `ModelRunner` of each draft model (speculative decoding) with its own KVs.

    Its pool has the same slots. Without its KVs, nearly no draft would be accepted after a loaded
    prefix.
    """
    worker = getattr(tp_worker, DRAFTS_ATTRIBUTE)
    return () if worker is None else tuple(worker._draft_model_runners())


def identity_of(context: Any, shape: object, drafts: Sequence[Any] = ()) -> str:
    """Return the model identity of the current weights, for SGLang's `TreeCacheBuildContext`.

    It is read again each time, as weights may change. `drafts` are runners of models whose KVs are
    stored beside those of the model.
    """
    runner = context.tp_worker.model_runner
    tensors = kv_tensors(runner.model)
    architecture = _architecture(runner.model_config.hf_text_config) | _scaling(runner)
    if window_pool(runner.token_to_kv_pool) is not None:
        # Layers with windows are stored after the others, and not for all tokens.
        architecture["windows"] = runner.token_to_kv_pool.layers_mapping
    if hasattr(runner.req_to_token_pool, "mamba_pool"):
        architecture["states"] = kinds_of_states(runner.req_to_token_pool)
    for number, draft in enumerate(drafts):
        tensors += [(f"draft {number} {name}", tensor) for name, tensor in kv_tensors(draft.model)]
        config = _architecture(draft.model_config.hf_text_config)
        architecture[f"draft {number}"] = (config, draft.token_to_kv_pool.dtype, _scaling(draft))
    if context.params.pp_size > 1:
        architecture["stage"] = context.params.pp_rank, context.params.pp_size
    return model_identity(
        weights=weights_digest(tensors),
        architecture=architecture | identity_of_options(resolved_view(context.server_args)),
        shape=shape,
        tp_rank=context.tp_rank,
        tp_size=context.tp_size,
    )


def _scaling(runner: Any) -> dict[str, object]:
    """Describe how KVs were converted to a pool's dtype, if it is not the model's."""
    pool, scaling = runner.token_to_kv_pool, dict[str, object]()
    scales = [
        [None if scale is None else float(scale) for scale in (layer.k_scale, layer.v_scale)]
        for layer in runner.model.modules()
        if isinstance(layer, RadixAttention)
    ]
    if pool.dtype != runner.model_config.dtype:
        scaling = {"kv_dtype": str(pool.dtype), "kv_scales": scales}
    if any(scale not in (None, 1.0) for both in scales for scale in both):
        # Backends differ in whether they divide by scales, some even for the model's dtype.
        scaling |= {
            name: getattr(runner, name)
            for name in ("prefill_attention_backend_str", "decode_attention_backend_str")
        }
    return scaling


def kv_tensors(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """Return the tensors of a model that determine its KVs: parameters, and saved buffers.

    Other buffers follow from the configuration, which is in the identity itself. While serving,
    SGLang gives some of them (rotary tables) another dtype or length, without effect on KVs.
    """
    saved = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
    return [*model.named_parameters(), *buffers]


def kv_shape(runner: Any, policy: Policy, config: ImpressConfig, tp_size: int = 1) -> KVShape:
    """Return the shape of the KVs in the pool of a model runner, as a policy stores them.

    `tp_size` ranks share the heads of a layer. No heads are probe heads. Raises `UnsupportedError`.
    """
    pool, model = full_pool(runner.token_to_kv_pool), runner.model_config
    kv_format = kv_format_of(pool, model.dtype)
    return KVShape(
        num_layers=pool.layer_num,
        num_query_heads=model.num_attention_heads // tp_size,
        num_kv_heads=kv_format.heads,
        key_dim=kv_format.dims[0],
        value_dim=kv_format.dims[1],
        dtype=kv_format.dtype,
        probe_kv_heads=(),
        code_bits=config.code_bits if policy.codes and not kv_format.no_codes else 0.0,
    )


def rotation_of(model: Any, option: str) -> KeyRotation:
    """Return the rotation of a model's keys, which an option needs, or raise `UnsupportedError`."""
    rotations = [module for module in model.modules() if hasattr(module, "cos_sin_cache")]
    # One object serves all layers.
    if len(rotations) != 1 or type(rotations[0]) not in _KNOWN_ROTATIONS:
        names = sorted({type(rotation).__name__ for rotation in rotations})
        kinds = ", ".join(names) or "no rotary embedding"
        raise UnsupportedError(
            f"IMPRESS cannot move keys of {type(model).__name__} to other positions ({kinds}): "
            f"drop {option}"
        )
    (rotary,) = rotations

    def table(rows: int) -> Tensor:
        rotary._ensure_cos_sin_cache_length(rows - 1)
        return rotary.cos_sin_cache

    return KeyRotation(table, halves=rotary.is_neox_style)


def _architecture(hf_config: Any) -> dict[str, object]:
    return {
        key: value for key, value in hf_config.to_dict().items() if key not in _NOT_ARCHITECTURE
    }
