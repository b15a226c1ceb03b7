"""Builds the tree cache that loads within a pass, and connects it to the attention backend."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from sglang.srt.arg_groups.overrides import resolved_view

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import UnsupportedError
from impress_sglang.paper.plugin.attention import adopt_backend
from impress_sglang.paper.plugin.options import check_parts
from impress_sglang.paper.plugin.radix_cache import ImpressRadixCache
from impress_sglang.paper.runtime import ServingRuntime
from impress_sglang.paper.scores import probe_kv_heads
from impress_sglang.plugin.capabilities import check_layers, check_options
from impress_sglang.plugin.compat import warn_if_untested
from impress_sglang.plugin.eligibility import plain_fields
from impress_sglang.plugin.factory import identity_of, kv_shape
from impress_sglang.plugin.pools import PoolLayers
from impress_sglang.plugin.ranks import counts_of
from impress_sglang.plugin.self_test import check_kvs
from impress_sglang.serving.metrics import ServingMetrics
from impress_sglang.store.policies import make_policy
from impress_sglang.transfer.warm_up import warm_up

logger = logging.getLogger(__name__)


def make_tree_cache(context: Any, config: ImpressConfig) -> ImpressRadixCache:
    """Build the tree cache for SGLang's `TreeCacheBuildContext`.

    Raises:
        UnsupportedError: the options or the model are not known to be right; the options ask for
            parts of prefixes that this server cannot use; or a kernel does not fit the GPU.
        ConfigError: a directory cannot be written, or the caches do not fit in memory.
        StoreInUseError: another server uses it for the same model.
    """
    runner = context.tp_worker.model_runner
    options = resolved_view(context.server_args)
    check_options(config, options)
    check_parts(config, options)
    check_layers(runner)
    if runner.token_to_kv_pool.dtype != runner.model_config.dtype:
        raise UnsupportedError(
            f"--impress-policy {config.policy} loads KVs in the model's dtype: use "
            "--kv-cache-dtype auto, or --impress-policy impress"
        )
    if "discard_output_reason" not in plain_fields():
        raise UnsupportedError(
            "this SGLang cannot drop the output of a request whose prefix turns out to be damaged: "
            "use --impress-policy impress"
        )
    policy = make_policy(config)
    plain = shape = kv_shape(runner, policy, config)
    if policy.probes:
        heads = probe_kv_heads(shape.num_query_heads, shape.num_kv_heads, config.probe_heads)
        shape = dataclasses.replace(shape, probe_kv_heads=heads)
    if policy.probes and not shape.other_kv_heads:
        logger.warning(
            "this model has %d KV heads and all of them are probe heads: --impress-policy %s "
            "reads all keys of a stored prefix, and saves values only",
            shape.num_kv_heads,
            policy.name,
        )

    def read_identity() -> str:
        return identity_of(context, shape)

    layers = PoolLayers(runner.token_to_kv_pool)
    device = layers(0)[0].device
    # Kernels first: opening the store takes much memory.
    warm_up(shape, device)
    self_test = check_kvs([runner], layers, config, plain, None)
    warn_if_untested()
    hidden_size = runner.model_config.hidden_size
    runtime = ServingRuntime(config, shape, read_identity(), device, hidden_size)
    runtime.self_test_seconds = self_test
    runtime.counts = counts_of(context)
    cache = ImpressRadixCache(
        context.params,
        runtime,
        runner.model,
        layers,
        runner.forward_stream,
        read_identity,
        runner.lora_manager,
    )
    if cache.metrics_collector is not None:
        runtime.metrics = ServingMetrics(cache.metrics_collector.labels)
    adopt_backend(runner.attn_backend, runtime, runner.token_to_kv_pool, cache.fail)
    return cache
