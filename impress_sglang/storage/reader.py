"""Reads chunks of segments in parallel and verifies each one.

Stage: load. In: chunk runs of open segments and the memory to fill. Out: filled memory, or
`ChunkUnreadable`. It knows nothing of tokens, requests or policies.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from impress_sglang.errors import ChunkUnreadable
from impress_sglang.storage.direct_io import read_exactly
from impress_sglang.storage.layout import SegmentLayout, Stream
from impress_sglang.storage.segment import Checksums, SegmentInfo, checksum, read_header

# Large enough that a request is not dominated by its call, small enough that several are in flight
# for one layer (peers report 0.5 to 6 MiB as the useful range).
TARGET_READ_BYTES = 1 << 20


class OpenSegment:
    """A segment file open for reading, with its checksum table in memory."""

    def __init__(self, path: Path, *, direct: bool) -> None:
        """Open the file.

        Raises:
            ChunkUnreadable: the file is missing or its header is not valid.
        """
        self.info, self.checksums = read_header(path)
        self.layout: SegmentLayout = self.info.layout()
        try:
            self.descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        except OSError as error:
            raise ChunkUnreadable(self.segment_id, f"cannot be opened: {error}") from error

    info: SegmentInfo
    checksums: Checksums

    @property
    def segment_id(self) -> str:
        """Name of the segment."""
        return self.info.segment_id

    def close(self) -> None:
        """Close the file; no read may be in flight."""
        os.close(self.descriptor)


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkRun:
    """Neighbouring chunks of one stream, and the memory that takes their bytes (with padding)."""

    segment: OpenSegment
    layer: int
    stream: Stream
    first: int
    stop: int
    target: memoryview

    def split(self, max_bytes: int) -> Iterator[ChunkRun]:
        """The same run as pieces of at most `max_bytes`, but of at least one chunk."""
        layout = self.segment.layout
        stride = layout.chunk_stride(self.stream)
        step = max(1, max_bytes // stride)
        for first in range(self.first, self.stop, step):
            stop = min(first + step, self.stop)
            start = (first - self.first) * stride
            end = start + layout.run_bytes(self.stream, first, stop)
            yield dataclasses.replace(self, first=first, stop=stop, target=self.target[start:end])


class ChunkReader:
    """A pool of threads that read and verify; `num_threads` reads are in flight at most."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="impress-read")

    def read(self, runs: Sequence[ChunkRun]) -> int:
        """Fill the targets of all runs; returns the bytes read.

        Raises:
            ChunkUnreadable: a chunk is missing, short or corrupt; targets are then undefined.
        """
        pieces = [piece for run in runs for piece in run.split(TARGET_READ_BYTES)]
        if len(pieces) == 1:
            _read_piece(pieces[0])
        else:
            _wait_for_all([self._pool.submit(_read_piece, piece) for piece in pieces])
        return sum(len(piece.target) for piece in pieces)

    def close(self) -> None:
        """Wait for reads in flight and end the threads."""
        self._pool.shutdown(wait=True)


def _wait_for_all(futures: list[Future[None]]) -> None:
    # Every read must have ended before an error is raised: the targets are reused.
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]


def _read_piece(piece: ChunkRun) -> None:
    segment, layout = piece.segment, piece.segment.layout
    base = layout.stream_offset(piece.layer, piece.stream)
    stride = layout.chunk_stride(piece.stream)
    try:
        read_exactly(segment.descriptor, base + piece.first * stride, piece.target)
    except (OSError, EOFError) as error:
        raise ChunkUnreadable(segment.segment_id, str(error)) from error
    _verify(piece)


def _verify(piece: ChunkRun) -> None:
    segment, layout = piece.segment, piece.segment.layout
    stride = layout.chunk_stride(piece.stream)
    table = layout.checksum_index(piece.layer, piece.stream, piece.first)
    expected = segment.checksums[table : table + piece.stop - piece.first].tolist()
    for position, value in enumerate(expected):
        start = position * stride
        end = start + layout.chunk_bytes(piece.stream, piece.first + position)
        if checksum(piece.target[start:end]) != value:
            raise ChunkUnreadable(
                segment.segment_id,
                f"layer {piece.layer} {piece.stream.name} chunk {piece.first + position} "
                "fails its checksum",
            )
