"""The integrity check: by command, a little at a time, for there may be much to compare.

Requests are served between two steps. What may be found of a store that changes meanwhile
`management.checking` says.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from impress_sglang.serving.served_store import ServedStore

logger = logging.getLogger(__name__)

CHECK = {"impress_check": 1}
"""`server_args` of a message that begins a check, or joins one, and takes a step of it."""
GO_ON = "go on"
"""`rid` of a message that only takes a step."""
UNCHECKED, RUNNING, OK, FAILED = "unchecked", "running", "ok", "failed"
# A step begins with nothing new after that.
STEP_S = 0.001


class IntegrityCheck:
    """That of one tree cache; the scheduler's thread owns it."""

    def __init__(self, served: ServedStore, check_requests: Callable[[], None]) -> None:
        """`check_requests` compares what requests, the queue and slots say of each other."""
        self.state = UNCHECKED
        """What the last one has found, or that one is under way."""
        self._served = served
        self._check_requests = check_requests
        self._steps: Iterator[None] = iter(())

    def begin(self) -> None:
        """Somebody orders one; who comes while one is under way waits for that."""
        if self.state != RUNNING:
            self.state, self._steps = RUNNING, self._all()

    def step(self) -> None:
        """Go on for a moment, if one is under way. Raises nothing."""
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

    def _all(self) -> Iterator[None]:
        self._check_requests()
        yield
        store = None
        # Another one may have taken its place, and is looked at as well.
        while self._served.opened is not store:
            store = self._served.opened
            for _ in () if store is None else store.checks.steps():
                yield
                if self._served.opened is not store:
                    break
