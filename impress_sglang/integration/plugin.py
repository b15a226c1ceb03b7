"""Entry point of SGLang's plugin group `sglang.srt.plugins`: registers, and does nothing else.

SGLang calls `activate` in each of its processes and swallows exceptions, so correct answers may not
depend on anything here: the tree factory checks that the attention backend is ours, or refuses.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import ImpressError, UnsupportedError
from impress_sglang.integration.compat import WEIGHT_HANDLERS, check_sglang
from impress_sglang.integration.flags import (
    CONFIG_ATTRIBUTE,
    FROM_CLI_ATTRIBUTE,
    add_flags,
    config_from_arguments,
    config_of,
)
from impress_sglang.integration.hooks import Hook, check_in_place, register
from impress_sglang.integration.report_hooks import HOOKS as REPORT_HOOKS

BACKEND_NAME = "impress"
_T = TypeVar("_T")

logger = logging.getLogger(__name__)


def activate() -> None:
    """Register flags, hooks and the tree cache; called by SGLang in every process.

    Hooks come last: if anything before them fails, there are no flags, so a server that is to use
    IMPRESS does not start without it.
    """
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    register_radix_cache_backend(BACKEND_NAME, _make_tree_cache)
    register_resolution_hook("handle_attention_backend_compatibility")(_resolve_attention)
    register_resolution_hook("handle_cache_compatibility")(_resolve_cache)
    register(HOOKS)


class _Enable(argparse.Action):
    """`--enable-impress`: checks at once that everything it needs is in place.

    Later would be too late: what was parsed is itself kept by a hook.
    """

    def __call__(self, parser: Any, namespace: Any, *_: Any) -> None:
        _or_exit(_check_seams)
        setattr(namespace, self.dest, True)


def _after_add_cli_args(result: Any, parser: argparse.ArgumentParser) -> None:
    add_flags(parser, _Enable)


def _after_from_cli_args(server_args: Any, *arguments: Any) -> Any:
    args = arguments[-1]

    def configure() -> ImpressConfig | None:
        config = config_from_arguments(args)
        if config is not None:
            _require_writable(config)
        return config

    config = _or_exit(configure)
    if config is not None:
        setattr(server_args, CONFIG_ATTRIBUTE, config)
        setattr(server_args, FROM_CLI_ATTRIBUTE, True)
    return server_args


def _resolve_attention(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Choose a backend if none was asked for, check the outcome, and keep prefill eager."""
    config = config_of(server_args)
    if config is None:
        previous(server_args)
        return
    from sglang.srt.arg_groups.overrides import declare_resolution, resolved_view

    from impress_sglang.integration.guards import DEFAULT_ATTENTION, attention_of, check_attention
    from impress_sglang.integration.judged_backends import BACKENDS, OFFSET_ROWS

    # What the user asked for; declarations do not change these.
    asked = (
        server_args.attention_backend,
        server_args.prefill_attention_backend,
        server_args.decode_attention_backend,
    )
    known = OFFSET_ROWS if config.needs_parts else tuple(BACKENDS)
    default = DEFAULT_ATTENTION.get(resolved_view(server_args).device)
    unasked = asked == (None, None, None) and default is not None
    if unasked and _usual_attention(server_args) not in known:
        declare_resolution(server_args, BACKEND_NAME, attention_backend=default)
    previous(server_args)
    chosen = attention_of(resolved_view(server_args))
    _or_exit_if_cli(server_args, lambda: check_attention(*chosen))
    _or_exit_if_cli(server_args, lambda: _refuse_whole_graphs(server_args))


def _usual_attention(server_args: Any) -> str:
    """The backend that SGLang chooses if none is asked for."""
    from sglang.srt.arg_groups.overrides import (
        get_default_attn_backend,
        resolved_view,
        use_mla_backend,
    )

    usual: str | None = resolved_view(server_args).attention_backend
    if usual is None:
        is_mla = use_mla_backend(server_args)
        usual = get_default_attn_backend(server_args, is_mla, _model_config(server_args))
    return usual


def _refuse_whole_graphs(server_args: Any) -> None:
    """Turn off CUDA graphs of a whole prefill, and log it; refuse them if the user asks for them.

    Breakable ones leave attention out, and only batches that load nothing run in them
    (`PrefixAttention.can_run_prefill_cuda_graph`).
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolved_view
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    graphs = resolved_view(server_args).cuda_graph_config
    if graphs is None or graphs.prefill.backend in (Backend.DISABLED, Backend.BREAKABLE):
        return
    kind = graphs.prefill.backend
    why = "IMPRESS works between the layers of prefill, and a graph of the whole pass skips that"
    if (Phase.PREFILL, "backend") in server_args._cuda_graph_config_locked:
        raise UnsupportedError(f"{why}: drop --cuda-graph-backend-prefill {kind}")
    logger.info("%s CUDA graphs of prefill are switched off: %s", kind, why)
    declare_resolution(
        server_args,
        BACKEND_NAME,
        cuda_graph_config=with_phase(graphs, Phase.PREFILL, backend=Backend.DISABLED),
    )


def _resolve_cache(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Check the options and the model, then choose our tree cache."""
    if config_of(server_args) is None:
        previous(server_args)
        return
    from sglang.srt.arg_groups.overrides import declare_resolution, resolved_view

    def check() -> None:
        from impress_sglang.integration.guards import (
            check_arguments,
            check_environment,
            check_model,
        )

        config = config_of(server_args)
        assert config is not None
        _check_seams()
        _require_writable(config)
        check_environment()
        check_arguments(config, resolved_view(server_args))
        check_model(_model_config(server_args))

    _or_exit_if_cli(server_args, check)
    previous(server_args)
    declare_resolution(server_args, BACKEND_NAME, radix_cache_backend=BACKEND_NAME)


