"""How much may be written per day to the drive, whose lifetime depends on that.

A bucket holds a day's bytes and fills at a steady rate. A file may take it below zero, so that none
is too large for it; on average no more than the limit is written. Once the bucket is empty, nothing
is stored until it has an hour's bytes again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from impress_sglang.config import bytes_of

logger = logging.getLogger(__name__)

_DAY_S, _HOURS = 86_400.0, 24


class WriteBudget:
    """The budget of one server, for any store it opens; full at its start. One thread owns it."""

    def __init__(
        self, gb_per_day: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`gb_per_day`: 0 for no limit."""
        self._most = bytes_of(gb_per_day)
        self._clock = clock
        self._left = float(self._most)
        self._filled_at = clock()
        self._spent = False

    @property
    def is_spent(self) -> bool:
        """Whether nothing may be stored now; a change is logged."""
        if self._most:
            enough = self._most / _HOURS if self._spent else 1
            if self._spent == (self._fill() >= enough):
                self._spent = not self._spent
                state = "spent: no new prompts" if self._spent else "there again: prompts"
                logger.warning("--impress-write-gb-per-day is %s are stored", state)
        return self._spent

    def spend(self, num_bytes: int) -> None:
        """Take bytes that are going to be written; negative: give back those that were not."""
        if self._most:
            self._left = self._fill() - num_bytes

    def summary(self) -> dict[str, int]:
        """Bytes that may be written per day, and now."""
        return {
            "write_budget_bytes": self._most,
            "write_budget_left_bytes": max(int(self._fill()), 0),
        }

    def _fill(self) -> float:
        """Bytes that may be written now; a value below 0 has to be made up for first."""
        now = self._clock()
        self._left += (now - self._filled_at) / _DAY_S * self._most
        self._left = min(self._left, self._most)
        self._filled_at = now
        return self._left
