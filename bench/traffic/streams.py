"""Answers that are streamed by threads, and when their tokens came."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from bench.core.servers import Server
from bench.core.session import BenchFailed


class Stream:
    """An answer that is streamed by a thread."""

    def __init__(
        self,
        server: Server,
        tokens: Sequence[int],
        new_tokens: int,
        custom: dict[str, Any] | None = None,
    ) -> None:
        """Ask; see `Server.stream`."""
        self._pieces = server.stream(tokens, new_tokens, custom=custom)
        # What has come so far: when, and how many tokens by then.
        self.came: list[tuple[float, int]] = []
        self._changed = threading.Condition()
        self._error: BenchFailed | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    @property
    def last(self) -> float:
        """When the last piece came."""
        return self.came[-1][0]

    def wait(self, tokens: int) -> None:
        """Until so many have come, or it has ended."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or bool(self.came and self.came[-1][1] >= tokens)
            )

    def join(self) -> None:
        """Until it has ended.

        Raises:
            BenchFailed: it did not end well.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return gaps_of(self.came)

    def tokens_between(self, began: float, ended: float) -> int:
        """How many came after `began`, by `ended`."""
        return tokens_between(self.came, began, ended)

    def _follow(self) -> None:
        try:
            for piece in self._pieces:
                with self._changed:
                    self.came.append(piece)
                    self._changed.notify_all()
        except BenchFailed as error:
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()


Pieces = Sequence[tuple[float, int]]


def gaps_of(came: Pieces, began: float = 0.0, ended: float = float("inf")) -> list[float]:
    """Seconds between pieces, where the later one came in that time."""
    pairs = itertools.pairwise(when for when, _ in came)
    return [after - before for before, after in pairs if began < after <= ended]


def tokens_between(came: Pieces, began: float, ended: float) -> int:
    """How many tokens came after `began`, by `ended`."""
    by = {
        edge: max((count for when, count in came if when <= edge), default=0)
        for edge in (began, ended)
    }
    return by[ended] - by[began]


def describe_gaps(gaps: Sequence[float]) -> Mapping[str, float]:
    """In milliseconds: the longest, the second and the median one."""
    ordered = sorted(gaps)
    middle = ordered[len(ordered) // 2]
    named = {"longest_ms": ordered[-1], "second_ms": ordered[-2], "median_ms": middle}
    return {name: gap * 1e3 for name, gap in named.items()}
