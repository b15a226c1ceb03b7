"""Builds the tree cache in the scheduler process and connects it to the attention backend."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from torch import Tensor

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import UnsupportedError
from impress_sglang.importance.selectors import probe_kv_heads
from impress_sglang.integration.guards import (
    check_arguments,
    identity_of_options,
)
from impress_sglang.integration.layers import check_layers
from impress_sglang.integration.paper.attention import PrefixAttention
from impress_sglang.integration.paper.blend import rotation_of
from impress_sglang.integration.paper.radix_cache import ImpressRadixCache
from impress_sglang.integration.paper.recompute import block_tokens
from impress_sglang.management.identity import model_identity, weights_digest
from impress_sglang.management.policies import LoadOptions, Policy, make_policy
from impress_sglang.options import OFF
from impress_sglang.precision.codec import DIM_GRAIN
from impress_sglang.serving.metrics import ServingMetrics
from impress_sglang.serving.paper.runtime import ServingRuntime
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.coded_slots import code_writer_for
from impress_sglang.transfer.warm_up import warm_up

logger = logging.getLogger(__name__)

# Parameters of a Hugging Face configuration that name a model or its training, not its KVs.
_NOT_ARCHITECTURE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "use_cache"})


def make_tree_cache(context: Any, config: ImpressConfig) -> ImpressRadixCache:
    """Build the tree cache for SGLang's `TreeCacheBuildContext`.

    Raises:
        UnsupportedError: the attention backend is not ours, so that prefixes would be read wrong;
            the options or the model are not known to be right; the options ask for parts of
            prefixes that this server cannot use; or a kernel for the model does not fit the GPU.
        ConfigError: a directory cannot be written, or the caches do not fit in memory.
        StoreInUseError: another server uses it for the same model.
    """
    runner = context.tp_worker.model_runner
    backend = runner.attn_backend
    if not isinstance(backend, PrefixAttention):
        raise UnsupportedError(
            f"the attention hook of IMPRESS is not in place ({type(backend).__name__} is active), "
            "so prefixes would be read wrong; check that no other plugin replaces "
            "attn_backend_wrapper, and that SGLANG_PLUGINS includes impress"
        )
    options = resolved_view(context.server_args)
    check_arguments(config, options)
    check_layers(runner)
    policy = make_policy(config)
    shape = kv_shape(runner, policy, config.probe_heads)
    if policy.probes and not shape.other_kv_heads:
        logger.warning(
            "this model has %d KV heads and all of them are probe heads: --impress-policy %s "
            "reads all keys of a stored prefix, and saves values only",
            shape.num_kv_heads,
            policy.name,
        )

    def read_identity() -> str:
        return model_identity(
            weights=weights_digest(kv_tensors(runner.model)),
            architecture=_architecture(runner.model_config.hf_text_config)
            | identity_of_options(options),
            shape=shape,
            tp_rank=context.tp_rank,
            tp_size=context.tp_size,
        )

    device = runner.token_to_kv_pool.get_key_buffer(runner.token_to_kv_pool.start_layer).device
    # Kernels first: opening the store takes much memory.
    if policy.stores:
        selects = not policy.exact(LoadOptions(config.min_retention))
        rule = policy.selector if selects else None
        warm_up(shape, rule, config.chunk_tokens, device)
        if shape.coded and device.type == "cpu":
            # Imports loops, which are compiled then: after an installation that takes seconds.
            code_writer_for(device)
    hidden_size = runner.model_config.hidden_size
    params = context.params
    runtime = ServingRuntime(
        config,
        shape,
        read_identity(),
        device,
        hidden_size,
        free=lambda slots: params.token_to_kv_pool_allocator.free(slots),
        page_size=params.page_size,
    )
    if config.blend != OFF:
        runtime.blend_with(rotation_of(runner.model), block_tokens())
    cache = ImpressRadixCache(params, runtime, read_identity, runner.forward_stream)
    if cache.metrics_collector is not None:
        runtime.metrics = ServingMetrics(cache.metrics_collector.labels)
    backend.connect(runtime, cache.passes)
    return cache


def kv_tensors(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors of a model that determine its KVs: parameters, and buffers saved with them.

    Other buffers follow from the configuration, which is in the identity itself. While serving,
    SGLang gives some of them (rotary tables) another dtype or length, without effect on KVs.
    """
    saved = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
    return [*model.named_parameters(), *buffers]


def kv_shape(runner: Any, policy: Policy, probe_heads: int) -> KVShape:
    """The shape of the KVs in the pool of a model runner, as a policy stores them.

    Raises:
        UnsupportedError: it stores codes, and vectors of the model do not fill their bytes.
    """
    pool = runner.token_to_kv_pool
    num_query_heads = runner.model_config.num_attention_heads
    dims = pool.head_dim, pool.v_head_dim
    if not policy.probes and any(dim % DIM_GRAIN for dim in dims):
        raise UnsupportedError(
            f"IMPRESS codes keys and values whose dimensions are multiples of {DIM_GRAIN}, and "
            f"those of this model are {dims[0]} and {dims[1]}: use --impress-policy paper"
        )
    probes = probe_kv_heads(num_query_heads, pool.head_num, probe_heads) if policy.probes else ()
    return KVShape(
        num_layers=pool.layer_num,
        num_query_heads=num_query_heads,
        num_kv_heads=pool.head_num,
        key_dim=pool.head_dim,
        value_dim=pool.v_head_dim,
        dtype=pool.dtype,
        probe_kv_heads=probes,
        # Also if the policy reads no codes, so that servers with other policies can share a store.
        coded=not policy.probes,
    )


def _architecture(hf_config: Any) -> dict[str, object]:
    return {
        key: value for key, value in hf_config.to_dict().items() if key not in _NOT_ARCHITECTURE
    }
