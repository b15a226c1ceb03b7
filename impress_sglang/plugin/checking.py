"""The integrity check: runs on command, in small steps, because there may be much to compare.

Requests are served between two steps. `store.checking` says what can be checked of a store
that changes meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from impress_sglang.serving.ranks import Ranks
from impress_sglang.serving.served_store import ServedStore

logger = logging.getLogger(__name__)

UNCHECKED, RUNNING, OK, FAILED = "unchecked", "running", "ok", "failed"
# Seconds after which a step checks nothing further.
STEP_S = 0.001


class IntegrityCheck:
    """The integrity check of one tree cache; owned by the scheduler's thread."""

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
