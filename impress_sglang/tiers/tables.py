"""Tables with an entry per chunk, which grow in place, and the ids that index them.

A table reserves address space for far more entries than it has. Memory is taken only where an entry
is written: until then entries are zero and cost nothing, and growing takes no work.
"""

from __future__ import annotations

import mmap
from typing import TypeVar

import numpy as np
import numpy.typing as npt

_T = TypeVar("_T", bound=np.generic)
# For each table; one with more entries is copied when it grows.
RESERVED_ENTRIES = 1 << 30
# Python has this constant from 3.13 on.
_MAP_NORESERVE = 0x4000
_NEVER = 1 << 62


def grown(table: npt.NDArray[_T], size: int) -> npt.NDArray[_T]:
    """The table extended by zeros to `size` entries.

    Entries stay where they are and are shared with the shorter table. They are copied only if there
    is no reserved space left, or the system grants none (`vm.overcommit_memory=2`).
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
    """Ranges of ids that are handed out and given back; the lowest gap that fits is used.

    `starts` and `lengths`, int64, are the gaps of free ids, ascending, no two of them adjacent; the
    last one has no end. Each call is one pass of NumPy over the gaps.
    """

    def __init__(self) -> None:
        """Begin with all ids free."""
        self.starts, self.lengths = np.zeros(1, np.int64), np.array([_NEVER])

    def take(self, size: int) -> int:
        """Take `size` neighbouring ids; returns the first."""
        at = int((self.lengths >= size).argmax())
        base = int(self.starts[at])
        self.starts[at] += size
        self.lengths[at] -= size
        if not self.lengths[at]:
            self._delete(at)
        return base

    def give(self, base: int, size: int) -> None:
        """Give `size` ids from `base` on back."""
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
        """Which of the first `size` ids are handed out."""
        found = np.ones(size, np.bool_)
        for base, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            assert found[base : base + length].all()
            found[base : base + length] = False
        return found

    def _delete(self, at: int) -> None:
        self.starts, self.lengths = np.delete(self.starts, at), np.delete(self.lengths, at)
