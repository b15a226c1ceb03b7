"""A segment file that is open for reading."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from impress_sglang.errors import SegmentUnreadable
from impress_sglang.storage.direct_io import AlignedMemory
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import BLOCK_BYTES, SegmentLayout
from impress_sglang.storage.segment import (
    Checksums,
    MappingLists,
    SegmentInfo,
    block_checksums,
    read_header,
    reading,
)

Integers = npt.NDArray[np.int64]


class OpenSegment:
    """A segment file open for reading, with all of its header in memory."""

    def __init__(self, path: Path, files: FileSystem, *, direct: bool) -> None:
        """Open the file.

        Raises:
            SegmentUnreadable: the file is missing or its header is not valid.
            StoreUnavailable: it cannot be opened or read now.
        """
        header = read_header(path, files)
        self.files = files
        self.info: SegmentInfo = header.info
        self.checksums: Checksums = header.checksums
        self.mapping: MappingLists | None = header.mapping
        self.sinks = header.sinks
        self.fits = header.fits
        self.layout: SegmentLayout = self.info.layout()
        self.readers = 0
        """How many read from it, of those that share it."""
        self.retired = False
        """Whether its segment has left the store, or has another file."""
        self.reader: Any = None
        """The `BlockReader` of its blocks; None: that of the drive."""
        with reading(self.segment_id):
            self.descriptor = files.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))

    @property
    def segment_id(self) -> str:
        """Name of the segment."""
        return self.info.segment_id

    def check_blocks(self, memory: AlignedMemory, offset: int, blocks: Integers) -> None:
        """Verify blocks that were read.

        Args:
            memory: filled from byte `offset` of the file on.
            offset: in the file, where a block begins.
            blocks: int64 [n], counted from the start of the memory.

        Raises:
            SegmentUnreadable: one of them fails its checksum.
        """
        first = (offset - self.layout.header_bytes) // BLOCK_BYTES
        found = block_checksums(memory.view, blocks.tolist())
        bad = np.flatnonzero(found != self.checksums[first + blocks])
        if len(bad):
            at = offset + int(blocks[bad[0]]) * BLOCK_BYTES
            raise SegmentUnreadable(self.segment_id, f"the block at {at} fails its checksum")

    def fill(self, memory: AlignedMemory, offset: int) -> None:
        """Fill memory from byte `offset` of the file on, where a block begins, and verify it.

        Raises:
            SegmentUnreadable: a block is missing or fails its checksum.
            StoreUnavailable: it cannot be read now.
        """
        with reading(self.segment_id):
            self.files.read(self.descriptor, offset, memory.view)
        self.check_blocks(memory, offset, np.arange(len(memory) // BLOCK_BYTES))

    def check_all(self, note: Callable[[], None] = lambda: None) -> None:
        """Read and verify all layers, see `fill`; `note` is called after each of them."""
        layout = self.layout
        for layer in range(layout.shape.num_layers):
            memory = AlignedMemory(layout.layer_bytes(layer))
            self.fill(memory, layout.layer_offset(layer))
            note()

    def close(self) -> None:
        """Close the file; no read may be in flight."""
        # Nothing was written through this descriptor.
        with contextlib.suppress(OSError):
            self.files.close(self.descriptor)
