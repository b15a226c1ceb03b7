"""Builds tree caches with their stores, and reads what they need from a model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from torch import Tensor

from impress_sglang.codes.rows.basis import Basis
from impress_sglang.config import CODES, EXACTLY, OFF, ImpressConfig, share_of_rank
from impress_sglang.plugin import compat
from impress_sglang.plugin.pools import (
    STATEFUL,
    PoolLayers,
    full_pool,
    index_keys,
    is_latent,
    kinds_of_states,
    kv_format_of,
    state_layers,
    window_pool,
)
from impress_sglang.plugin.prefix_loads import PrefixLoads
from impress_sglang.plugin.rank_groups import counts_of, identity_reader, ranks_of
from impress_sglang.plugin.rectangular import attend_rectangularly
from impress_sglang.plugin.rotation import rotation_of
from impress_sglang.plugin.self_test import check_kvs
from impress_sglang.plugin.tree_cache import ImpressTreeCache
from impress_sglang.plugin.unsupported import (
    check_extra_pools,
    check_layers,
    check_options,
    identity_of_options,
    may_have_windows,
)
from impress_sglang.serving.metrics import ServingMetrics
from impress_sglang.serving.ranks import ALONE, Ranks
from impress_sglang.serving.service import Service
from impress_sglang.storage.layout import KVShape
from impress_sglang.store.identity import model_identity, weights_digest
from impress_sglang.store.policies import Policy, make_policy
from impress_sglang.transfer.basis_codec import BasisCodec, shape_by
from impress_sglang.transfer.codecs import Codec, plain_codec, warm_up

logger = logging.getLogger(__name__)

_Cache = TypeVar("_Cache", bound=ImpressTreeCache)

# Parameters of a Hugging Face configuration that name a model or its training, not its KVs.
_NOT_ARCHITECTURE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "use_cache"})
_ONE_POOL = ", or use --disable-hybrid-swa-memory"


def make_tree_cache(context: Any, config: ImpressConfig) -> ImpressTreeCache:
    """Build the cache that loads before passes, for SGLang's `TreeCacheBuildContext`.

    Raises:
        UnsupportedError: the options or the model are not supported.
    """
    runner, params = context.tp_worker.model_runner, context.params
    options = resolved_view(context.server_args)
    check_options(config, options)
    ranks = ranks_of(context)
    tp_size = ranks.size // options.pp_size
    check_layers(runner, tp_size, windows=may_have_windows(config))
    pool, model_dtype = runner.token_to_kv_pool, runner.model_config.dtype
    kv_format, windows = kv_format_of(full_pool(pool), model_dtype), window_pool(pool)
    drafts = draft_runners(compat.scheduler)
    further = [kv_format_of(draft.token_to_kv_pool, draft.model_config.dtype) for draft in drafts]
    if windows is not None:
        check_extra_pools(options, "windows in a pool of their own", _ONE_POOL)
        further = [kv_format_of(windows, model_dtype)]
    stateful = hasattr(runner.req_to_token_pool, "mamba_pool")
    if stateful:
        check_extra_pools(options, "states beside KVs")
    if not (ranks.alone or further or stateful):
        # Each rank has its own states, and drafts or windows may share heads differently.
        heads = 1 if is_latent(pool) else runner.model_config.get_total_num_kv_heads()
        # Segments of another node are on that node's drive.
        node_ranks = options.tp_size * options.pp_size // options.nnodes
        ranks.head_replicas = math.gcd(max(tp_size // heads, 1), node_ranks)
    if no_codes := kv_format.no_codes or STATEFUL * stateful:
        config = config.without_codes(no_codes)
        logger.info("prefixes are loaded exactly: %s", no_codes)
    attend_rectangularly(runner.attn_backend)
    loads: type[PrefixLoads] = PrefixLoads
    if config.blend != OFF:
        # Imported here, so that other servers do not load it.
        from impress_sglang.blend.plugin.blends import BlendLoads
        from impress_sglang.blend.plugin.steps import check_blended

        # Before the store is opened.
        check_blended(runner.model)
        loads = BlendLoads
    config = share_of_rank(config, ranks.size, ranks.head_replicas)
    policy = make_policy(config)
    shape = kv_shape(runner, policy, config, tp_size)
    shape = replace(shape, exact=config.kept != CODES)
    if config.kept == EXACTLY:
        shape = replace(shape, code_bits=0.0)
    codec = plain_codec(shape)
    if config.basis:
        # The part for this rank's heads, which ranks share if there are more ranks than heads.
        parts = min(tp_size, runner.model_config.get_total_num_kv_heads())
        part = ranks.rank * parts // tp_size, parts
        basis = Basis.load(Path(config.basis).expanduser(), part).keeping(config.code_bits)
        rotation = rotation_of(runner.model, "--impress-basis")
        # See `PoolLayers.draft_offset`.
        codec = BasisCodec(basis, rotation, draft_offset=int(bool(drafts)))
        shape = shape_by(basis, shape)
        # So that other threads need not compute it.
        codec.rotation.prepare(runner.model_config.context_len)
    elif codec is not None:
        logger.info(
            "KVs are coded without a basis of the model: `impress calibrate` makes one, with which "
            "they take two thirds of the bytes (--impress-basis)"
        )

    layers = PoolLayers(pool)
    if drafts or index_keys(full_pool(pool)):
        shape = layers.add(shape, [draft.token_to_kv_pool for draft in drafts])
    elif windows is not None:
        # Tokens that SGLang needs, in whole pages; 0.5.22 has no drafts that need more.
        page = params.page_size
        window = getattr(params, "swa_retain_window", params.sliding_window_size)
        raw = further != [kv_format]
        shape = layers.add(shape, [windows], -(-window // page) * page, raw=raw)
    if stateful:
        layers.states = state_layers(runner.req_to_token_pool, shape)

    cache = build_tree_cache(
        *(ImpressTreeCache, Service, context, config, shape, layers),
        identity_reader(context, ranks, lambda: identity_of(context, shape, drafts)),
        codec,
        ranks,
        drafts,
    )
    cache.loads_class = loads
    return cache


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
    compat.warn_if_untested()
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


def draft_runners(scheduler: Any) -> tuple[Any, ...]:
    """Return SGLang's `ModelRunner` of each draft model (speculative decoding) with its own KVs.

    Its pool has the same slots. Without its KVs, nearly no draft would be accepted after a loaded
    prefix.
    """
    worker = scheduler.draft_worker
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
    if index_keys(full_pool(runner.token_to_kv_pool)):
        # Before, in pieces of pages.
        architecture["index keys"] = "by token"
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


def _architecture(hf_config: Any) -> dict[str, object]:
    return {
        key: value for key, value in hf_config.to_dict().items() if key not in _NOT_ARCHITECTURE
    }
