"""Where attention begins in each request's row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class RowStarts:
    """The first entry of each row of `req_to_token` that attention sees.

    `on_device` and `on_host` are int64 [rows] with the same values: metadata of a captured decode
    step is made of the first without the host, and planners on the host need the second.

    Invariants: every extend pass sets all rows of its batch, so a row that is reused needs no
    reset; row 0, which pads captured batches, starts at 0.
    """

    def __init__(self, num_rows: int, device: torch.device | str) -> None:
        self.on_device = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.on_host = torch.zeros(num_rows, dtype=torch.int64)

    def set(self, rows: Tensor, host_rows: Tensor, starts: Sequence[int]) -> None:
        """Set the starts of some rows; `rows` int64 [b] on the device, `host_rows` on the host."""
        wanted = torch.tensor(starts, dtype=torch.int64, pin_memory=self.on_device.is_cuda)
        # Most batches have no stored prefix and change nothing.
        if torch.equal(self.on_host[host_rows], wanted):
            return
        self.on_host[host_rows] = wanted
        # From pinned memory, so that the host does not wait for the pass before.
        self.on_device[rows] = wanted.to(self.on_device.device, non_blocking=True)
        assert not self.on_host[0]

    def __bool__(self) -> bool:
        """Whether any row starts later than at 0."""
        return bool(self.on_host.any())
