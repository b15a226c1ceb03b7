"""The segment file: its header, and checks that make a bad file a miss; see docs/format.md.

The header suffices to find the segment again without the index. It is written last, so a file
without a valid header was never completed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from impress_sglang.codes.rows.fit import SINK_TOKENS
from impress_sglang.errors import SegmentUnreadable, StoreUnavailable
from impress_sglang.loops.types import Float32s, Indices, Uint8s
from impress_sglang.storage.files import AlignedMemory, FileSystem
from impress_sglang.storage.layout import BLOCK_BYTES, KVShape, SegmentLayout, round_up
from impress_sglang.storage.quality import EXACT, Quality

MAGIC = b"IMPRSEG\x0a"
FORMAT_VERSION = 15
SEGMENT_SUFFIX = ".kv"
# magic, header bytes, bytes of the JSON description, xxh3-64 of the two sizes and all that follows
_PREAMBLE = struct.Struct("<8sQQQ")
# Some hundred bytes, and a few for each probe head.
_MAX_DESCRIPTION_BYTES = 1 << 16
# Number of cached shapes and qualities, which segments share.
_SHARED = 1024

Tokens = npt.NDArray[np.int32]
Checksums = npt.NDArray[np.uint64]
STATE_TOKEN = -1
"""Token of a part of a state, which is stored as KVs of such tokens after its prefix."""
# Per layer, head group and token: the row of the token in the head group's columns (paper,
# 4.4.1).
MappingLists = npt.NDArray[np.unsignedinteger[Any]]


class Priority(enum.IntEnum):
    """Eviction priority on SSD, lowest first; the index has the number."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentInfo:
    """Metadata and tokens of a segment.

    `namespace` is a keyed hash (`StoreDirectory.namespace`); `prefix_digest` is the digest of it
    and of all `prefix_len` tokens before `tokens`; `quality` is that of the KVs; `generation`
    counts reorderings (0: tokens are in logical order); `expires` is when it must be removed, in
    seconds as of `time.time`, or 0 for when room is needed; `priority` orders removals then. The
    first `windows_from` of its tokens lack the KVs of layers with sliding windows.
    """

    segment_id: str
    identity: str
    namespace: str
    prefix_digest: str
    prefix_len: int
    tokens: Tokens
    shape: KVShape
    chunk_tokens: int
    quality: Quality = EXACT
    generation: int = 0
    expires: int = 0
    priority: Priority = Priority.NORMAL
    windows_from: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens in this segment."""
        return len(self.tokens)

    @property
    def prompt_tokens(self) -> Tokens:
        """Tokens of a prompt; empty if it is a state."""
        return self.tokens[: 0 if self.tokens[0] == STATE_TOKEN else None]

    @property
    def reordered(self) -> bool:
        """Whether the file has mapping lists."""
        return self.generation > 0

    def describes_same(self, other: SegmentInfo) -> bool:
        """Whether another info is of the same segment and agrees in all fields."""
        return self.description() == other.description() and np.array_equal(
            self.tokens, other.tokens
        )

    def layout(self) -> SegmentLayout:
        """Return the layout of the file."""
        size = _PREAMBLE.size + len(self.description())
        size += sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.arrays().values())
        header = round_up(size, BLOCK_BYTES)
        return _layout(self.shape, self.chunk_tokens, self.num_tokens, header)

    @property
    def geometry(self) -> SegmentLayout:
        """Layout as if the header had one block: cheap, and sufficient for chunks."""
        return _layout(self.shape, self.chunk_tokens, self.num_tokens, BLOCK_BYTES)

    def arrays(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Types and shapes of the arrays after the description in the header, in order."""
        shape, count = self.shape, self.num_tokens
        lists = (shape.num_layers, len(shape.head_groups), count) if self.reordered else (0,)
        fits = shape.first_raw if shape.basis else 0
        sinks = (0, 0, 0)
        if shape.coded:
            inside = min(max(SINK_TOKENS - self.prefix_len, 0), count)
            sinks = (shape.first_raw, inside, shape.token_bytes)
        return {
            "tokens": (np.dtype("<i4"), (count,)),
            "mapping": (np.dtype("<u2" if count <= 1 << 16 else "<u4"), lists),
            "fits": (np.dtype("<f4"), (fits,)),
            "sinks": (np.dtype("u1"), sinks),
            "checksums": (np.dtype("<u8"), (self.geometry.num_blocks,)),
        }

    def description(self) -> bytes:
        """Return all fields but the tokens as JSON; inverse of `info_from`."""
        quality = self.quality
        fields = {
            **{name: getattr(self, name) for name in _PLAIN_FIELDS},
            "version": FORMAT_VERSION,
            "num_tokens": self.num_tokens,
            "depth": quality.depth,
            "bits": quality.bits,
            "share": quality.recompute_ratio,
            "shape": self.shape.fields,
            "priority": self.priority.name.lower(),
        }
        return json.dumps(fields, sort_keys=True).encode()


