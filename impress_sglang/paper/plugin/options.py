"""SGLang options of a server that loads within passes: chooses them, or refuses them."""

from __future__ import annotations

import logging
from typing import Any

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import UnsupportedError

# Attention backends whose rows can start at an offset.
BACKENDS = ("torch_native", "triton")
# Defaults by device, if none is requested and SGLang's default is not supported.
DEFAULT_ATTENTION = {"cpu": "torch_native", "cuda": "triton"}
# Logged by SGLang as the source of our declarations.
CHOSEN_BY = "impress"

logger = logging.getLogger(__name__)


def choose_attention(server_args: Any) -> None:
    """Choose a backend if none was requested, and SGLang's default is not supported."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import (
        declare_resolution,
        get_default_attn_backend,
        resolved_view,
        use_mla_backend,
    )

    # Requested by the user; declarations do not change these.
    asked = (
        server_args.attention_backend,
        server_args.prefill_attention_backend,
        server_args.decode_attention_backend,
    )
    view = resolved_view(server_args)
    default, chosen = DEFAULT_ATTENTION.get(view.device), view.attention_backend
    if asked != (None, None, None) or default is None:
        return
    if chosen is None:
        is_mla = use_mla_backend(server_args)
        chosen = get_default_attn_backend(server_args, is_mla, model_config_of(server_args))
    if chosen not in BACKENDS:
        declare_resolution(server_args, CHOSEN_BY, attention_backend=default)


def turn_off_graphs(server_args: Any) -> None:
    """Turn off CUDA graphs, which skip loading and start rows at 0; log it.

    Raises `UnsupportedError` if the user requested them.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolved_view
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    graphs = resolved_view(server_args).cuda_graph_config
    if graphs is None:
        return
    for phase in Phase.ALL:
        kind = getattr(graphs, phase).backend
        if kind == Backend.DISABLED:
            continue
        if (phase, "backend") in server_args._cuda_graph_config_locked:
            raise UnsupportedError(
                "parts of prefixes are loaded between the layers of a pass, which a CUDA graph "
                f"skips: drop --cuda-graph-backend-{phase} {kind}"
            )
        logger.info("CUDA graphs of %s are switched off: IMPRESS works in the pass", phase)
        graphs = with_phase(graphs, phase, backend=Backend.DISABLED)
    declare_resolution(server_args, CHOSEN_BY, cuda_graph_config=graphs)


def check_parts(config: ImpressConfig, options: Any) -> None:
    """Refuse options, of the resolved view, with which rows cannot start at an offset.

    Raises `UnsupportedError`, with one sentence.
    """
    refusal, common = None, options.attention_backend
    prefill = options.prefill_attention_backend or common
    decode = options.decode_attention_backend or common
    if options.speculative_algorithm is not None:
        refusal = f"passes without drafts, and this server has {options.speculative_algorithm}"
    elif options.page_size not in (None, 1):
        refusal = f"--page-size 1, and this server has {options.page_size}"
    elif prefill != decode or prefill not in BACKENDS:
        both = prefill if prefill == decode else f"{prefill} for prefill and {decode} for decode"
        refusal = f"one --attention-backend of {', '.join(BACKENDS)}, and this server has {both}"
    if refusal is not None:
        raise UnsupportedError(
            f"parts of prefixes need {refusal}: change that, or drop --impress-policy "
            f"{config.policy}"
        )
