"""Lets a pass begin before the last layers of its prefix are in their slots, and wait for each.

SGLang's pool asks its layer transfer counter before a layer's keys or values are attended to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from impress_sglang.serving.load_jobs import LoadJob


class LayerGate:
    """The jobs whose slots are in SGLang's tree but not filled; it is a layer transfer counter."""

    def __init__(self, pool: Any, note_broken: Callable[[LoadJob], None]) -> None:
        """`note_broken` is told, in the pass, of a job whose layer is not there."""
        self._pool = pool
        self._note_broken = note_broken
        self.jobs: list[LoadJob] = []

    def add(self, job: LoadJob) -> None:
        """Let passes wait for the layers of a job."""
        if not self.jobs:
            self._pool.register_layer_transfer_counter(self)
        self.jobs.append(job)

    def remove(self, job: LoadJob) -> None:
        """Note that a job has ended, and that nobody attends to what it lacks."""
        if job in self.jobs:
            self.jobs.remove(job)
        if not self.jobs:
            self._pool.register_layer_transfer_counter(None)

    def wait_until(self, layer: int) -> None:
        """Wait until the slots of a layer, counted from the first, are filled."""
        for job in self.jobs:
            if job.revoked:
                continue
            if not job.wait_for_layer(layer):
                # Others in this pass wait no longer.
                job.revoke()
                self._note_broken(job)
            elif job.events:
                torch.cuda.current_stream().wait_event(job.events[layer])
