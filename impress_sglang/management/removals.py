"""What is to be removed from the disk, and may be there yet."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future


class Removals:
    """Removals that one thread does in order; owned by who asks for them."""

    def __init__(self) -> None:
        """None is under way."""
        self._futures: deque[tuple[Future[None], int]] = deque()
        self._bytes = 0

    def note(self, future: Future[None], num_bytes: int) -> None:
        """Another one, of files of so many bytes."""
        self._futures.append((future, num_bytes))
        self._bytes += num_bytes

    @property
    def num_bytes(self) -> int:
        """Of files that may be there yet."""
        while self._futures and self._futures[0][0].done():
            self._bytes -= self._futures.popleft()[1]
        return self._bytes
