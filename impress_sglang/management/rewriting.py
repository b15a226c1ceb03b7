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
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from impress_sglang.storage.catalog import segment_path
from impress_sglang.storage.direct_io import AlignedBuffer
from impress_sglang.storage.layer_codec import decode_layer
from impress_sglang.storage.reader import BlockRun, ChunkReader, OpenSegment
from impress_sglang.storage.segment import MappingLists, SegmentInfo
from impress_sglang.storage.throttle import TokenBucket
from impress_sglang.storage.writer import write_segment

logger = logging.getLogger(__name__)

# Seconds of rest per second of work.
REST_RATIO = 3.0
LONGEST_REST_S = 1.0
_NICENESS = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Rewrite:
    """What to write: the open segment, and the description and order of the new one."""

    segment: OpenSegment
    info: SegmentInfo
    mapping: MappingLists


class Rewriter:
    """Writes one segment at a time, on a thread of low priority."""

    def __init__(self, directory: Path, bucket: TokenBucket | None, *, direct: bool) -> None:
        """`bucket` is shared with the requests' reads, as a device is."""
        self._directory = directory
        self._direct = direct
        self._reader = ChunkReader(1, bucket)
        self._buffer = AlignedBuffer()
        self._staging = AlignedBuffer()
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="impress-reorder", initializer=_lower_priority
        )

    def submit(self, rewrite: Rewrite) -> Future[None]:
        """Write and publish the file of `rewrite.info`.

        The future raises `ChunkUnreadable` (the old segment is damaged) or `OSError`.
        """
        return self._pool.submit(self._run, rewrite)

    def close(self) -> None:
        """Finish without resting, and end the thread."""
        self._closing.set()
        self._pool.shutdown(wait=True)
        self._reader.close()

    def _run(self, rewrite: Rewrite) -> None:
        path = segment_path(self._directory, rewrite.info.segment_id)
        write_segment(
            path,
            rewrite.info,
            _PacedReader(rewrite.segment, self._reader, self._staging, self._closing),
            self._buffer,
            direct=self._direct,
            mapping=rewrite.mapping,
        )


class _PacedReader:
    """Gives the layers of a segment in logical order, resting before each."""

    def __init__(
        self,
        segment: OpenSegment,
        reader: ChunkReader,
        staging: AlignedBuffer,
        closing: threading.Event,
    ) -> None:
        self._segment = segment
        self._reader = reader
        self._staging = staging
        self._closing = closing
        self._worked_since = time.monotonic()

    def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
        worked = time.monotonic() - self._worked_since
        self._closing.wait(min(REST_RATIO * worked, LONGEST_REST_S))
        self._worked_since = time.monotonic()
        segment, layout = self._segment, self._segment.layout
        memory = self._staging.view(layout.layer_bytes)
        self._reader.read([BlockRun(segment, layout.layer_offset(layer), memory)])
        mapping = None if segment.mapping is None else segment.mapping[layer]
        return decode_layer(layout, memory, mapping)


def _lower_priority() -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    except OSError as error:
        logger.info("reordering runs at normal priority: %s", error)
