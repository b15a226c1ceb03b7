"""Hooks of SGLang's scheduler: connect our tree cache to its queue and passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from impress_sglang.plugin.tree_cache import ImpressTreeCache
from impress_sglang.plugin.weights import watch_messages
from impress_sglang.serving.ranks import Ranks


def impress_cache_of(tree_cache: Any) -> ImpressTreeCache | None:
    """Return a tree cache of SGLang's if it is ours, else None."""
    return tree_cache if isinstance(tree_cache, ImpressTreeCache) else None


def connect(scheduler: Any) -> None:
    """Connect the tree cache to its complete scheduler."""
    cache = impress_cache_of(scheduler.tree_cache)
    if cache is not None:
        cache.attach(scheduler)
        watch_messages(scheduler, cache.weights)
        if cache.ranks.batches_in_flight > 1:
            scheduler.get_next_batch_to_run = functools.partial(
                around_next_batch, scheduler.get_next_batch_to_run, cache.ranks
            )


def around_next_batch(
    original: Callable[..., Any], ranks: Ranks, running_batch: Any, last_batch: Any
) -> Any:
    """In a pipeline, start no batch until all stages have finished what they do in lockstep."""
    from sglang.srt.managers.scheduler import NextBatchPlan

    if ranks.holds_batches():
        return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
    return original(running_batch=running_batch, last_batch=last_batch)


def after_policy(_: None, policy: Any, waiting_queue: Any, *__: Any, **___: Any) -> None:
    """After SGLang orders the waiting queue: reorder its head, and report the final order."""
    cache = impress_cache_of(policy.tree_cache)
    if cache is None:
        return
    if cache.loads.queue_order is not None:
        cache.loads.queue_order.arrange(waiting_queue)
    if cache.service.lookahead.has_waiting:
        # Prefixes of earlier requests are evicted last.
        cache.service.lookahead.set_queue([req.rid for req in waiting_queue])


def before_idle(scheduler: Any, *_: Any, **__: Any) -> None:
    cache = impress_cache_of(scheduler.tree_cache)
    if cache is not None:
        cache.on_idle()


def after_cached_details(result: Any, streamer: Any, *_: Any, **__: Any) -> Any:
    """Where SGLang reports tokens from a storage, name ours."""
    if "storage" in (result or ()) and impress_cache_of(streamer.tree_cache) is not None:
        result["storage_backend"] = "impress"
    return result
