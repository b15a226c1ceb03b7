"""Reads runs of blocks of segments in parallel and verifies each block.

Stage: load. In: runs of blocks of open segments and the memory to fill. Out: filled memory, or
`ChunkUnreadable`. It knows nothing of tokens, requests or policies.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from impress_sglang.errors import ChunkUnreadable
from impress_sglang.storage.direct_io import read_exactly
from impress_sglang.storage.layout import BLOCK_BYTES, SegmentLayout
from impress_sglang.storage.read_cost import ReadCost
from impress_sglang.storage.segment import (
    Checksums,
    MappingLists,
    SegmentInfo,
    SketchTables,
    block_checksums,
    read_header,
)
from impress_sglang.storage.throttle import TokenBucket

# Large enough that a request is not dominated by its call, small enough that several are in flight
# for one layer (peers report 0.5 to 6 MiB as the useful range).
TARGET_READ_BYTES = 1 << 20


class OpenSegment:
    """A segment file open for reading, with all of its header in memory."""

    def __init__(self, path: Path, *, direct: bool) -> None:
        """Open the file.

        Raises:
            ChunkUnreadable: the file is missing or its header is not valid.
        """
        header = read_header(path)
        self.info: SegmentInfo = header.info
        self.checksums: Checksums = header.checksums
        self.mapping: MappingLists | None = header.mapping
        self.sketch_tables: SketchTables | None = header.sketch_tables
        self.layout: SegmentLayout = self.info.layout()
        try:
            self.descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        except OSError as error:
            raise ChunkUnreadable(self.segment_id, f"cannot be opened: {error}") from error

    @property
    def segment_id(self) -> str:
        """Name of the segment."""
        return self.info.segment_id

    def close(self) -> None:
        """Close the file; no read may be in flight."""
        os.close(self.descriptor)


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRun:
    """Neighbouring blocks of a segment, and the memory that takes their bytes.

    `offset` is in bytes from the start of the file; it and the length are multiples of a block.
    """

    segment: OpenSegment
    offset: int
    target: memoryview

    def split(self, max_bytes: int) -> Iterator[BlockRun]:
        """The same run as pieces of at most `max_bytes`, a multiple of a block."""
        assert max_bytes % BLOCK_BYTES == 0
        for start in range(0, len(self.target), max_bytes):
            part = self.target[start : start + max_bytes]
            yield BlockRun(self.segment, self.offset + start, part)


class ChunkReader:
    """A pool of threads that read and verify; `num_threads` reads are in flight at most."""

    def __init__(self, num_threads: int, bucket: TokenBucket | None = None) -> None:
        """`bucket` emulates a slower device; none is as fast as the device."""
        self._num_threads = num_threads
        self._bucket = bucket
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="impress-read")
        self.cost = ReadCost()

    def read(self, runs: Sequence[BlockRun]) -> int:
        """Fill the targets of all runs; returns the bytes read.

        Raises:
            ChunkUnreadable: a block is missing, short or corrupt; targets are then undefined.
        """
        pieces = [piece for run in runs for piece in run.split(TARGET_READ_BYTES)]
        total = sum(len(piece.target) for piece in pieces)
        began = time.perf_counter()
        if len(pieces) == 1:
            self._read_pieces(pieces)
        else:
            # A task takes several pieces, so that small ones do not cost a task each.
            shares = [pieces[first :: self._num_threads] for first in range(self._num_threads)]
            _wait_for_all(
                [self._pool.submit(self._read_pieces, share) for share in shares if share]
            )
        self.cost.observe(len(pieces), total, time.perf_counter() - began)
        return total

    def close(self) -> None:
        """Wait for reads in flight and end the threads."""
        self._pool.shutdown(wait=True)

    def _read_pieces(self, pieces: Sequence[BlockRun]) -> None:
        for piece in pieces:
            if self._bucket is not None:
                self._bucket.take(len(piece.target))
            _read_piece(piece)


def _wait_for_all(futures: list[Future[None]]) -> None:
    # Every read must have ended before an error is raised: the targets are reused.
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]


def _read_piece(piece: BlockRun) -> None:
    segment = piece.segment
    try:
        read_exactly(segment.descriptor, piece.offset, piece.target)
    except (OSError, EOFError) as error:
        raise ChunkUnreadable(segment.segment_id, str(error)) from error
    first = (piece.offset - segment.layout.header_bytes) // BLOCK_BYTES
    found = block_checksums(piece.target)
    expected = segment.checksums[first : first + len(found)].tolist()
    if found != expected:
        bad = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        raise ChunkUnreadable(
            segment.segment_id,
            f"the block at {piece.offset + bad * BLOCK_BYTES} fails its checksum",
        )
