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
from impress_sglang.plugin.compat import check_sglang
from impress_sglang.plugin.flags import (
    CONFIG_ATTRIBUTE,
    FROM_CLI_ATTRIBUTE,
    add_flags,
    config_from_arguments,
    config_of,
)
from impress_sglang.plugin.hooks import Hook, check_in_place, register
from impress_sglang.plugin.report_hooks import HOOKS as REPORT_HOOKS

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
    """For a server that loads within a pass: choose a backend, and keep prefill eager."""
    config = config_of(server_args)
    if config is None or not config.needs_parts:
        previous(server_args)
        return
    from impress_sglang.paper.plugin.backends import choose_attention, refuse_whole_graphs

    choose_attention(server_args)
    previous(server_args)
    _or_exit_if_cli(server_args, lambda: refuse_whole_graphs(server_args))


def _resolve_cache(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Check the options and the model, then choose our tree cache."""
    if config_of(server_args) is None:
        previous(server_args)
        return
    from sglang.srt.arg_groups.overrides import declare_resolution, resolved_view

    def check() -> None:
        from impress_sglang.plugin.capabilities import check_environment, check_model, check_options

        config = config_of(server_args)
        assert config is not None
        _check_seams()
        _require_writable(config)
        check_environment()
        check_options(config, resolved_view(server_args))
        if config.needs_parts:
            from impress_sglang.paper.plugin.backends import check_parts

            check_parts(config, resolved_view(server_args))
        check_model(_model_config(server_args))

    _or_exit_if_cli(server_args, check)
    previous(server_args)
    declare_resolution(server_args, BACKEND_NAME, radix_cache_backend=BACKEND_NAME)


def _before_load(runner: Any, *_: Any, **__: Any) -> None:
    """Let a CPU server run without an AMX build of sgl_kernel, and add what its kind needs.

    Only this switch of SGLang's rotary embedding is needed for that; the switch for all of SGLang
    (SGLANG_USE_CPU_ENGINE) needs kernels that the package on PyPI does not have.
    """
    config = config_of(runner.server_args)
    if config is None:
        return
    if runner.device == "cpu":
        from sglang.srt.layers.rotary_embedding import base

        base._is_cpu = True
    if config.needs_parts:
        from impress_sglang.paper.plugin.hooks import add_hooks

        add_hooks()


def _make_tree_cache(context: Any) -> Any:
    from impress_sglang.plugin.reports import opt_in

    config = config_of(context.server_args)
    if config is None:
        raise UnsupportedError("--radix-cache-backend impress needs --enable-impress")
    _check_seams()
    opt_in(config.policy)
    if config.needs_parts:
        from impress_sglang.paper.plugin.factory import make_tree_cache

        return make_tree_cache(context, config)
    from impress_sglang.plugin.tree_cache_factory import make_tree_cache as make

    return make(context, config)


def _after_init(result: Any, scheduler: Any, *_: Any, **__: Any) -> Any:
    """Connect the tree cache to the scheduler, once that is complete."""
    from impress_sglang.plugin.served_cache import served_cache_of
    from impress_sglang.plugin.weights import watch_messages

    cache = served_cache_of(scheduler.tree_cache)
    if cache is not None:
        cache.attach(scheduler)
        watch_messages(scheduler, cache.weights)
    return result


def _around_policy(
    original: Callable[..., None], policy: Any, waiting_queue: Any, *args: Any, **kwargs: Any
) -> None:
    """Let SGLang order the waiting queue, then reorder its head and note the final order."""
    from impress_sglang.plugin.served_cache import served_cache_of

    cache = served_cache_of(policy.tree_cache)
    if cache is None:
        original(policy, waiting_queue, *args, **kwargs)
        return
    if cache.queue_order is not None:
        cache.queue_order.restore(waiting_queue)
    original(policy, waiting_queue, *args, **kwargs)
    if cache.queue_order is not None:
        cache.queue_order.look(waiting_queue, lambda req: cache.prefetch(req, again=True))
        cache.queue_order.arrange(waiting_queue)
    cache.note_queue([req.rid for req in waiting_queue])


def _before_idle(scheduler: Any, *_: Any, **__: Any) -> None:
    """Tell the cache: nothing else may happen for a long time."""
    from impress_sglang.plugin.served_cache import served_cache_of

    cache = served_cache_of(scheduler.tree_cache)
    if cache is not None:
        cache.tell_idle()


def _after_state(result: Any, *arguments: Any, **keywords: Any) -> Any:
    from impress_sglang.plugin.reporting import add_totals

    return add_totals(result, *arguments, **keywords)


def _around_order(original: Callable[..., Any], *arguments: Any) -> Any:
    from impress_sglang.plugin.reporting import take_order

    return take_order(original, *arguments)


def _after_cached_details(result: Any, streamer: Any, *_: Any, **__: Any) -> Any:
    """Where SGLang reports tokens from a storage, say that the storage is ours."""
    from impress_sglang.plugin.served_cache import served_cache_of

    if "storage" in (result or ()) and served_cache_of(streamer.tree_cache) is not None:
        result["storage_backend"] = BACKEND_NAME
    return result


def _around_validation(original: Callable[..., None], *arguments: Any) -> None:
    from impress_sglang.plugin.truncation import around_validation

    around_validation(original, *arguments)


def _around_tokenized(original: Callable[..., Any], *arguments: Any) -> Any:
    from impress_sglang.plugin.truncation import around_tokenized

    return around_tokenized(original, *arguments)


def _after_chat(result: Any, chat: Any, request: Any, *_: Any, **__: Any) -> Any:
    from impress_sglang.plugin.truncation import keep_system_prompt

    return keep_system_prompt(result, chat, request)


def _before_http_server(server_args: Any, *_: Any, **__: Any) -> None:
    if config_of(server_args) is not None:
        from impress_sglang.plugin.reporting import add_routes

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
    Hook("sglang.srt.model_executor.model_runner.ModelRunner.load_model", _before_load, "before"),
    Hook("sglang.srt.managers.scheduler.Scheduler.__init__", _after_init, "after"),
    Hook(
        "sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority",
        _around_policy,
        "around",
    ),
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
)
