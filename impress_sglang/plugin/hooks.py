"""Hooks of SGLang's scheduler: its tree cache, if that is ours, takes part in queue and passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from impress_sglang.plugin.served_cache import ServedCache
from impress_sglang.plugin.weights import watch_messages
from impress_sglang.serving.ranks import Ranks


def served_cache_of(tree_cache: Any) -> ServedCache | None:
    """A tree cache of SGLang's that serves from our store; None if it is not ours."""
    return tree_cache if isinstance(tree_cache, ServedCache) else None


def connect(scheduler: Any) -> None:
    """Connect the tree cache to its scheduler, which is complete."""
    cache = served_cache_of(scheduler.tree_cache)
    if cache is not None:
        cache.attach(scheduler)
        watch_messages(scheduler, cache.weights)
        if cache.ranks.batches > 1:
            scheduler.get_next_batch_to_run = functools.partial(
                around_next_batch, scheduler.get_next_batch_to_run, cache.ranks
            )


def around_next_batch(
    original: Callable[..., Any], ranks: Ranks, running_batch: Any, last_batch: Any
) -> Any:
    """Let no batch begin in a pipeline until all its stages have done what they do together."""
    from sglang.srt.managers.scheduler import NextBatchPlan

    if ranks.holds():
        return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
    return original(running_batch=running_batch, last_batch=last_batch)


def after_policy(_: None, policy: Any, waiting_queue: Any, *__: Any, **___: Any) -> None:
    """SGLang has ordered the waiting queue: reorder its head, and note the final order."""
    cache = served_cache_of(policy.tree_cache)
    if cache is None:
        return
    if cache.loads.order is not None:
        cache.loads.order.arrange(waiting_queue)
    if cache.service.lookahead.awaits:
        # What earlier requests use is evicted last.
        cache.service.lookahead.order([req.rid for req in waiting_queue])


def before_idle(scheduler: Any, *_: Any, **__: Any) -> None:
    """Nothing else may happen for a long time."""
    cache = served_cache_of(scheduler.tree_cache)
    if cache is not None:
        cache.rest()


def after_cached_details(result: Any, streamer: Any, *_: Any, **__: Any) -> Any:
    """Where SGLang reports tokens from a storage, say that the storage is ours."""
    if "storage" in (result or ()) and served_cache_of(streamer.tree_cache) is not None:
        result["storage_backend"] = "impress"
    return result
