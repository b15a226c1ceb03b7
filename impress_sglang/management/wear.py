"""What may be written to the drive: it wears, and lasts as long as its maker says at so much a day.

A bucket holds a day's bytes and fills through the day. A file may take it below zero, so that none
is too large for it; on average no more is written than that. Once it is empty nothing is stored
until an hour's bytes are in it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from impress_sglang.config import bytes_of

logger = logging.getLogger(__name__)

_DAY_S, _HOURS = 86_400.0, 24


class WriteBudget:
    """Of one server, whichever store it has open; full when the server starts. One thread."""

    def __init__(
        self, gb_per_day: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """0: there is no limit."""
        self._most = bytes_of(gb_per_day)
        self._clock = clock
        self._left = float(self._most)
        self._filled_at = clock()
        self._spent = False

    @property
    def is_spent(self) -> bool:
        """Whether nothing is to be stored now; said in the log when that changes."""
        if self._most:
            enough = self._most / _HOURS if self._spent else 1
            if self._spent == (self._fill() >= enough):
                self._spent = not self._spent
                state = "spent: no new prompts" if self._spent else "there again: prompts"
                logger.warning("--impress-write-gb-per-day is %s are stored", state)
        return self._spent

    def spend(self, num_bytes: int) -> None:
        """So much is going to be written; negative: it was not."""
        if self._most:
            self._left = self._fill() - num_bytes

    def summary(self) -> dict[str, int]:
        """In bytes, what may be written per day and now."""
        return {
            "write_budget_bytes": self._most,
            "write_budget_left_bytes": max(int(self._fill()), 0),
        }

    def _fill(self) -> float:
        """What may be written now, in bytes; below 0 what has to come in first."""
        now = self._clock()
        self._left += (now - self._filled_at) / _DAY_S * self._most
        self._left = min(self._left, self._most)
        self._filled_at = now
        return self._left
