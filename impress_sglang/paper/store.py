"""Store of a server that loads within passes: parts of prefixes, and reordered segments."""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from impress_sglang.errors import PrefixUnreadable
from impress_sglang.loops.types import Float32s, Floats
from impress_sglang.paper.history import TokenHistory, chunk_shares, mapping_lists
from impress_sglang.paper.source import PartSource
from impress_sglang.storage.files import AlignedMemory
from impress_sglang.storage.layout import BLOCK_BYTES, PROBE, SegmentLayout
from impress_sglang.storage.segment import MappingLists, OpenSegment, SegmentInfo
from impress_sglang.storage.writer import WriteAbandoned, write_segment
from impress_sglang.store.memory import StoreMemory
from impress_sglang.store.policies import make_policy
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import SegmentState, StoredMatch, StoredSegment, StoredSpan
from impress_sglang.threads import BackgroundThread, use_one_torch_thread
from impress_sglang.tiers.placement import Tier
from impress_sglang.transfer.sources import StoredSource

logger = logging.getLogger(__name__)


class Rewrite(NamedTuple):
    """A segment that is being rewritten: its `old` file, and the description of the new one.

    The result is the expected share of needed rows of each new chunk, float64 [chunks].
    """

    stored: StoredSegment
    old: OpenSegment
    info: SegmentInfo
    shares: Future[Floats]