def _before_load(runner: Any, *_: Any, **__: Any) -> None:
    """Let a CPU server run without an AMX build of sgl_kernel.

    Only this switch of SGLang's rotary embedding is needed; the switch for all of SGLang
    (SGLANG_USE_CPU_ENGINE) needs kernels that the package on PyPI does not have.
    """
    if config_of(runner.server_args) is not None and runner.device == "cpu":
        from sglang.srt.layers.rotary_embedding import base

        base._is_cpu = True


def _before_verify(sampling_params: Any, *_: Any, **__: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.runtime_context import get_server_args

    from impress_sglang.integration.guards import parts_refusal
    from impress_sglang.serving.custom_params import check_custom_params

    # Sampling parameters also occur in processes that belong to no server.
    if sampling_params.custom_params:
        server_args = get_server_args()
        config = config_of(server_args)
        if config is not None:
            refusal = parts_refusal(resolved_view(server_args))
            check_custom_params(sampling_params.custom_params, config, refusal)


def _after_backend_wrapper(backend: Any, runner: Any, *_: Any, **__: Any) -> Any:
    if config_of(runner.server_args) is not None:
        from impress_sglang.integration.attention import adopt_backend

        adopt_backend(backend, runner)
    return backend


def _after_batch(forward_batch: Any, _: Any, batch: Any, runner: Any, **__: Any) -> Any:
    if getattr(getattr(runner, "attn_backend", None), "keeps_host_rows", False):
        from impress_sglang.integration.paged import keep_host_rows

        keep_host_rows(forward_batch, batch)
    return forward_batch


def _make_tree_cache(context: Any) -> Any:
    from impress_sglang.integration.factory import make_tree_cache
    from impress_sglang.integration.reports import opt_in

    config = config_of(context.server_args)
    if config is None:
        raise UnsupportedError("--radix-cache-backend impress needs --enable-impress")
    _check_seams()
    opt_in()
    return make_tree_cache(context, config)


def _after_queued(result: Any, scheduler: Any, req: Any, *_: Any, **__: Any) -> Any:
    from impress_sglang.integration.radix_cache import ImpressRadixCache

    if isinstance(scheduler.tree_cache, ImpressRadixCache):
        scheduler.tree_cache.prefetch(req)
    return result


def _around_policy(
    original: Callable[..., None], policy: Any, waiting_queue: Any, *args: Any, **kwargs: Any
) -> None:
    """Let SGLang order the waiting queue, then reorder its head and note the final order."""
    from impress_sglang.integration.radix_cache import ImpressRadixCache

    cache = policy.tree_cache
    ours = isinstance(cache, ImpressRadixCache)
    order = cache.runtime.queue_order if ours else None
    if order is not None:
        order.restore(waiting_queue)
    original(policy, waiting_queue, *args, **kwargs)
    if order is not None:
        order.look(waiting_queue, lambda req: cache.prefetch(req, again=True))
        order.arrange(waiting_queue)
    if ours:
        cache.runtime.note_queue([req.rid for req in waiting_queue])


def _around_refresh(original: Callable[..., None], req: Any, tree_cache: Any) -> None:
    from impress_sglang.integration.eviction import refresh_waiting

    refresh_waiting(original, req, tree_cache)


def _after_admission(result: Any, adder: Any, req: Any, *_: Any, **__: Any) -> Any:
    from impress_sglang.integration.overtaking import let_others_pass

    return let_others_pass(result, adder, req)


def _after_pass(result: Any, scheduler: Any, *_: Any, **__: Any) -> Any:
    """Give a request that failed in a chunk of its prefill no further chunk.

    SGLang does the same, at this place, where an external cache could not load.
    """
    from impress_sglang.integration.radix_cache import ImpressRadixCache

    cache, chunked = scheduler.tree_cache, scheduler.chunked_req
    if (
        chunked is not None
        and isinstance(cache, ImpressRadixCache)
        and cache.passes.has_failed(chunked)
    ):
        scheduler._pending_chunked_abort_req = chunked
    return result


def _before_idle(scheduler: Any, *_: Any, **__: Any) -> None:
    """Tell the metrics what has happened: nothing else may happen for a long time."""
    from impress_sglang.integration.radix_cache import ImpressRadixCache

    if isinstance(scheduler.tree_cache, ImpressRadixCache):
        scheduler.tree_cache.runtime.tell_metrics(idle=True)


def _after_state(result: Any, *arguments: Any, **keywords: Any) -> Any:
    from impress_sglang.integration.reporting import add_totals

    return add_totals(result, *arguments, **keywords)


def _around_order(original: Callable[..., Any], *arguments: Any) -> Any:
    from impress_sglang.integration.reporting import take_order

    return take_order(original, *arguments)


def _around_weights(original: Callable[..., Any], owner: Any, request: Any) -> Any:
    from impress_sglang.integration.radix_cache import ImpressRadixCache
    from impress_sglang.integration.weights import around_handler

    # The scheduler handles some messages itself, and leaves others to its weight updater.
    if isinstance(getattr(owner, "scheduler", owner).tree_cache, ImpressRadixCache):
        return around_handler(original, owner, request)
    return original(owner, request)


def _after_cached_details(result: Any, streamer: Any, *_: Any, **__: Any) -> Any:
    """Where SGLang reports tokens from a storage, say that the storage is ours."""
    from impress_sglang.integration.radix_cache import ImpressRadixCache

    if isinstance(streamer.tree_cache, ImpressRadixCache) and "storage" in (result or ()):
        result["storage_backend"] = BACKEND_NAME
    return result


def _around_validation(original: Callable[..., None], *arguments: Any) -> None:
    from impress_sglang.integration.truncation import around_validation

    around_validation(original, *arguments)


def _around_tokenized(original: Callable[..., Any], *arguments: Any) -> Any:
    from impress_sglang.integration.truncation import around_tokenized

    return around_tokenized(original, *arguments)


def _after_chat(result: Any, chat: Any, request: Any, *_: Any, **__: Any) -> Any:
    from impress_sglang.integration.truncation import keep_system_prompt

    return keep_system_prompt(result, chat, request)


def _before_http_server(server_args: Any, *_: Any, **__: Any) -> None:
    if config_of(server_args) is not None:
        from impress_sglang.integration.reporting import add_routes

        add_routes()


def _check_seams() -> None:
    """Check that this is a supported SGLang, and that all hooks are in place in this process."""
    check_sglang()
    check_in_place(HOOKS)


def _model_config(server_args: Any) -> Any:
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return model_config_of(server_args)


def _require_writable(config: ImpressConfig) -> None:
    from impress_sglang.storage.directory import require_writable

    require_writable(config.ssd_path)


def _or_exit_if_cli(server_args: Any, action: Callable[[], None]) -> None:
    """Run a check; if started by a command line, exit with one sentence and status 2 on refusal."""
    if getattr(server_args, FROM_CLI_ATTRIBUTE, False):
        _or_exit(action)
    else:
        action()


def _or_exit(action: Callable[[], _T]) -> _T:
    try:
        return action()
    except ImpressError as error:
        print(f"sglang: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


HOOKS = (
    Hook("sglang.srt.server_args.ServerArgs.add_cli_args", _after_add_cli_args, "after"),
    Hook("sglang.srt.server_args.ServerArgs.from_cli_args", _after_from_cli_args, "after"),
    Hook(
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
        _after_backend_wrapper,
        "after",
    ),
    Hook("sglang.srt.model_executor.model_runner.ModelRunner.load_model", _before_load, "before"),
    Hook(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        _after_batch,
        "after",
    ),
    Hook("sglang.srt.sampling.sampling_params.SamplingParams.verify", _before_verify, "before"),
    Hook("sglang.srt.managers.scheduler.Scheduler._prefetch_kvcache", _after_queued, "after"),
    Hook("sglang.srt.managers.schedule_policy.touch_waiting_prefix", _around_refresh, "around"),
    Hook(
        "sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority",
        _around_policy,
        "around",
    ),
    Hook("sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req", _after_admission, "after"),
    Hook("sglang.srt.managers.scheduler.Scheduler.run_batch", _after_pass, "after"),
    Hook("sglang.srt.managers.scheduler.Scheduler.on_idle", _before_idle, "before"),
    Hook("sglang.srt.managers.scheduler.Scheduler.get_internal_state", _after_state, "after"),
    Hook("sglang.srt.managers.scheduler.Scheduler.set_internal_state", _around_order, "around"),
    Hook(
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
        ".get_cached_tokens_details",
        _after_cached_details,
        "after",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        _around_validation,
        "around",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        _around_tokenized,
        "around",
    ),
    Hook(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request",
        _after_chat,
        "after",
    ),
    Hook(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        _before_http_server,
        "before",
    ),
    *REPORT_HOOKS,
    *(Hook(target, _around_weights, "around") for target in WEIGHT_HANDLERS),
)
