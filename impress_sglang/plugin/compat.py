"""What the integration relies on in SGLang: releases, names and hooks, checked at startup.

SGLang swallows exceptions of a plugin and only logs a hook that it could not apply, and a later
plugin may replace a hooked function. That would go unnoticed until a request gets a wrong answer.
Our configuration travels with SGLang's server arguments.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

from packaging.version import Version

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import UnsupportedError

logger = logging.getLogger(__name__)

# ServerArgs drops unknown arguments; underscore attributes survive its pickling to child processes.
CONFIG_ATTRIBUTE = "_impress_config"
FROM_CLI_ATTRIBUTE = "_impress_from_cli"
# The scheduler of this process, set before its `__init__`: `TreeCacheBuildContext` lacks drafts.
scheduler: Any = None

OLDEST, NEWEST = "0.5.22", "0.5.23"
"""Tested releases; a newer one starts if it passes the checks at startup."""

RELIED_ON = (
    "sglang.srt.arg_groups.overrides.declare_resolution",
    "sglang.srt.arg_groups.overrides.get_default_attn_backend",
    "sglang.srt.arg_groups.resolution_hooks.register_resolution_hook",
    "sglang.srt.configs.hybrid_arch.mambaish_config",
    "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend",
    "sglang.srt.layers.rotary_embedding.base._is_cpu",
    "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",
    "sglang.srt.managers.schedule_batch.Req.reset_for_retract",
    "sglang.srt.managers.schedule_policy.AddReqResult.CONTINUE",
    "sglang.srt.managers.schedule_policy.CLIP_MAX_NEW_TOKENS",
    "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
    "sglang.srt.managers.scheduler.Scheduler.process_pending_chunked_abort",
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc_rows",
    "sglang.srt.mem_cache.registry.register_radix_cache_backend",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.lock",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.path_device_indices",
    "sglang.utils.TypeBasedDispatcher",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Hook:
    """A function of ours that hooks a function of SGLang's.

    `target` is the dotted name of the latter; `kind` is SGLang's `before`, `after` or `around`.
    """

    target: str
    function: Callable[..., Any]
    kind: str


def sglang_version() -> str:
    return importlib.metadata.version("sglang")


def check_sglang(hooks: Sequence[Hook]) -> None:
    """Refuse an SGLang that is too old, lacks names we need, or would not call a hook.

    Raises `UnsupportedError` with one sentence.
    """
    version = sglang_version()
    if Version(version).release < Version(OLDEST).release:
        raise UnsupportedError(
            f"impress-sglang supports SGLang {OLDEST} and later, but {version} is installed; run: "
            f"pip install sglang=={NEWEST}"
        )
    missing = [name for name in RELIED_ON if _found(name) is None]
    if missing:
        raise UnsupportedError(f"this build of SGLang {version} lacks {', '.join(missing)}")
    missing = [hook.target for hook in hooks if not _is_in_place(hook)]
    if missing:
        raise UnsupportedError(
            f"hooks of IMPRESS are not in place at {', '.join(missing)}; check that no other "
            "plugin replaces them, and what SGLang logged when it loaded plugins"
        )


def warn_if_untested() -> None:
    """Warn if the release is newer than the tested ones."""
    version = sglang_version()
    if Version(version).release > Version(NEWEST).release:
        logger.warning(
            "SGLang %s is newer than the releases that IMPRESS was tested with (%s to %s); it "
            "passed the checks of the start",
            version,
            OLDEST,
            NEWEST,
        )


def config_of(server_args: Any) -> ImpressConfig | None:
    """Return the configuration that travels with SGLang's server arguments; None if IMPRESS is off.

    Without a parsed command line (`sglang.Engine`) it is read from the environment, once, and kept
    with the arguments, which child processes get. That raises `ConfigError` for a wrong value.
    """
    config: ImpressConfig | None = getattr(server_args, CONFIG_ATTRIBUTE, None)
    if config is None and (config := ImpressConfig.from_environment()) is not None:
        setattr(server_args, CONFIG_ATTRIBUTE, config)
    return config


def _found(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None


def _is_in_place(hook: Hook) -> bool:
    """Whether a wrapper of the target, at any depth, refers to the hook's function."""
    # A class or static method has its function in an attribute.
    function = _found(hook.target)
    function = getattr(function, "__func__", function)
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            if cell.cell_contents is hook.function:
                return True
        function = getattr(function, "__wrapped__", None)
    return False
