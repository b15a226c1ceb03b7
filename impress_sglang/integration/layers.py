"""Checks the loaded model layer by layer, since its configuration may not say everything."""

from __future__ import annotations

from typing import Any

from impress_sglang.errors import UnsupportedError
from impress_sglang.integration.judged_models import (
    ARCHITECTURES,
    LAYER_ATTRIBUTES,
    LAYER_VALUES,
)


def check_layers(runner: Any) -> None:
    """Refuse a model whose layers attend in an unknown way, or whose KVs have another layout.

    `runner` is SGLang's `ModelRunner` after its pools are made.

    Raises:
        UnsupportedError: with one sentence for the first reason.
    """
    pool, model = runner.token_to_kv_pool, runner.model
    check_architecture(type(model).__name__)
    _check_pool(pool, runner.model_config.dtype)
    layers = _attention_layers(model)
    if [layer.layer_id for layer in layers] != list(range(pool.layer_num)):
        raise UnsupportedError("IMPRESS needs one attention layer per layer of the KV pool")
    for layer in layers:
        _check_layer(layer)
        _check_heads(layer, pool, runner.model_config.num_attention_heads)


def check_architecture(name: str) -> None:
    """Refuse a model class whose attention was not judged.

    Raises:
        UnsupportedError: names the class.
    """
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedError(f"IMPRESS does not know how {name} attends; it serves {known}")


def _attention_layers(model: Any) -> list[Any]:
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
    strange = {type(layer).__name__ for layer in layers if type(layer) is not RadixAttention}
    if strange:
        raise UnsupportedError(f"IMPRESS does not know the attention of {', '.join(strange)}")
    return layers


def _check_layer(layer: Any) -> None:
    unknown = _own_attributes(layer) - LAYER_ATTRIBUTES
    if unknown:
        raise UnsupportedError(f"IMPRESS does not know what {min(unknown)} does to attention")
    for name, right in LAYER_VALUES.items():
        value = getattr(layer, name)
        if getattr(value, "value", value) != right:
            raise UnsupportedError(
                f"IMPRESS knows attention with {name} {right}, but layer {layer.layer_id} has "
                f"{value}"
            )


def _own_attributes(layer: Any) -> set[str]:
    """The attributes that a layer has beyond any `torch.nn.Module`: values, registered scales."""
    import torch

    registered = {*layer._parameters, *layer._buffers, *layer._modules}
    return (vars(layer).keys() - vars(torch.nn.Module()).keys()) | registered


def _check_heads(layer: Any, pool: Any, num_query_heads: int) -> None:
    heads = (layer.tp_q_head_num, layer.tp_k_head_num, layer.tp_v_head_num)
    dims = (layer.head_dim, layer.qk_head_dim, layer.v_head_dim)
    if heads != (num_query_heads, pool.head_num, pool.head_num):
        raise UnsupportedError(f"layer {layer.layer_id} has other heads than the KV pool: {heads}")
    if dims != (pool.head_dim, pool.head_dim, pool.v_head_dim):
        raise UnsupportedError(f"layer {layer.layer_id} has other widths than the KV pool: {dims}")


def _check_pool(pool: Any, model_dtype: Any) -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    if type(pool) is not MHATokenToKVPool:
        raise UnsupportedError(f"IMPRESS does not know how {type(pool).__name__} keeps KVs")
    if pool.kv_cache_layout != "nhd" or pool.start_layer != 0 or pool.post_capture_active:
        raise UnsupportedError(
            f"IMPRESS writes KVs token by token, which a pool of layout {pool.kv_cache_layout} "
            "does not hold so"
        )
    # A pool of another dtype may scale KVs when they are written.
    if not pool.dtype == pool.store_dtype == model_dtype:
        raise UnsupportedError(
            f"IMPRESS stores KVs in the model's dtype {model_dtype}, but the pool has "
            f"{pool.dtype}: use --kv-cache-dtype auto"
        )
