"""The store of a server that loads within a pass: parts of prefixes, and reordered segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from impress_sglang.errors import PrefixUnreadable
from impress_sglang.paper.history import TokenHistory
from impress_sglang.paper.reordering import ReorderQueue
from impress_sglang.paper.source import PartSource
from impress_sglang.storage.layout import BLOCK_BYTES, PROBE
from impress_sglang.store.policies import make_policy
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import SegmentState, StoredMatch, StoredSegment, StoredSpan
from impress_sglang.tiers.placement import Tier
from impress_sglang.transfer.stored_source import OpenSpan, StoredSource
from impress_sglang.transfer.wanted import chunks_of


class PartStore(PrefixStore):
    """A store that knows which tokens of its segments matter, and orders them by that."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """See `PrefixStore`."""
        super().__init__(*arguments, **keywords)
        config = self._config
        self.reorders = ReorderQueue(
            self._disk,
            self.segments,
            config.reorder_interval,
            enabled=make_policy(config).reorders,
        )

    def open_part(self, match: StoredMatch, start: int, stop: int, *, whole: bool) -> PartSource:
        """Open a source for the tokens [start, stop) of a match; `close_source` closes it.

        `whole`: all of them will be read.

        Raises:
            PrefixUnreadable: a segment is gone or cannot be opened; the caller should `report` it.
        """
        spans = match.slice(start, stop)

        def make(opened: list[OpenSpan]) -> PartSource:
            histories = [self._history(span.segment) for span in spans]
            memory = self._memory
            return PartSource(
                opened, histories, self._reader, memory.pool, memory.cache, whole=whole
            )

        with self._opening(match.spans):
            self.tree.touch(match)
            return self.segments.open_columns(spans, make)

    def expected_bytes(self, spans: Sequence[StoredSpan], retention: float) -> float:
        """Bytes that a request for a part of some spans is expected to read from SSD.

        A block is read if any of its rows is. Where tokens stand in the order of importance, what
        is wanted of a layer stands together.
        """
        found, shape = 0.0, self._shape
        for span in spans:
            info = span.segment.info
            layout = info.geometry
            chunks = chunks_of(layout.columns)
            tiers = self.segments.tiers(info, codes=False).reshape(shape.num_layers, -1)
            rows = np.maximum(1, BLOCK_BYTES // np.maximum(chunks.row_bytes, 1))
            wanted = np.full(len(rows), retention)
            if not info.reordered:
                wanted = 1.0 - (1.0 - wanted) ** rows
            certain = (PROBE,) if shape.probe_kv_heads else shape.key_columns
            for column in certain:
                first = layout.chunk_index(0, column, 0)
                wanted[first : first + layout.num_chunks] = 1.0
            blocks = (tiers == Tier.SSD).sum(0) @ (chunks.count * wanted)
            found += len(span) / layout.num_tokens * float(blocks) * BLOCK_BYTES
        return found

    def close_source(self, source: StoredSource) -> None:
        """See `PrefixStore.close_source`; a rewrite of what was read may pay now."""
        super().close_source(source)
        self.reorders.note_read(source.segment_ids)

    def leave_disk(self) -> None:
        """See `PrefixStore.leave_disk`."""
        try:
            self.writes.drain()
            self.reorders.close(self._config.io_timeout)
            if self.reorders.has_ended:
                self._settle()
        finally:
            super().leave_disk()

    def _take(self) -> None:
        super()._take()
        if self.reorders.has_ended:
            self._settle()

    def _begin_due(self) -> None:
        super()._begin_due()
        if not self.health.writable:
            return
        try:
            self.reorders.poll(self.quota.has_room, self.worker.removing_bytes)
        except PrefixUnreadable as error:
            self.report(error)
        self.quota.reserved_bytes = self.reorders.reserved_bytes

    def _history(self, segment: StoredSegment) -> TokenHistory:
        if segment.history is None:
            shape = self._shape
            segment.history = TokenHistory(
                shape.num_layers,
                shape.num_head_groups,
                segment.info.num_tokens,
                by_importance=self._config.reorder_key == "importance",
            )
        history: TokenHistory = segment.history
        return history

    def _settle(self) -> None:
        """Update quota, files and index after a rewrite."""
        segment = (outcome := self.reorders.take_finished()).stored
        self.quota.reserved_bytes = 0
        if outcome.taken_over:
            if not self._closed:
                # Otherwise this may be another thread, and the look-ahead is another store's.
                self._lookahead.succeed(outcome.old_id, segment.segment_id)
            self.quota.replace(segment, outcome.old_bytes)
            self.stats.bytes_written += segment.file_bytes
            # The old version was read to the end, so what was written from it is verified.
            self.health.suspects.pop(outcome.old_id, None)
            segment.state = SegmentState.READY
            self.worker.delete({outcome.old_id: outcome.old_bytes}, segment.row)
        if outcome.useless:
            self.worker.delete({outcome.info.segment_id: outcome.new_bytes})
        if isinstance(outcome.error, PrefixUnreadable):
            self.report(outcome.error)
        elif isinstance(outcome.error, OSError):
            self.health.failed("a segment could not be reordered", outcome.error, reading=False)
