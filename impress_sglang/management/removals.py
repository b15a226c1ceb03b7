"""Removals from the disk that may not have happened yet."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future


class Removals:
    """Removals that another thread does in order; owned by the thread that asks for them."""

    def __init__(self) -> None:
        """Begin with no removals."""
        self._futures: deque[tuple[Future[None], int]] = deque()
        self._bytes = 0

    def note(self, future: Future[None], num_bytes: int) -> None:
        """Note another removal, of files with `num_bytes` in all."""
        self._futures.append((future, num_bytes))
        self._bytes += num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of files that may still be there."""
        while self._futures and self._futures[0][0].done():
            self._bytes -= self._futures.popleft()[1]
        return self._bytes