# Fields that JSON has unchanged.
_FIELDS = {field.name for field in dataclasses.fields(SegmentInfo)}
_PLAIN_FIELDS = _FIELDS - {"tokens", "shape", "quality", "priority"}


@dataclasses.dataclass(frozen=True)
class SegmentHeader:
    """Content of a header, with types and shapes as in `SegmentInfo.arrays`.

    `checksums` [blocks]; `sinks` [coded layers, sinks among its tokens, bytes], keys and then
    values of each; `mapping` [L, head groups, t], each row a permutation, or None if the tokens
    are in logical order; `fits` [coded layers], with a basis `codes.rows.coder.misfit_of` each.
    """

    info: SegmentInfo
    checksums: Checksums
    sinks: Uint8s
    mapping: MappingLists | None = None
    fits: Float32s = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))

    def __post_init__(self) -> None:
        assert (self.mapping is not None) == self.info.reordered
        for name, (_, shape) in self.info.arrays().items():
            assert self.array(name).shape == shape

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return one of `SegmentInfo.arrays`; empty for no mapping."""
        array: npt.NDArray[Any] | None = getattr(self.info if name == "tokens" else self, name)
        return np.zeros(0) if array is None else array


# Cached with its computed properties.
_layout = functools.lru_cache(_SHARED)(SegmentLayout)


def block_checksums(data: memoryview, blocks: Iterable[int]) -> Checksums:
    """Compute checksums of some blocks of `data`, numbered from its start."""
    digest, size = xxhash.xxh3_64_intdigest, BLOCK_BYTES
    return np.array([digest(data[at * size : (at + 1) * size]) for at in blocks], np.uint64)


def encode_header(header: SegmentHeader) -> bytes:
    """Encode a header, padded to its size in the layout."""
    info, size = header.info, header.info.layout().header_bytes
    description = info.description()
    arrays = (header.array(name).astype(dtype) for name, (dtype, _) in info.arrays().items())
    body = description + b"".join(array.tobytes() for array in arrays)
    body = body.ljust(size - _PREAMBLE.size, b"\0")
    digest = _header_checksum(size, len(description), body)
    return _PREAMBLE.pack(MAGIC, size, len(description), digest) + body


def read_header(path: Path, files: FileSystem) -> SegmentHeader:
    """Read and verify the header of a segment file.

    Raises:
        SegmentUnreadable: the file is missing, short, of another format, or fails its checksum.
        StoreUnavailable: it cannot be read now.
    """
    name = path.name.removesuffix(SEGMENT_SUFFIX)
    with reading(name):
        file_bytes = files.stat(path).st_size
        with files.opened(path, os.O_RDONLY) as descriptor:
            return decode_header(name, file_bytes, functools.partial(_read, files, descriptor))


def decode_header(
    name: str, file_bytes: int, read: Callable[[int, int], bytes | bytearray]
) -> SegmentHeader:
    """Decode and verify the header of a file; `read` takes an offset and a number of bytes."""
    magic, header_bytes, description_bytes, expected = _PREAMBLE.unpack(read(0, _PREAMBLE.size))
    limit = min(header_bytes - _PREAMBLE.size, _MAX_DESCRIPTION_BYTES)
    if magic != MAGIC or header_bytes > file_bytes or not 0 < description_bytes <= limit:
        raise SegmentUnreadable(name, "not a segment of this format")
    description = read(_PREAMBLE.size, description_bytes)
    # The description is not verified yet, so any error here is the fault of the file.
    try:
        fields = json.loads(description)
        if (version := fields["version"]) != FORMAT_VERSION:
            raise SegmentUnreadable(name, f"format version {version} is not supported")
        # Takes no memory for any number of tokens.
        info = info_from(fields, np.broadcast_to(np.int32(0), fields["num_tokens"]))
        size = info.layout().header_bytes
    except SegmentUnreadable:
        raise
    except Exception as error:
        raise SegmentUnreadable(name, f"the header cannot be understood: {error}") from error
    if header_bytes != size:
        raise SegmentUnreadable(name, "the header has the wrong size")
    start, offset = _PREAMBLE.size + description_bytes, 0
    body = bytes(read(start, header_bytes - start))
    if _header_checksum(header_bytes, description_bytes, bytes(description) + body) != expected:
        raise SegmentUnreadable(name, "the header fails its checksum")
    arrays = dict[str, npt.NDArray[Any]]()
    for name, (dtype, shape) in info.arrays().items():
        flat = np.frombuffer(body, dtype, math.prod(shape), offset)
        # A copy, because tensors and loops require aligned and writable memory.
        arrays[name] = flat.reshape(shape).copy()
        offset += flat.nbytes
    info = dataclasses.replace(info, tokens=arrays["tokens"].astype(np.int32))
    mapping = arrays["mapping"] if info.reordered else None
    return SegmentHeader(info, arrays["checksums"], arrays["sinks"], mapping, arrays["fits"])


@contextlib.contextmanager
def reading(segment_id: str) -> Iterator[None]:
    """Translate errors of the block: the file is at fault, or cannot be read now.

    Raises:
        SegmentUnreadable: the file is missing or ends too early.
        StoreUnavailable: any other error of the operating system.
    """
    try:
        yield
    except (FileNotFoundError, EOFError) as error:
        raise SegmentUnreadable(segment_id, str(error)) from error
    except OSError as error:
        raise StoreUnavailable(segment_id, str(error)) from error


def _header_checksum(header_bytes: int, description_bytes: int, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", header_bytes, description_bytes) + body)


def _read(files: FileSystem, descriptor: int, offset: int, size: int) -> bytearray:
    content = bytearray(size)
    files.read(descriptor, offset, memoryview(content))
    return content


def info_from(fields: dict[str, Any], tokens: Tokens) -> SegmentInfo:
    """Make the info of a segment from its description, parsed as JSON, and its tokens."""
    quality = fields["depth"], fields["bits"], fields["share"]
    return SegmentInfo(
        **{name: fields[name] for name in _PLAIN_FIELDS},
        tokens=tokens,
        shape=_shape(json.dumps(fields["shape"])),
        quality=_quality(json.dumps(quality)),
        priority=Priority[fields["priority"].upper()],
    )


@functools.lru_cache(_SHARED)
def _shape(text: str) -> KVShape:
    fields: dict[str, Any] = json.loads(text)
    fields |= {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return KVShape(**{**fields, "dtype": getattr(torch, fields["dtype"])})


@functools.lru_cache(_SHARED)
def _quality(text: str) -> Quality:
    """Cached by text, because 0.0 equals -0.0, and 1.0 equals 1, which JSON writes differently."""
    quality = Quality(*json.loads(text))
    # Most are exact: with one object for all, comparisons are fast.
    return EXACT if quality == EXACT else quality


class OpenSegment:
    """A segment file open for reading, with all of its header in memory."""

    def __init__(self, path: Path, files: FileSystem, *, direct: bool) -> None:
        """Open the file; raises as `read_header`."""
        header = read_header(path, files)
        self.files, self.info, self.layout = files, header.info, header.info.layout()
        self.checksums, self.mapping = header.checksums, header.mapping
        self.sinks, self.fits = header.sinks, header.fits
        self.readers = 0
        """Number of sources that share it and read from it."""
        self.reader: Any = None
        """The `BlockReader` of its blocks; set by code that opens it to be read in blocks."""
        with reading(self.segment_id):
            self.descriptor = files.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))

    @property
    def segment_id(self) -> str:
        return self.info.segment_id

    def check_blocks(self, memory: AlignedMemory, offset: int, blocks: Indices) -> None:
        """Verify blocks int64 [n] of memory that was filled from byte `offset` of the file.

        It raises `SegmentUnreadable` if a block fails its checksum.
        """
        first = (offset - self.layout.header_bytes) // BLOCK_BYTES
        checksums = block_checksums(memory.view, blocks.tolist())
        bad = np.flatnonzero(checksums != self.checksums[first + blocks])
        if len(bad):
            at = offset + int(blocks[bad[0]]) * BLOCK_BYTES
            raise SegmentUnreadable(self.segment_id, f"the block at {at} fails its checksum")

    def fill(self, memory: AlignedMemory, offset: int) -> None:
        """Fill memory from byte `offset` of the file, where a block begins, and verify it.

        It raises as `reading` and `check_blocks`.
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
        # This descriptor was not used for writing.
        with contextlib.suppress(OSError):
            self.files.close(self.descriptor)


def common_prefix_len(left: Tokens, right: Tokens) -> int:
    """Number of leading tokens that two sequences share."""
    length = min(len(left), len(right))
    if not length:
        return 0
    different = left[:length] != right[:length]
    first = int(different.argmax())
    return first if different[first] else length
