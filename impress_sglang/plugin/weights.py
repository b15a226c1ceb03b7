"""Suspends the store while the model's weights may not match the store's model identity.

SGLang can replace weights, or release and restore them and the pool, while it serves. From the
moment that a handler may begin to do so, the store is neither read nor written. It is resumed once
the weights are final, their identity is known, and no earlier KVs are left: SGLang keeps these if
an update does not flush, and KVs computed after them belong to no weights at all.

A request that is loading a stored prefix continues, as with a resident one in SGLang.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from impress_sglang.errors import UnsupportedError
from impress_sglang.plugin.eligibility import MESSAGES
from impress_sglang.serving.ranks import ALONE, Ranks

logger = logging.getLogger(__name__)

# Actions of SGLang's `check_weights` that only read, and methods called by `collective_rpc` that do
# not change weights.
_READING_CHECKS = ("snapshot", "compare", "checksum")
_READING_METHODS = ("save_remote_model", "save_sharded_model")


class WeightWatch:
    """Decides when the store is suspended and resumed."""

    def __init__(
        self,
        served: Any,
        read_identity: Callable[[], str],
        set_aside: Callable[[], None],
        is_empty: Callable[[], bool],
        ranks: Ranks = ALONE,
    ) -> None:
        """Watch over the store of `served`, a `Service` or an object like one.

        `read_identity` returns the identity of its weights. `set_aside` ends passes and writes, and
        forgets plans; `is_empty` returns whether the pool has no KVs.
        """
        self._served, self._read_identity = served, read_identity
        self._set_aside, self._is_empty, self._ranks = set_aside, is_empty, ranks
        self._changing = self._untouched = self._settled = False

    def begin(self, cause: str) -> None:
        """Suspend the store: weights or the pool may change from now on, until `end`."""
        self._set_aside()
        self._changing = True
        self._untouched = self._served.suspended_by is None
        self._suspend(cause)

    def end(self, *, settled: bool) -> None:
        """Handle the end of a handler; `settled`: no update continues, and nothing is released.

        The store is resumed now if the pool has no KVs, otherwise after the next flush.
        """
        self._settled = settled

        def end() -> None:
            # Meanwhile another message may have been handled.
            empty, all_settled = self._is_empty(), self._ranks.all(self._settled)
            self._changing = not all_settled
            # A refused message has changed nothing: KVs in the pool are right.
            if all_settled and (empty or self._ranks.all(self._untouched)):
                self._use_again(empty=empty)

        self._ranks.run_in_lockstep(end)

    def flushed(self) -> None:
        """Handle an empty pool; also detects changes that no handler announced."""

        def resume() -> None:
            if not self._changing:
                self._use_again(empty=True)

        self._ranks.run_in_lockstep(resume)

    def _use_again(self, *, empty: bool) -> None:
        served = self._served
        # A store that could not be opened is reopened below.
        served.adopt_opened()
        try:
            identity = self._read_identity()
        except Exception:
            # Whatever the error, answers are right without the store.
            logger.exception("these weights have no identity; the next flush tries again")
            self._suspend("no identity")
            return
        if identity != served.identity:
            if not empty:
                return
            # Stages may have planned loads since the flush.
            self._set_aside()
            served.reopen(identity)
        served.resume()

    def _suspend(self, cause: str) -> None:
        if self._served.suspended_by is None:
            logger.info("the store is set aside (%s) until the pool has no KVs of before", cause)
            self._served.suspended_by = cause


def watch_messages(scheduler: Any, weights: WeightWatch) -> None:
    """Suspend the store around each message that may change weights, or the pool.

    These are all messages of a complete scheduler of SGLang's that are not known to be harmless.
    Raises `UnsupportedError` if this SGLang handles messages in another way.
    """
    try:
        table = scheduler._request_dispatcher._mapping
        _is_settled(scheduler)
    except AttributeError as error:
        raise UnsupportedError(
            f"IMPRESS does not know how this SGLang replaces weights: {error}"
        ) from error
    for kind, handler in table.items():
        if kind.__name__ not in MESSAGES:
            table[kind] = functools.partial(around_handler, handler, scheduler, weights)


def around_handler(
    original: Callable[..., Any], scheduler: Any, weights: WeightWatch, request: Any
) -> Any:
    """Let SGLang handle a message with the store suspended; returns its answer."""
    action, method = (getattr(request, name, None) for name in ("action", "method"))
    if action in _READING_CHECKS or method in _READING_METHODS:
        return original(request)
    weights.begin(getattr(original, "__name__", type(request).__name__))
    try:
        return original(request)
    finally:
        weights.end(settled=_is_settled(scheduler))


def _is_settled(scheduler: Any) -> bool:
    """Whether no update of weights continues, and nothing is released."""
    updater = scheduler.weight_updater
    return updater._session is None and not updater.offload_tags
