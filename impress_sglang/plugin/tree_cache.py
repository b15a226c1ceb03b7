"""Builds the tree cache of servers that load prefixes before the model's passes."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang.srt.arg_groups.overrides import resolved_view

from impress_sglang.codes.rows.basis import Basis
from impress_sglang.config import CODES, EXACTLY, OFF, ImpressConfig, share_of_rank
from impress_sglang.plugin.factory import (
    build_tree_cache,
    draft_runners,
    identity_of,
    kv_shape,
    rotation_of,
)
from impress_sglang.plugin.impress_tree_cache import ImpressTreeCache
from impress_sglang.plugin.pools import (
    STATEFUL,
    PoolLayers,
    full_pool,
    index_keys,
    is_latent,
    kv_format_of,
    state_layers,
    window_pool,
)
from impress_sglang.plugin.prefix_loads import PrefixLoads
from impress_sglang.plugin.rank_groups import identity_reader, ranks_of
from impress_sglang.plugin.rectangular import attend_rectangularly
from impress_sglang.plugin.unsupported import (
    check_extra_pools,
    check_layers,
    check_options,
    may_have_windows,
)
from impress_sglang.serving.service import Service
from impress_sglang.store.policies import make_policy
from impress_sglang.transfer.basis_codec import BasisCodec, shape_by
from impress_sglang.transfer.codecs import plain_codec

logger = logging.getLogger(__name__)
_ONE_POOL = ", or use --disable-hybrid-swa-memory"


def make_tree_cache(context: Any, config: ImpressConfig) -> ImpressTreeCache:
    """Build the tree cache for SGLang's `TreeCacheBuildContext`; see `factory.build_tree_cache`.

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
    drafts = draft_runners(context.tp_worker)
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
        ranks.copies = math.gcd(max(tp_size // heads, 1), node_ranks)
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
    config = share_of_rank(config, ranks.size, ranks.copies)
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
        # See `PoolLayers.beyond`.
        codec = BasisCodec(basis, rotation, beyond=int(bool(drafts)))
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
