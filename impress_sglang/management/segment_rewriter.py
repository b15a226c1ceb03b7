"""The background rewrite of one segment in a better order: its own thread, slow on purpose.

Between two layers the thread rests several times as long as it worked, so that requests see hardly
any of it, and its scheduling priority is low. Memory is bounded by two layers of one segment.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
from torch import Tensor

from impress_sglang.management import token_order
from impress_sglang.storage.direct_io import AlignedBuffer, AlignedMemory
from impress_sglang.storage.directory import StoreDirectory
from impress_sglang.storage.layer_codec import decode_layer
from impress_sglang.storage.open_segment import OpenSegment
from impress_sglang.storage.pending_read import BlockRuns
from impress_sglang.storage.reader import BlockReader
from impress_sglang.storage.segment import MappingLists, SegmentInfo
from impress_sglang.storage.writer import WriteAbandoned, write_segment
from impress_sglang.threads import BackgroundThread, compute_alone

logger = logging.getLogger(__name__)

# Seconds of rest per second of work.
REST_RATIO = 3.0
LONGEST_REST_S = 1.0
_NICENESS = 10
Shares = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Rewrite:
    """What to write and what is known of it: a snapshot, for another thread.

    `info` describes the new segment; `average` and `order_key` float32 [L, head groups, t] are the
    token history's; `read_bytes` were read for selected tokens since the segment got its order;
    `force`: rewrite even if it does not pay. `left` is set when the segment is not stored any more.
    """

    segment: OpenSegment
    info: SegmentInfo
    average: npt.NDArray[np.float32]
    order_key: npt.NDArray[np.float32]
    node_starts: list[int]
    read_bytes: int
    gap_bytes: int
    force: bool
    left: threading.Event = dataclasses.field(default_factory=threading.Event)


class SegmentRewriter:
    """Writes one segment at a time, on a thread of low priority."""

    def __init__(self, directory: StoreDirectory, *, direct: bool, patience: float) -> None:
        """`patience`: see `BlockReader`."""
        self._directory = directory
        self._direct = direct
        self._reader = BlockReader(1, directory.files, patience=patience)
        self._buffer = AlignedBuffer()
        self._closing = threading.Event()
        self._thread = BackgroundThread("impress-reorder", _stay_behind)

    def submit(self, rewrite: Rewrite) -> Future[Shares | None]:
        """Write and publish the file of `rewrite.info`, with the age of the old one, if it pays.

        The result is the expected share of selected rows of each chunk, float64 [L, head groups,
        chunks]; None if the rewrite does not pay.

        The future raises `PrefixUnreadable` (for the old segment), `OSError`, or `WriteAbandoned`
        if the old segment is not stored any more.
        """
        return self._thread.submit(self._run, rewrite)

    def close(self, seconds: float) -> None:
        """Finish without rests, and end the thread, unless that takes longer than `seconds`."""
        self._closing.set()
        if self._thread.close(seconds):
            self._reader.close()

    def _run(self, rewrite: Rewrite) -> Shares | None:
        self._reader.revive()
        mapping = token_order.mapping_lists(rewrite.order_key, rewrite.node_starts)
        if not rewrite.force and not _pays(rewrite, mapping):
            return None
        files, old = self._directory.files, rewrite.segment.info.segment_id
        try:
            written = files.stat(self._directory.segment_path(old))
        except FileNotFoundError:
            raise WriteAbandoned("its file is gone") from None
        write_segment(
            self._directory.segment_path(rewrite.info.segment_id),
            rewrite.info,
            _PacedReader(rewrite, self._reader, self._closing),
            self._buffer,
            files,
            direct=self._direct,
            mapping=mapping,
            written_ns=written.st_mtime_ns,
            is_wanted=lambda: not rewrite.left.is_set(),
        )
        return token_order.chunk_shares(rewrite.average, mapping, rewrite.info.layout())


class _PacedReader:
    """Gives the layers of a segment in logical order, resting before each."""

    def __init__(self, rewrite: Rewrite, reader: BlockReader, closing: threading.Event) -> None:
        self._segment, self._left = rewrite.segment, rewrite.left
        self._reader = reader
        self._memory = AlignedMemory(self._segment.layout.columns_bytes)
        self._closing = closing
        self._worked_since = time.monotonic()

    def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
        if self._left.is_set():
            raise WriteAbandoned("the segment is not stored any more")
        worked = time.monotonic() - self._worked_since
        self._closing.wait(min(REST_RATIO * worked, LONGEST_REST_S))
        self._worked_since = time.monotonic()
        segment, layout = self._segment, self._segment.layout
        whole = np.array([0]), np.array([layout.columns_bytes])
        offset = layout.layer_offset(layer)
        self._reader.read(BlockRuns(segment, self._memory, offset, *whole))
        mapping = None if segment.mapping is None else segment.mapping[layer]
        return decode_layer(layout, self._memory.view, mapping)


def _pays(rewrite: Rewrite, mapping: MappingLists) -> bool:
    """Whether past reads would have been shorter by more bytes than the file has."""
    layout = rewrite.info.layout()
    before, after = (
        token_order.expected_bytes(rewrite.average, order, layout, rewrite.gap_bytes)
        for order in (rewrite.segment.mapping, mapping)
    )
    return rewrite.read_bytes * (1.0 - after / max(before, 1.0)) > layout.file_bytes


def _stay_behind() -> None:
    """Take as little CPU time as possible from the requests that are served meanwhile."""
    compute_alone()
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    except OSError as error:
        logger.info("reordering runs at normal priority: %s", error)
