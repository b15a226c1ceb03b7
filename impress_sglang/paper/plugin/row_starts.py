"""Keeps where attention begins in each request's row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from impress_sglang.tiers.fence import to_device


class RowPool(Protocol):
    """The part of SGLang's `ReqToTokenPool` that is used here."""

    req_to_token: Tensor
    req_generation: Tensor
    """int64 [rows], on the host: how often each row was allocated."""


class RowStarts:
    """The first entry of each row of `req_to_token` that attention sees.

    A start belongs to one allocation of its row. Rows are not only allocated to requests: those of
    a beam are copies that never pass through extend. So the start of a row that was allocated again
    is void, and a row of which nothing is known begins at 0.

    `on_device` and `on_host` are int64 [rows] with the same values: metadata of a captured decode
    step is made from the first without the host, and planners on the host need the second.

    Invariants: both change only where a batch is prepared, on its stream, so that everything that
    is launched for it sees one state; row 0, which pads captured batches, starts at 0.
    """

    def __init__(self, pool: RowPool) -> None:
        num_rows, self._pool = len(pool.req_to_token), pool
        self.on_device = torch.zeros(num_rows, dtype=torch.int64, device=pool.req_to_token.device)
        self.on_host = torch.zeros(num_rows, dtype=torch.int64)
        # The allocation that each start belongs to, and the rows that do not begin at 0.
        self._allocations = torch.zeros(num_rows, dtype=torch.int64)
        self._late = self.on_host.nonzero().flatten()

    def void_reallocated(self) -> None:
        """Forget the starts of rows that were allocated again; call before a batch is prepared.

        The host knows by itself what to forget, and waits for nothing.
        """
        if not self:
            return
        allocated = self._pool.req_generation[self._late]
        rows = self._late[allocated != self._allocations[self._late]]
        if len(rows):
            self._write(to_device(rows, self.on_device.device), rows, torch.zeros_like(rows))

    def set(self, rows: Tensor, host_rows: Tensor, starts: Sequence[int]) -> None:
        """Set the starts of some rows, as they are allocated now.

        Args:
            rows: int64 [b], on the device.
            host_rows: the same on the host.
            starts: the start of each row.
        """
        self._allocations[host_rows] = self._pool.req_generation[host_rows]
        wanted = torch.tensor(starts, dtype=torch.int64)
        # Most batches have no stored prefix and change nothing.
        if not torch.equal(self.on_host[host_rows], wanted):
            self._write(rows, host_rows, wanted)

    def __bool__(self) -> bool:
        """Whether any row starts after 0."""
        return bool(len(self._late))

    def _write(self, rows: Tensor, host_rows: Tensor, starts: Tensor) -> None:
        self.on_host[host_rows] = starts
        self.on_device[rows] = to_device(starts, self.on_device.device)
        self._late = self.on_host.nonzero().flatten()
        assert not self.on_host[0]