class PartStore(PrefixStore):
    """A store that tracks which tokens of its segments matter, and reorders segments by that.

    The scheduler thread makes the quick decisions. A separate thread computes orders and writes,
    one segment after the other. Memory is bounded by two layers of one segment.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        # Seconds between searches for segments to rewrite; 0 for none.
        self._interval = self._config.reorder_interval
        self._reorders = make_policy(self._config).reorders
        self._counts = dict.fromkeys(("segments", "failed", "without_space", "bytes_written"), 0)
        self._next_look = time.monotonic() + self._interval
        self._rewriter = BackgroundThread("impress-reorder", use_one_torch_thread)
        self._queue: collections.deque[StoredSegment] = collections.deque()
        self._job: Rewrite | None = None
        # Segments that were read since the last search.
        self._read: dict[str, None] = {}
        self._measured: PartSource | None = None

    def open_part(self, match: StoredMatch, start: int, stop: int, *, whole: bool) -> PartSource:
        """Open a source for the tokens [start, stop) of a match; `close_source` closes it.

        `whole`: all of them will be read. Raises as `SegmentReaders.open`.
        """
        self.tree.touch(match)
        return self._open(match.slice(start, stop), whole=whole)

    def _open(self, spans: Sequence[StoredSpan], *, whole: bool) -> PartSource:
        places = self._memory.buffers, self.cache
        with self.readers.acquired(spans) as segments:
            opened = self.readers.open_spans(spans, segments, codes=False)
            histories = [self._history(span.segment) for span in spans]
            return PartSource(opened, histories, *places, whole=whole)

    def measure(self, spans: Sequence[StoredSpan]) -> None:
        """Measure the current read speed on a layer of one of some spans."""
        if self._measured is None:
            try:
                source = self._open([self.readers.least_cached(spans, codes=False)], whole=True)
            except PrefixUnreadable as error:
                self.report(error)
                return
            self._measured = source
            if self._memory.buffers.has_room(source.layer_bytes):
                source.read_some()

    def _end_measuring(self) -> None:
        source = self._measured
        if source is not None and (self._closed or not source.is_reading):
            self._measured = None
            self.close_source(source)

    def _history(self, segment: StoredSegment) -> TokenHistory:
        if segment.history is None:
            shape = self._shape
            size = shape.num_layers, len(shape.head_groups), segment.info.num_tokens
            by_importance = self._config.reorder_key == "importance"
            segment.history = TokenHistory(*size, by_importance=by_importance)
        history: TokenHistory = segment.history
        return history

    def expected_bytes(self, spans: Sequence[StoredSpan], retention: float) -> float:
        """Return the bytes that a request for a part of some spans is expected to read from SSD.

        A block is read if any of its rows is. In reordered segments, the needed rows of a layer are
        adjacent.
        """
        total, shape = 0.0, self._shape
        for span in spans:
            info = span.segment.info
            layout = info.geometry
            chunks = layout.columns.chunks
            tiers = self.readers.tiers(info, codes=False).reshape(shape.num_layers, -1)
            rows = np.maximum(1, BLOCK_BYTES // np.maximum(chunks.row_bytes, 1))
            wanted = np.full(len(rows), retention)
            if not info.reordered:
                wanted = 1.0 - (1.0 - wanted) ** rows
            certain = (PROBE,) if shape.probe_kv_heads else shape.key_columns
            for column in certain:
                first = column * layout.num_chunks
                wanted[first : first + layout.num_chunks] = 1.0
            blocks = (tiers == Tier.SSD).sum(0) @ (chunks.count * wanted)
            total += len(span) / layout.num_tokens * float(blocks) * BLOCK_BYTES
        return total

    def close_source(self, source: StoredSource) -> None:
        """See `PrefixStore.close_source`; its segments may now be worth a rewrite."""
        super().close_source(source)
        if self._reorders:
            self._read.update(dict.fromkeys(source.segment_ids))

    def retire(self) -> StoreMemory:
        """See `PrefixStore.retire`."""
        memory = super().retire()
        self._end_measuring()
        return memory

    def leave_disk(self) -> None:
        """See `PrefixStore.leave_disk`; waits up to `io_timeout` for a running rewrite."""
        try:
            self.writes.drain()
            self._queue.clear()
            self._rewriter.close(self._config.io_timeout)
            self._end_rewrite()
        finally:
            super().leave_disk()

    @property
    def rewrites(self) -> dict[str, int]:
        """Counters for the statistics page; `pending` counts queued and running rewrites."""
        return {"pending": len(self._queue) + (self._job is not None), **self._counts}

    def _collect(self) -> None:
        super()._collect()
        self._end_rewrite()
        self._end_measuring()

    def _start_due(self) -> None:
        super()._start_due()
        if self.health.writable:
            try:
                self._begin_rewrites()
            except PrefixUnreadable as error:
                self.report(error)

    def enqueue_rewrites(self, *, force: bool = False) -> int:
        """Queue recently read segments worth a rewrite; with `force`, all with selected tokens.

        A rewrite is worth it once more bytes of selected tokens were read, since the segment got
        its order, than its file has; then twice as many, and so on, as later orders change less.
        Returns how many are queued; 0 for a policy that does not reorder.
        """
        if not self._reorders:
            return 0
        self._next_look = time.monotonic() + self._interval
        waiting = {segment.segment_id for segment in self._queue}
        if self._job is not None:
            waiting.add(self._job.old.segment_id)
        # Only recently read segments, so that the time does not grow with the store.
        for segment in self.tree.segments() if force else map(self.tree.get, self._read):
            if segment is None or segment.segment_id in waiting or not segment.ready:
                continue
            # Other servers rewrite their own.
            if segment.foreign_dir is not None:
                continue
            if (history := segment.history) is None or not history.accesses.any():
                continue
            if force or history.ssd_bytes > segment.file_bytes << segment.info.generation:
                self._queue.append(segment)
        self._read.clear()
        return len(self._queue)

    def _begin_rewrites(self) -> None:
        """Begin a rewrite if none is running, and its file fits beside all others.

        Files that are still being removed count as removed. A rewrite does not queue behind their
        removal, so it waits if it needs their room. Raises `PrefixUnreadable` if a segment cannot
        be opened.
        """
        quota, removing = self.quota, self.worker.removing_bytes
        if self._interval and time.monotonic() >= self._next_look:
            self.enqueue_rewrites()
        while self._queue and self._job is None:
            segment = self._queue[0]
            current = self.tree.get(segment.segment_id) is segment and segment.ready
            # Mapping lists make a file longer than the original one.
            info = dataclasses.replace(segment.info, generation=segment.info.generation + 1)
            file_bytes = info.layout().file_bytes
            fits = quota.has_room(file_bytes)
            if current and fits and not quota.has_room(file_bytes + removing):
                return
            self._queue.popleft()
            if current and fits:
                self._begin_rewrite(segment, dataclasses.replace(info, segment_id=uuid.uuid4().hex))
                quota.reserved_bytes = file_bytes
            self._counts["without_space"] += current and not fits

    def _begin_rewrite(self, stored: StoredSegment, info: SegmentInfo) -> None:
        # Tokens where other segments branch off.
        places = (at - info.prefix_len for at in stored.children if at < stored.stop)
        history, starts = self._history(stored), [0, *sorted(places)]
        job = stored, self.readers.acquire(stored), info
        learnt = history.average, history.order_key
        self._job = Rewrite(*job, self._rewriter.submit(self._run, *job, *learnt, starts))

    def _run(
        self,
        stored: StoredSegment,
        old: OpenSegment,
        info: SegmentInfo,
        average: Float32s,
        order_key: Float32s,
        starts: list[int],
    ) -> Floats:
        """Write and publish the new file, with the age of the old one. Thread: rewriter."""
        directory = self._disk.directory
        mapping = mapping_lists(order_key, starts)
        try:
            written_ns = directory.files.stat(directory.segment_path(old.segment_id)).st_mtime_ns
        except FileNotFoundError:
            raise WriteAbandoned("its file is gone") from None
        memory = AlignedMemory(old.layout.columns.num_bytes)

        def read_layer(layer: int) -> tuple[Tensor, Tensor]:
            old.fill(memory, old.layout.layer_offset(layer))
            order = None if old.mapping is None else old.mapping[layer]
            return _decode_layer(old.layout, memory.view, order)

        write_segment(
            directory.segment_path(info.segment_id),
            info,
            read_layer,
            directory.files,
            direct=self._disk.direct,
            mapping=mapping,
            written_ns=written_ns,
            is_wanted=lambda: stored.state is not SegmentState.LOST,
        )
        return chunk_shares(average, mapping, info.layout())

    def _end_rewrite(self) -> None:
        """Handle the end of the running rewrite, if it has ended."""
        if self._job is None or not self._job.shares.done():
            return
        (stored, old, info, shares), self._job = self._job, None
        old_id, new_id, error = old.segment_id, info.segment_id, shares.exception()
        old_bytes, new_bytes = stored.file_bytes, info.layout().file_bytes
        self.readers.release(old_id)
        self.quota.reserved_bytes = 0
        if error is None and self.tree.get(old_id) is stored and stored.on_disk:
            self.tree.replace(stored, info, new_bytes)
            self.readers.replace(old_id, stored, shares.result())
            self.quota.budget.spend(new_bytes)
            self.health.free_bytes -= new_bytes - old_bytes
            self.stats.bytes_written += new_bytes
            # The old version was read to the end, so the new one is verified.
            self.health.suspects.pop(stored, None)
            stored.state = SegmentState.READY
            self.worker.delete({old_id: old_bytes})
            self.worker.submit(self.worker.record, stored)
            self._history(stored).ssd_bytes = 0
            self._counts["segments"] += 1
            self._counts["bytes_written"] += new_bytes
            return
        # The file may be published already, or its removal may have failed.
        self.worker.delete({new_id: new_bytes})
        if error is None or isinstance(error, WriteAbandoned):
            return
        self._counts["failed"] += 1
        logger.warning("a segment could not be reordered: %s", error)
        if isinstance(error, PrefixUnreadable):
            self.report(error)
        elif isinstance(error, OSError):
            self.health.report_failure("a segment could not be reordered", error, reading=False)


def _decode_layer(
    layout: SegmentLayout, memory: memoryview, mapping: MappingLists | None
) -> tuple[Tensor, Tensor]:
    """Copy keys [t, G, Dk] and values [t, G, Dv], in logical order, out of a layer's columns."""
    shape, flat = layout.shape, torch.frombuffer(memory, dtype=torch.uint8)
    keys = torch.empty(layout.num_tokens, shape.num_kv_heads, shape.key_dim, dtype=shape.dtype)
    values = keys.new_empty(layout.num_tokens, shape.num_kv_heads, shape.value_dim)
    parts = flat.split([column.num_bytes for column in layout.columns])
    for column, (pages, part) in enumerate(zip(layout.columns, parts, strict=True)):
        if pages.group_bytes:
            target = values if column in shape.value_columns else keys
            heads = list(shape.heads[column])
            rows = pages.groups_in(part)[: layout.num_tokens].view(shape.dtype)
            if mapping is not None and column != PROBE:
                head_group = mapping[shape.head_group_of(column)].astype(np.int64)
                rows = rows[torch.from_numpy(head_group)]
            target[:, heads] = rows.unflatten(1, (len(heads), -1))
    return keys, values
