"""What only servers need that load within a pass: they add these hooks when they load the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry

from impress_sglang.paper.plugin.attention import adopt_backend
from impress_sglang.paper.plugin.eviction import refresh_waiting
from impress_sglang.paper.plugin.paged import keep_host_rows
from impress_sglang.plugin.hooks import Hook, check_in_place, register
from impress_sglang.plugin.served_cache import served_cache_of


def add_hooks() -> None:
    """Register and apply the hooks in this process.

    Raises:
        UnsupportedError: names the targets of hooks that are not in place.
    """
    register(HOOKS)
    HookRegistry.apply_hooks()
    check_in_place(HOOKS)


def _after_queued(result: Any, scheduler: Any, req: Any, *_: Any, **__: Any) -> Any:
    cache = served_cache_of(scheduler.tree_cache)
    if cache is not None:
        cache.prefetch(req)
    return result


def _after_backend_wrapper(backend: Any, runner: Any, *_: Any, **__: Any) -> Any:
    adopt_backend(backend, runner)
    return backend


def _after_batch(forward_batch: Any, _: Any, batch: Any, runner: Any, **__: Any) -> Any:
    if getattr(getattr(runner, "attn_backend", None), "keeps_host_rows", False):
        keep_host_rows(forward_batch, batch)
    return forward_batch


def _around_refresh(original: Callable[..., None], req: Any, tree_cache: Any) -> None:
    refresh_waiting(original, req, tree_cache)


HOOKS = (
    Hook("sglang.srt.managers.scheduler.Scheduler._prefetch_kvcache", _after_queued, "after"),
    Hook(
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
        _after_backend_wrapper,
        "after",
    ),
    Hook(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        _after_batch,
        "after",
    ),
    Hook("sglang.srt.managers.schedule_policy.touch_waiting_prefix", _around_refresh, "around"),
)
