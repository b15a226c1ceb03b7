"""A store with prompts, a loader of jobs, and the pools that it fills."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from impress_sglang.config import EXACT_BITS
from impress_sglang.cost import Estimate
from impress_sglang.errors import SegmentUnreadable
from impress_sglang.serving.kv_class import KVClass
from impress_sglang.serving.load_jobs import JobLoader, JobState, LoadJob
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.codecs import Codec
from impress_sglang.transfer.filling import StoredLayers
from tests.faults import Faults, FaultyFileSystem
from tests.unit import kv_factory as kv
from tests.unit.codes_factory import in_codes
from tests.unit.reading import Pools
from tests.unit.store_factory import Workbench, look_up
from tests.unit.waiting import wait_until

SHAPE = kv.make_shape(
    layers=3, query_heads=4, kv_heads=2, key_dim=64, value_dim=32, probe=(), coded=True
)
NUM_SLOTS = 600
UNKNOWN = Estimate(1.0, 0.0, 0.0, None)
EXACT_KVS = KVClass()


class Desk:
    """A store with prompts, a loader, and pools."""

    def __init__(
        self,
        root: Path,
        shape: KVShape = SHAPE,
        codec: Codec | None = None,
        num_slots: int = NUM_SLOTS,
        **options: Any,
    ) -> None:
        self.shape, self.faults = shape, Faults(seed=1)
        self.bench = Workbench(root, shape, codec)
        self.options = {"policy": "impress", "io_timeout": 5.0, "readahead": 0.2, **options}
        self.store = self.bench.open(files=FaultyFileSystem(self.faults), **self.options)
        self._num_slots = num_slots
        layers = StoredLayers(lambda layer: self.pools(layer))
        self.loader = JobLoader(torch.device("cpu"), layers, self.bench.codec)
        self.empty()

    def empty(self) -> None:
        """Nobody has any slots."""
        self.pools, self.free = Pools(self.shape, self._num_slots), torch.randperm(self._num_slots)

    def put(self, *all_tokens: Sequence[int], **options: Any) -> None:
        for tokens in all_tokens:
            self.bench.put(self.store, tokens, **options)

    def start(self, job: LoadJob) -> LoadJob:
        """Give it slots, and begin it."""
        job.owned_slots = job.target_slots = self.free[: len(job)]
        self.free = self.free[len(job) :]
        job.state = JobState.LOADING
        self.loader.begin(job)
        return job

    def begin(
        self, tokens: Sequence[int], kv_class: KVClass = EXACT_KVS, first: int = 0
    ) -> LoadJob:
        """A job for the tokens from the `first` on."""
        match, whole = look_up(self.store, tokens), kv.as_tokens(tokens)
        assert match.num_tokens == len(tokens)
        return self.start(LoadJob(self.store, kv_class, (None, None), whole, match, first, UNKNOWN))

    def load(self, tokens: Sequence[int], kv_class: KVClass = EXACT_KVS, first: int = 0) -> LoadJob:
        job = self.begin(tokens, kv_class, first)
        self.wait(job)
        return job

    def wait(self, *jobs: LoadJob) -> None:
        assert all(job.done.wait(60) and job.started_at >= job.planned_at for job in jobs)

    def check_or_gone(self, job: LoadJob) -> bool:
        """Whether a job was loaded; if not, its segments were evicted before it began."""
        if job.state is JobState.FAILED:
            assert isinstance(job.error, SegmentUnreadable), job.error
            spans = job.spans
            assert any(self.store.tree.get(s.segment.segment_id) is not s.segment for s in spans)
            return False
        self.check(job)
        return True

    def check(self, job: LoadJob) -> None:
        """Its slots hold exact KVs, or what these are in six bits, by definition."""
        assert job.state is JobState.LOADED and job.layers_loaded == self.shape.num_layers
        assert job.target_slots is not None
        tokens, exact = tuple(job.tokens.tolist()), job.bits == EXACT_BITS
        for layer in range(self.shape.num_layers):
            parts, start = [], 0
            for span in job.match.spans:
                whole = (*tokens[:start], *span.segment.info.tokens.tolist())
                rows = kv.SequenceKVs(self.shape, "", whole).read_from(start)(layer)
                rows = rows if exact else in_codes(rows, 6, start)
                parts.append([of_segment[: len(span)] for of_segment in rows])
                start += len(span)
            for pool, rows in zip(self.pools(layer), zip(*parts, strict=True), strict=True):
                expected = torch.cat(rows)[job.start :]
                assert torch.allclose(
                    pool[job.target_slots], expected, rtol=0, atol=1e-4 * (not exact)
                )

    def close(self) -> None:
        self.faults.clear()
        assert self.loader.close(20.0)
        names = [segment.segment_id for segment in self.store.tree.segments()]
        # Reads that were in flight when the last job ended are taken in by a poll.
        wait_until(lambda: self.store.poll() or not any(map(self.store.readers.is_open, names)))
        self.bench.close_all()


Make = Callable[..., Desk]


def desks_in(folder: Path, kind: Callable[..., Any] = Desk, **usual: Any) -> Iterator[Make]:
    """What makes them, each in a folder of its own; the body of a fixture, which closes them."""
    numbers = itertools.count()
    with ExitStack() as stack:

        def make(*stored: Any, **options: Any) -> Any:
            desk = kind(folder / f"kv{next(numbers)}", *stored, **(usual | options))
            return stack.enter_context(closing(desk))

        yield make
