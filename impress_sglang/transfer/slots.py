"""The places where rows of a read go: slots of a pool, or fresh memory.

Stage: load.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from impress_sglang.storage.layout import KVShape


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    """Rows of a pool for the keys, or the values, of k tokens per head.

    Attributes:
        pool: [rows, G, D] in the dtype of the KVs; the last stride is 1.
        heads: the heads of the pool that are filled, ascending.
        rows: int64 [k] on the device of the pool, distinct: where the j-th token of every head
            goes; None if it goes to row j of the pool, which then has k rows.
    """

    pool: Tensor
    heads: tuple[int, ...]
    rows: Tensor | None = None

    @classmethod
    def of(cls, pool: Tensor, rows: Tensor | None = None) -> Slots:
        """Slots for all heads of a pool."""
        return cls(pool, tuple(range(pool.shape[1])), rows)

    @classmethod
    def fresh(cls, k: int, heads: int, dim: int, like: Tensor) -> Slots:
        """Slots in new memory, in the dtype and on the device of `like`."""
        return cls.of(like.new_empty(k, heads, dim))

    def __len__(self) -> int:
        return len(self.pool if self.rows is None else self.rows)

    def only(self, heads: tuple[int, ...]) -> Slots:
        """The same slots, for other heads."""
        return dataclasses.replace(self, heads=heads)

    def part(self, start: int, stop: int) -> Slots:
        """The slots of the tokens [start, stop)."""
        if self.rows is None:
            return dataclasses.replace(self, pool=self.pool[start:stop])
        return dataclasses.replace(self, rows=self.rows[start:stop])

    def put(self, rows: Tensor) -> None:
        """Fill all slots with rows [k, heads, D] from any device."""
        rows = rows.to(self.pool.device)
        everything = len(self.heads) == self.pool.shape[1]
        if everything:
            self.pool[slice(None) if self.rows is None else self.rows] = rows
        elif self.rows is None:
            self.pool[:, self._heads] = rows
        else:
            self.pool[self.rows[:, None], self._heads] = rows

    def clear(self) -> None:
        """Fill the slots of all heads with zeros; takes no memory."""
        assert len(self.heads) == self.pool.shape[1]
        if self.rows is None:
            self.pool.zero_()
        else:
            self.pool.index_fill_(0, self.rows, 0)

    @property
    def _heads(self) -> Tensor:
        return head_index(self.heads, self.pool.device)


@functools.lru_cache(maxsize=64)
def head_index(heads: tuple[int, ...], device: torch.device) -> Tensor:
    """Head numbers as int64 on a device; cached, because a copy from the host waits."""
    return torch.tensor(heads, dtype=torch.int64, device=device)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSlots:
    """Where keys [k, G, Dk] and values [k, G, Dv] of a layer go; both have as many rows."""

    keys: Slots
    values: Slots

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, rows: Tensor | None = None) -> LayerSlots:
        """Slots in the same rows of two pools."""
        return cls(Slots.of(keys, rows), Slots.of(values, rows))

    @classmethod
    def fresh(cls, k: int, shape: KVShape, device: torch.device) -> LayerSlots:
        """Slots in new memory for k tokens."""
        like = torch.empty(0, dtype=shape.dtype, device=device)
        heads = shape.num_kv_heads
        return cls(
            Slots.fresh(k, heads, shape.key_dim, like),
            Slots.fresh(k, heads, shape.value_dim, like),
        )

    def __len__(self) -> int:
        return len(self.values)
