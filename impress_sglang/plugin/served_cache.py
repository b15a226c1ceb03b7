"""What hooks, routes and admin requests use of a tree cache of ours, which has it as `impress`."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from impress_sglang.plugin.known import KnownRequests
from impress_sglang.plugin.prefix_loads import PrefixLoads
from impress_sglang.plugin.tree_nodes import Sweeps
from impress_sglang.plugin.weights import WeightWatch, watch_messages
from impress_sglang.serving.custom_params import load_options_of
from impress_sglang.serving.ranks import Ranks
from impress_sglang.serving.report import new_report
from impress_sglang.serving.sights import Sights
from impress_sglang.storage.quality import EXACT
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.policies import LoadOptions

logger = logging.getLogger(__name__)

UNCHECKED, RUNNING, OK, FAILED = "unchecked", "running", "ok", "failed"
# Seconds after which a step of a check looks at nothing further.
STEP_S = 0.001


class ServedCache:
    """What one tree cache serves, and how; owned by the scheduler's thread."""

    def __init__(
        self,
        requests: KnownRequests,
        weights: WeightWatch,
        sweeps: Sweeps,
        sights: Sights | None,
        check_requests: Callable[[], None],
        reorder: Callable[[], dict[str, int] | None] = lambda: None,
    ) -> None:
        """`sights` counts prompts; None unless that decides what is stored.

        `check_requests` compares requests, the queue and slots with each other; `reorder` searches
        for prefixes worth reordering, and returns None where nothing is ever reordered.
        """
        self.cache, self.ranks = requests.cache, requests.ranks
        self.service, self.planner = requests.service, requests.planner
        self.weights, self.sweeps, self.sights, self.reorder = weights, sweeps, sights, reorder
        self.loads: PrefixLoads | None = None
        """The load jobs; None where prefixes are loaded within passes, and before it serves."""
        self.integrity = UNCHECKED
        """The result of the last check, or that one is running."""
        self._check_requests = check_requests
        self._steps: Iterator[None] = iter(())

    def clear(self) -> None:
        """Note that the tree is empty."""
        self.sweeps.clear()
        if self.loads is not None and self.loads.order is not None:
            self.loads.order.forget_states()

    def check(self, *, begin: bool) -> str:
        """Continue the integrity check for a moment, or `begin` one if none is running.

        Requests are served between two moments: there may be much to compare. Returns the worst
        state on any rank, which is running until it has ended on all.
        """
        if begin and self.integrity != RUNNING:
            self.integrity, self._steps = RUNNING, self._check_steps()
        if self.integrity == RUNNING:
            self._go_on()
        if self.ranks.alone:
            return self.integrity
        states = (FAILED, RUNNING, UNCHECKED, OK)
        worst = states[self.ranks.least([states.index(self.integrity)])[0]]
        if worst != RUNNING:
            self.integrity = worst
        return worst

    def _go_on(self) -> None:
        end = time.perf_counter() + STEP_S
        try:
            for _ in self._steps:
                if time.perf_counter() >= end:
                    return
        except Exception:
            logger.exception("the integrity check of IMPRESS failed")
            self.integrity = FAILED
        else:
            self.integrity = OK

    def _check_steps(self) -> Iterator[None]:
        self._check_requests()
        yield
        served, store = self.service.served, None
        # Another store may have taken its place meanwhile, and is checked as well.
        while served.opened is not store:
            store = served.opened
            for _ in () if store is None else store.check_steps():
                yield
                if served.opened is not store:
                    break

    def summary(self) -> dict[str, Any]:
        """What `GET /impress/stats` shows."""
        return {**self.service.summary(), "integrity": self.integrity}

    def foretell(self, namespace: str, tokens: Tokens, *, exactly: bool = False) -> dict[str, Any]:
        """What is stored of a prompt that is not being served, and why no more of it.

        `exactly`: of what was computed so.
        """
        service, sights = self.service, self.sights
        wanted = LoadOptions() if exactly else load_options_of(None, service.config)
        least = EXACT if exactly else service.least(wanted)
        stored = self.planner.match(namespace, tokens, least).num_tokens
        report = new_report(service.policy.name, stored, len(tokens))
        seen = None if sights is None else sights.note(namespace, tokens, count=False)
        why = self.planner.explain(report, namespace, tokens, wanted, seen, admitted=False)
        return {"tokens": len(tokens), "stored_tokens": stored, "why": why}


def served_cache_of(tree_cache: Any) -> ServedCache | None:
    """What a tree cache of SGLang's serves from our store; None if it is not ours."""
    cache: ServedCache | None = getattr(tree_cache, "impress", None)
    return cache


# Hooks of the scheduler.


def connect(scheduler: Any) -> None:
    """Connect the tree cache to its scheduler, which is complete."""
    cache = served_cache_of(scheduler.tree_cache)
    if cache is not None:
        if hasattr(cache.cache, "attach"):
            # What loads within passes needs no scheduler.
            cache.cache.attach(scheduler)
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


def around_policy(
    original: Callable[..., None], policy: Any, waiting_queue: Any, *args: Any, **kwargs: Any
) -> None:
    """Let SGLang order the waiting queue, then reorder its head and note the final order."""
    cache = served_cache_of(policy.tree_cache)
    loads = None if cache is None else cache.loads
    order = None if loads is None else loads.order
    if order is not None:
        order.restore(waiting_queue)
    original(policy, waiting_queue, *args, **kwargs)
    if loads is not None and order is not None:
        order.look(waiting_queue, loads.look_again)
        order.arrange(waiting_queue)
    if cache is not None and cache.service.lookahead.awaits:
        # What earlier requests use is evicted last.
        cache.service.lookahead.order([req.rid for req in waiting_queue])


def before_idle(scheduler: Any, *_: Any, **__: Any) -> None:
    """Wait a little for jobs, or tell the metrics: nothing else may happen for a long time."""
    cache = served_cache_of(scheduler.tree_cache)
    if cache is not None and not (cache.loads is not None and cache.loads.rest()):
        cache.service.tell_metrics(idle=True)


def after_cached_details(result: Any, streamer: Any, *_: Any, **__: Any) -> Any:
    """Where SGLang reports tokens from a storage, say that the storage is ours."""
    if "storage" in (result or ()) and served_cache_of(streamer.tree_cache) is not None:
        result["storage_backend"] = "impress"
    return result
