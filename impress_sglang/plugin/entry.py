"""Entry point of SGLang's plugin group `sglang.srt.plugins`: only registers.

SGLang calls `activate` in each of its processes and swallows exceptions, so correct answers may not
depend on anything here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from impress_sglang.config import OPTIONS, ImpressConfig
from impress_sglang.errors import ConfigError, ImpressError, UnsupportedError
from impress_sglang.plugin import compat
from impress_sglang.plugin.compat import (
    CONFIG_ATTRIBUTE,
    FROM_CLI_ATTRIBUTE,
    Hook,
    check_sglang,
    config_of,
)

_DEST_PREFIX = "impress_"
BACKEND_NAME = "impress"
_OURS = "impress_sglang.plugin"
_T = TypeVar("_T")


def activate() -> None:
    """Register flags, hooks and the tree cache; called by SGLang in every process.

    Hooks come last: if anything before fails, there are no flags, so a server that should use
    IMPRESS does not start without it.
    """
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_radix_cache_backend(BACKEND_NAME, _make_tree_cache)
    register_resolution_hook("handle_attention_backend_compatibility")(_resolve_attention)
    register_resolution_hook("handle_cache_compatibility")(_resolve_cache)
    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))


class _Enable(argparse._StoreTrueAction):
    """`--enable-impress`: immediately checks that its requirements are in place.

    Later would be too late: a hook keeps the parsed options. SGLang's `--config` takes only flags
    of this class.
    """

    def __call__(self, parser: Any, namespace: Any, *_: Any) -> None:
        _or_exit(lambda: check_sglang(HOOKS))
        setattr(namespace, self.dest, True)


def _after_add_cli_args(result: Any, parser: argparse.ArgumentParser) -> None:
    defaults = ImpressConfig()
    group = parser.add_argument_group("IMPRESS: importance-informed prefix storage")
    group.add_argument(
        "--enable-impress",
        action=_Enable,
        help="Keep prefixes on SSD, and load them in few bits.",
    )
    for option in OPTIONS:
        group.add_argument(
            option.flag,
            dest=_DEST_PREFIX + option.field,
            type=option.parse,
            choices=option.rule.choices,
            default=None,
            help=f"{option.help} Default: {getattr(defaults, option.field)}.",
        )


def _after_from_cli_args(server_args: Any, *arguments: Any) -> Any:
    def parse() -> ImpressConfig | None:
        parsed = arguments[-1]
        values = {o: getattr(parsed, _DEST_PREFIX + o.field, None) for o in OPTIONS}
        given = {option: value for option, value in values.items() if value is not None}
        if getattr(parsed, "enable_impress", False):
            return ImpressConfig.from_options({o.field: value for o, value in given.items()})
        if given:
            flags = ", ".join(option.flag for option in given)
            raise ConfigError(f"{flags} needs --enable-impress")
        return None

    if (config := _or_exit(parse)) is not None:
        setattr(server_args, CONFIG_ATTRIBUTE, config)
        setattr(server_args, FROM_CLI_ATTRIBUTE, True)
    return server_args


def _resolve_attention(server_args: Any, previous: Callable[[Any], None]) -> None:
    config = config_of(server_args)
    if config is None or not config.needs_parts:
        previous(server_args)
        return
    from impress_sglang.paper.plugin.options import choose_attention, turn_off_graphs

    choose_attention(server_args)
    previous(server_args)
    _or_exit(lambda: turn_off_graphs(server_args), server_args)


def _resolve_cache(server_args: Any, previous: Callable[[Any], None]) -> None:
    config = config_of(server_args)
    if config is None:
        previous(server_args)
        return
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import declare_resolution, resolved_view

    def check() -> None:
        from impress_sglang.plugin.rank_groups import share_counts
        from impress_sglang.plugin.unsupported import check_environment, check_model, check_options
        from impress_sglang.storage.directory import require_writable
        from impress_sglang.store.bucket import open_bucket

        check_sglang(HOOKS)
        require_writable(config.ssd_path)
        open_bucket(config)
        check_environment()
        options = resolved_view(server_args)
        check_options(config, options)
        if config.needs_parts:
            from impress_sglang.paper.plugin.options import check_parts

            check_parts(config, options)
        check_model(model_config_of(server_args), config)
        share_counts(server_args, options)

    _or_exit(check, server_args)
    previous(server_args)
    declare_resolution(server_args, BACKEND_NAME, radix_cache_backend=BACKEND_NAME)


def _make_tree_cache(context: Any) -> Any:
    config = config_of(context.server_args)
    if config is None:
        raise UnsupportedError("--radix-cache-backend impress needs --enable-impress")
    check_sglang(HOOKS)
    import_module(f"{_OURS}.report_transport").opt_in(config.policy)
    module = "paper.plugin.part_cache" if config.needs_parts else "plugin.factory"
    return import_module(f"impress_sglang.{module}").make_tree_cache(context, config)


def _around_init(
    original: Callable[..., None], scheduler: Any, server_args: Any, *args: Any, **kwargs: Any
) -> None:
    """Prepare for the model, and connect the tree cache once the scheduler is complete."""
    config = config_of(server_args)
    if config is not None and server_args.device == "cpu":
        # Lets a CPU server run without an AMX build of sgl_kernel. Only this switch of SGLang's
        # rotary embedding is needed for that; the switch for all of SGLang
        # (SGLANG_USE_CPU_ENGINE) needs kernels that the package on PyPI does not have.
        from sglang.srt.layers.rotary_embedding import base

        base._is_cpu = True
    compat.scheduler, weights = scheduler, None
    if server_args.hicache_storage_backend == "dynamic":
        # If it is ours, it reads the identity of the weights while the scheduler is made.
        from impress_sglang.hicache.plugin.backend import remember_scheduler

        weights = remember_scheduler(scheduler)
    original(scheduler, server_args, *args, **kwargs)
    from impress_sglang.plugin.hooks import connect

    connect(scheduler)
    if weights is not None:
        weights.watch()


def _or_exit(action: Callable[[], _T], server_args: Any = None) -> _T:
    """Run a check; on refusal exit with one sentence and status 2, but not in an `Engine`, whose
    `server_args` are not from a command line."""
    try:
        return action()
    except ImpressError as error:
        if server_args is not None and not getattr(server_args, FROM_CLI_ATTRIBUTE, False):
            raise
        print(f"sglang: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _later(name: str) -> Callable[..., Any]:
    """Return a function of this package, `module.function`, that is imported when called."""
    module, _, function = name.partition(".")

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(f"{_OURS}.{module}"), function)(*args, **kwargs)

    return call


_MANAGERS = "sglang.srt.managers"
_TOKENIZER = f"{_MANAGERS}.tokenizer_manager.TokenizerManager"
_COMPONENTS = f"{_MANAGERS}.scheduler_components"
_STREAMER = f"{_COMPONENTS}.output_streamer.SchedulerOutputStreamer"
_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
_HTTP = "sglang.srt.entrypoints.http_server"
HOOKS = tuple(
    Hook(target, function if callable(function) else _later(function), kind)
    for kind, target, function in (
        ("after", "sglang.srt.server_args.ServerArgs.add_cli_args", _after_add_cli_args),
        ("after", "sglang.srt.server_args.ServerArgs.from_cli_args", _after_from_cli_args),
        # Requests, in the process that tokenizes.
        ("after", f"{_CHAT}._convert_to_internal_request", "truncation.keep_system_prompt"),
        ("around", f"{_TOKENIZER}._validate_one_request", "truncation.around_validation"),
        ("around", f"{_TOKENIZER}._create_tokenized_object", "truncation.around_tokenized"),
        # The scheduler, and its queue.
        ("around", f"{_MANAGERS}.scheduler.Scheduler.__init__", _around_init),
        (
            "after",
            f"{_MANAGERS}.schedule_policy.SchedulePolicy.calc_priority",
            "hooks.after_policy",
        ),
        ("before", f"{_MANAGERS}.scheduler.Scheduler.on_idle", "hooks.before_idle"),
        # Reports.
        ("after", f"{_STREAMER}.get_cached_tokens_details", "hooks.after_cached_details"),
        ("after", f"{_STREAMER}.build_additional_customized_info", "report_transport.after_built"),
        (
            "before",
            f"{_COMPONENTS}.output_sender.SenderWrapper.send_output",
            "report_transport.before_output",
        ),
        (
            "around",
            f"{_TOKENIZER}._accumulate_request_meta_info",
            "report_transport.around_meta_info",
        ),
        ("around", f"{_TOKENIZER}._handle_abort_req", "report_transport.around_abort"),
        # Admin requests.
        ("around", f"{_MANAGERS}.scheduler.Scheduler.set_internal_state", "admin.around_message"),
        ("before", f"{_HTTP}._setup_and_run_http_server", "routes.before_http_server"),
    )
)
