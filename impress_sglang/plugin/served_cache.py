"""What hooks, routes and admin requests use of a tree cache of ours, which has it as `impress`."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from impress_sglang.plugin.tree_nodes import Sweeps
from impress_sglang.plugin.weights import WeightWatch, watch_messages
from impress_sglang.serving.custom_params import load_options_of
from impress_sglang.serving.load_planner import LoadPlanner
from impress_sglang.serving.ranks import ALONE, Ranks
from impress_sglang.serving.report import new_report
from impress_sglang.serving.scheduling import QueueOrder
from impress_sglang.serving.service import ServedStore, Service
from impress_sglang.serving.sights import Sights
from impress_sglang.storage.quality import EXACT
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.policies import LoadOptions

logger = logging.getLogger(__name__)

UNCHECKED, RUNNING, OK, FAILED = "unchecked", "running", "ok", "failed"
# Seconds after which a step of a check looks at nothing further.
STEP_S = 0.001


class IntegrityCheck:
    """The integrity check of one tree cache; owned by the scheduler's thread.

    It runs on command, in small steps between which requests are served: there may be much to
    compare. `store.checking` says what can be checked of a store that changes meanwhile.
    """

    def __init__(self, served: ServedStore, check_requests: Callable[[], None]) -> None:
        """`check_requests` compares requests, the queue and slots with each other."""
        self.state = UNCHECKED
        """The result of the last check, or that one is running."""
        self._served = served
        self._check_requests = check_requests
        self._steps: Iterator[None] = iter(())

    def begin(self) -> None:
        """Begin a check, unless one is running already: then that one counts."""
        if self.state != RUNNING:
            self.state, self._steps = RUNNING, self._all()

    def step(self) -> None:
        """Continue for a moment, if a check is running. Raises nothing."""
        if self.state != RUNNING:
            return
        end = time.perf_counter() + STEP_S
        try:
            for _ in self._steps:
                if time.perf_counter() >= end:
                    return
        except Exception:
            logger.exception("the integrity check of IMPRESS failed")
            self.state = FAILED
        else:
            self.state = OK

    def agree(self, ranks: Ranks) -> str:
        """The worst state of a check on any rank, which is running until it has ended on all."""
        if not ranks.alone:
            states = (FAILED, RUNNING, UNCHECKED, OK)
            worst = states[ranks.least([states.index(self.state)])[0]]
            if worst != RUNNING:
                self.state = worst
            return worst
        return self.state

    def _all(self) -> Iterator[None]:
        self._check_requests()
        yield
        store = None
        # Another store may have taken its place meanwhile, and is checked as well.
        while self._served.opened is not store:
            store = self._served.opened
            for _ in () if store is None else store.check_steps():
                yield
                if self._served.opened is not store:
                    break


@dataclasses.dataclass(eq=False, slots=True)
class ServedCache:
    """What one tree cache serves, and how; owned by the scheduler's thread.

    Attributes:
        planner: finds what is stored of prompts.
        page_size: of SGLang's pool.
        sights: counts prompts; None unless that decides what is stored.
        queue_order: None if the queue is not reordered.
        attach: begins to serve, for a scheduler of SGLang's that is complete.
        look_again: notes what is cached of a waiting request, for `queue_order`.
        rest: called when the scheduler has nothing to do; returns whether jobs are waited for.
        reorder: searches for prefixes worth reordering; None where nothing is ever reordered.
        ranks: carry out each request of an administrator together.
    """

    service: Service
    check: IntegrityCheck
    weights: WeightWatch
    sweeps: Sweeps
    planner: LoadPlanner
    page_size: int
    sights: Sights | None
    attach: Callable[[Any], None] = lambda _: None
    look_again: Callable[[Any], None] = lambda _: None
    rest: Callable[[], bool] = lambda: False
    reorder: Callable[[], dict[str, int] | None] = lambda: None
    ranks: Ranks = ALONE
    queue_order: QueueOrder | None = None

    def tell_idle(self) -> None:
        """Wait a little for jobs, or tell the metrics what has happened."""
        if not self.rest():
            self.service.tell_metrics(idle=True)

    def clear(self) -> None:
        """Note that the tree is empty."""
        self.sweeps.clear()
        if self.queue_order is not None:
            self.queue_order.forget_states()

    def summary(self) -> dict[str, Any]:
        """What `GET /impress/stats` shows."""
        return {**self.service.summary(), "integrity": self.check.state}

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


def around_policy(
    original: Callable[..., None], policy: Any, waiting_queue: Any, *args: Any, **kwargs: Any
) -> None:
    """Let SGLang order the waiting queue, then reorder its head and note the final order."""
    cache = served_cache_of(policy.tree_cache)
    order = None if cache is None else cache.queue_order
    if order is not None:
        order.restore(waiting_queue)
    original(policy, waiting_queue, *args, **kwargs)
    if cache is None:
        return
    if order is not None:
        order.look(waiting_queue, cache.look_again)
        order.arrange(waiting_queue)
    if cache.service.lookahead.awaits:
        # What earlier requests use is evicted last.
        cache.service.lookahead.order([req.rid for req in waiting_queue])


def before_idle(scheduler: Any, *_: Any, **__: Any) -> None:
    """Tell the cache: nothing else may happen for a long time."""
    cache = served_cache_of(scheduler.tree_cache)
    if cache is not None:
        cache.tell_idle()


def after_cached_details(result: Any, streamer: Any, *_: Any, **__: Any) -> Any:
    """Where SGLang reports tokens from a storage, say that the storage is ours."""
    if "storage" in (result or ()) and served_cache_of(streamer.tree_cache) is not None:
        result["storage_backend"] = "impress"
    return result
