"""Tables with an entry per chunk, which grow where they are, and the ids that are their places.

A table stands in address space for far more entries than it has. Memory is taken where something
is written: entries are zero until then and cost nothing, and growing is no work.
"""

from __future__ import annotations

import mmap
from typing import TypeVar

import numpy as np
import numpy.typing as npt

_T = TypeVar("_T", bound=np.generic)
# Of each table; who has more chunks waits while they are copied.
RESERVED_ENTRIES = 1 << 30
# Python knows it from 3.13 on.
_MAP_NORESERVE = 0x4000
_NEVER = 1 << 62


def grown(table: npt.NDArray[_T], size: int) -> npt.NDArray[_T]:
    """The table with zeros behind it, `size` entries in all.

    Entries stay where they are, and are those of the shorter table, too. Only if there is no
    address space left, or the system grants none (`vm.overcommit_memory=2`), are they copied.
    """
    needed = size * table.itemsize
    memory = table.base.obj if isinstance(table.base, memoryview) else None
    if memory is None or len(memory) < needed:
        memory = _reserve(max(needed, RESERVED_ENTRIES * table.itemsize), needed)
        np.frombuffer(memory, table.dtype)[: len(table)] = table
    return np.frombuffer(memory, table.dtype, size)


def _reserve(wanted: int, needed: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        return mmap.mmap(-1, wanted, flags | _MAP_NORESERVE)
    except OSError:
        return mmap.mmap(-1, max(needed, 1), flags)


class IdRanges:
    """Ranges of ids that are given out and come back; the lowest that fits is taken.

    `starts` and `lengths`, int64, are the gaps between them, ascending, no two of them neighbours;
    the last one has no end. A step is one pass of NumPy over the gaps.
    """

    def __init__(self) -> None:
        """All are free."""
        self.starts, self.lengths = np.zeros(1, np.int64), np.array([_NEVER])

    def take(self, size: int) -> int:
        """The first of `size` neighbouring ids."""
        at = int((self.lengths >= size).argmax())
        base = int(self.starts[at])
        self.starts[at] += size
        self.lengths[at] -= size
        if not self.lengths[at]:
            self._delete(at)
        return base

    def give(self, base: int, size: int) -> None:
        """Ids are free."""
        at = int(self.starts.searchsorted(base))
        stop = base + size
        before = self.starts[at - 1] + self.lengths[at - 1] if at else -1
        assert before <= base and stop <= self.starts[at], "an id is free twice"
        if before == base:
            at -= 1
            base = int(self.starts[at])
            self._delete(at)
        if self.starts[at] == stop:
            self.lengths[at] += stop - base
            self.starts[at] = base
        else:
            self.starts = np.insert(self.starts, at, base)
            self.lengths = np.insert(self.lengths, at, stop - base)

    def owned(self, size: int) -> npt.NDArray[np.bool_]:
        """Which of the first `size` ids are given out.

        Raises:
            AssertionError: gaps overlap, which is a bug.
        """
        found = np.ones(size, np.bool_)
        for base, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            assert found[base : base + length].all()
            found[base : base + length] = False
        return found

    def _delete(self, at: int) -> None:
        self.starts, self.lengths = np.delete(self.starts, at), np.delete(self.lengths, at)
