"""The segment file: its header, and checks that make a bad file a miss.

The header holds what is needed to find the segment again without the index: the identity of the
model, the namespace, the digest and length of the tokens before it, its own tokens, the mapping
lists if the segment is reordered, the KVs of attention sinks, and the checksum of every block. It
is written last, so a file without a valid header was never finished. See docs/format.md for the
bytes.
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
import xxhash

from impress_sglang.codes.rows.fit import SINK_TOKENS
from impress_sglang.errors import SegmentUnreadable, StoreUnavailable
from impress_sglang.loops.types import Float32s, Uint8s
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import BLOCK_BYTES, KVShape, SegmentLayout, round_up
from impress_sglang.storage.quality import EXACT, Quality

MAGIC = b"IMPRSEG\x0a"
FORMAT_VERSION = 15
SEGMENT_SUFFIX = ".kv"
# magic, header bytes, bytes of the JSON description, xxh3-64 of the two sizes and all that follows
_PREAMBLE = struct.Struct("<8sQQQ")
# Some hundred bytes, and a few for each probe head.
_MAX_DESCRIPTION_BYTES = 1 << 16
# How many shapes and qualities are cached, which segments share.
_SHARED = 1024

Tokens = npt.NDArray[np.int32]
Checksums = npt.NDArray[np.uint64]
STATE_TOKEN = -1
"""Stands for a part of a state, which is stored as KVs of such tokens behind its prefix."""
# Per layer, head group and token: the row of the token in the head group's columns (paper,
# 4.4.1).
MappingLists = npt.NDArray[np.unsignedinteger[Any]]


class Priority(enum.IntEnum):
    """Which segments leave the SSD before others, lowest first; the index has the number."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentInfo:
    """What a segment is, apart from its KVs.

    `namespace` is a keyed hash (`StoreDirectory.namespace`); `prefix_digest` is the digest of it
    and of all `prefix_len` tokens before `tokens`; `quality` says how the KVs were computed;
    `generation` counts how often the segment was reordered (0: tokens are in logical order);
    `expires` is when it must be removed, in seconds as of `time.time`, 0: when room is needed;
    `priority` decides which segments go first then. The first `windows_from` of its tokens lack the
    KVs of layers with sliding windows.
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
        """Those of a prompt; none if it is a state."""
        return self.tokens[: 0 if self.tokens[0] == STATE_TOKEN else None]

    @property
    def approximate(self) -> bool:
        """Whether the KVs rest on any approximation."""
        return self.quality != EXACT

    @property
    def reordered(self) -> bool:
        """Whether the file has mapping lists."""
        return self.generation > 0

    @property
    def mapping_dtype(self) -> np.dtype[Any]:
        """Type of the entries of the mapping lists."""
        return np.dtype("<u2" if self.num_tokens <= 1 << 16 else "<u4")

    def describes_same(self, other: SegmentInfo) -> bool:
        """Whether another description is of the same segment and agrees in all fields."""
        return self.description() == other.description() and np.array_equal(
            self.tokens, other.tokens
        )

    def layout(self) -> SegmentLayout:
        """Where the bytes of the file are."""
        size = _PREAMBLE.size + len(self.description()) + self.tokens.nbytes
        size += math.prod(self.mapping_shape) * self.mapping_dtype.itemsize
        size += 4 * math.prod(self.fits_shape) + math.prod(self.sinks_shape)
        header = round_up(size + self.geometry.num_blocks * 8, BLOCK_BYTES)
        return _layout(self.shape, self.chunk_tokens, self.num_tokens, header)

    @property
    def geometry(self) -> SegmentLayout:
        """The layout as if the header had one block: at hand, and all that chunks depend on."""
        return _layout(self.shape, self.chunk_tokens, self.num_tokens, BLOCK_BYTES)

    @property
    def mapping_shape(self) -> tuple[int, ...]:
        """Shape of the mapping lists: layers, head groups, tokens; (0,) if there are none."""
        shape = self.shape
        return (
            (shape.num_layers, shape.num_head_groups, self.num_tokens) if self.reordered else (0,)
        )

    @property
    def fits_shape(self) -> tuple[int]:
        """Shape of the fits: coded layers; (0,) without a basis."""
        return (self.shape.first_raw if self.shape.basis else 0,)

    @property
    def sinks_shape(self) -> tuple[int, int, int]:
        """Shape of the sinks: coded layers, sinks among its tokens (maybe 0), bytes of a token.

        (0, 0, 0) if there are no codes.
        """
        shape = self.shape
        if not shape.coded:
            return (0, 0, 0)
        count = min(max(SINK_TOKENS - self.prefix_len, 0), self.num_tokens)
        return (shape.first_raw, count, shape.token_bytes)

    def description(self) -> bytes:
        """All but the tokens, as JSON; `info_from` makes it from that."""
        fields = {
            "version": FORMAT_VERSION,
            "segment_id": self.segment_id,
            "identity": self.identity,
            "namespace": self.namespace,
            "prefix_digest": self.prefix_digest,
            "prefix_len": self.prefix_len,
            "num_tokens": self.num_tokens,
            "depth": self.quality.depth,
            "bits": self.quality.bits,
            "share": self.quality.share,
            "chunk_tokens": self.chunk_tokens,
            "generation": self.generation,
            "shape": self.shape.to_fields(),
            "expires": self.expires,
            "priority": self.priority.name.lower(),
            "windows_from": self.windows_from,
        }
        return json.dumps(fields, sort_keys=True).encode()


@dataclasses.dataclass(frozen=True)
class SegmentHeader:
    """The contents of a header.

    `checksums` uint64 [blocks]; `sinks` uint8 [L, sinks, bytes], of each its keys and
    then its values, see `SegmentInfo.sinks_shape`; `mapping` unsigned [L, head groups, t], each row
    a permutation, or None when the tokens are in logical order; `fits` float32 [L], with a basis
    `codes.rows.coder.fit_of` each layer.
    """

    info: SegmentInfo
    checksums: Checksums
    sinks: Uint8s
    mapping: MappingLists | None = None
    fits: Float32s = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))

    def __post_init__(self) -> None:
        info = self.info
        assert self.checksums.shape == (info.layout().num_blocks,)
        assert self.sinks.shape == info.sinks_shape
        assert self.fits.shape == info.fits_shape
        assert (self.mapping is not None) == info.reordered
        assert self.mapping is None or self.mapping.shape == info.mapping_shape


# What it computes is kept with it.
_layout = functools.lru_cache(_SHARED)(SegmentLayout)


def checksum(data: memoryview | bytes) -> int:
    """XXH3-64 of `data`."""
    return xxhash.xxh3_64_intdigest(data)


def block_checksums(data: memoryview, blocks: Iterable[int]) -> Checksums:
    """Checksums of some blocks of `data`, which are counted from its start."""
    digest, size = xxhash.xxh3_64_intdigest, BLOCK_BYTES
    return np.array([digest(data[at * size : (at + 1) * size]) for at in blocks], np.uint64)


def encode_header(header: SegmentHeader) -> bytes:
    """The bytes of a header, padded to its size in the layout."""
    info, layout = header.info, header.info.layout()
    description = info.description()
    parts = [description, info.tokens.astype("<i4", copy=False).tobytes()]
    if header.mapping is not None:
        parts.append(header.mapping.astype(info.mapping_dtype, copy=False).tobytes())
    parts.append(header.fits.astype("<f4", copy=False).tobytes())
    parts.append(header.sinks.tobytes())
    parts.append(header.checksums.astype("<u8", copy=False).tobytes())
    body = b"".join(parts).ljust(layout.header_bytes - _PREAMBLE.size, b"\0")
    digest = _header_checksum(layout.header_bytes, len(description), body)
    return _PREAMBLE.pack(MAGIC, layout.header_bytes, len(description), digest) + body


def read_header(path: Path, files: FileSystem) -> SegmentHeader:
    """Read and verify the header of a segment file.

    Raises:
        SegmentUnreadable: the file is missing, short, of another format, or fails its checksum.
        StoreUnavailable: it cannot be read now.
    """
    name = path.name.removesuffix(SEGMENT_SUFFIX)
    with reading(name):
        file_bytes = files.stat(path).st_size
        descriptor = files.open(path, os.O_RDONLY)
        try:
            return decode_header(name, file_bytes, functools.partial(_read, files, descriptor))
        finally:
            files.close(descriptor)


def decode_header(
    name: str, file_bytes: int, read: Callable[[int, int], bytes | bytearray]
) -> SegmentHeader:
    """The header of a file of so many bytes; `read` gives a number of them from an offset on.

    Raises:
        SegmentUnreadable: it is of another format, or fails its checksum.
    """
    magic, header_bytes, description_bytes, expected = _PREAMBLE.unpack(read(0, _PREAMBLE.size))
    most = min(header_bytes - _PREAMBLE.size, _MAX_DESCRIPTION_BYTES)
    if magic != MAGIC or header_bytes > file_bytes or not 0 < description_bytes <= most:
        raise SegmentUnreadable(name, "not a segment of this format")
    _check_size(name, read(_PREAMBLE.size, description_bytes), header_bytes)
    body = read(_PREAMBLE.size, header_bytes - _PREAMBLE.size)
    if _header_checksum(header_bytes, description_bytes, body) != expected:
        raise SegmentUnreadable(name, "the header fails its checksum")
    return _decode_body(bytes(body), description_bytes)


@contextlib.contextmanager
def reading(segment_id: str) -> Iterator[None]:
    """Turn errors inside into whether the file is at fault or cannot be read now.

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


def _header_checksum(header_bytes: int, description_bytes: int, body: bytes | bytearray) -> int:
    return checksum(struct.pack("<QQ", header_bytes, description_bytes) + bytes(body))


def _read(files: FileSystem, descriptor: int, offset: int, size: int) -> bytearray:
    content = bytearray(size)
    files.read(descriptor, offset, memoryview(content))
    return content


def _check_size(name: str, description: bytes | bytearray, header_bytes: int) -> None:
    """Check that a header is as long as its description says, before memory is taken for it.

    Nothing is verified yet, so whatever goes wrong here is the file's fault.
    """
    try:
        fields = json.loads(description)
        version = fields["version"]
        if version != FORMAT_VERSION:
            raise SegmentUnreadable(name, f"format version {version} is not supported")
        # Takes no memory, however many tokens there are.
        tokens = np.broadcast_to(np.int32(0), fields["num_tokens"])
        info = info_from(fields, tokens)
        expected = info.layout().header_bytes
    except SegmentUnreadable:
        raise
    except Exception as error:
        raise SegmentUnreadable(name, f"the header cannot be understood: {error}") from error
    if header_bytes != expected:
        raise SegmentUnreadable(name, "the header has the wrong size")


def info_from(fields: dict[str, Any], tokens: Tokens) -> SegmentInfo:
    """What a segment is, by its description, read as JSON, and its tokens."""
    quality = fields["depth"], fields["bits"], fields["share"]
    return SegmentInfo(
        segment_id=fields["segment_id"],
        identity=fields["identity"],
        namespace=fields["namespace"],
        prefix_digest=fields["prefix_digest"],
        prefix_len=fields["prefix_len"],
        tokens=tokens,
        shape=_shape(json.dumps(fields["shape"])),
        chunk_tokens=fields["chunk_tokens"],
        quality=_quality(json.dumps(quality)),
        generation=fields["generation"],
        expires=fields["expires"],
        priority=Priority[fields["priority"].upper()],
        windows_from=fields["windows_from"],
    )


@functools.lru_cache(_SHARED)
def _shape(text: str) -> KVShape:
    return KVShape.from_fields(json.loads(text))


@functools.lru_cache(_SHARED)
def _quality(text: str) -> Quality:
    """By its text, for 0.0 equals -0.0 and 1, which are written otherwise."""
    quality = Quality(*json.loads(text))
    # Most are exact: with one object for all of them, comparisons are fast.
    return EXACT if quality == EXACT else quality


def _decode_body(body: bytes, description_bytes: int) -> SegmentHeader:
    fields: dict[str, Any] = json.loads(body[:description_bytes])
    tokens = np.frombuffer(body, "<i4", fields["num_tokens"], description_bytes)
    info = info_from(fields, tokens.astype(np.int32))
    offset = description_bytes + tokens.nbytes
    mapping, offset = _read_array(body, offset, info.mapping_dtype, info.mapping_shape)
    fits, offset = _read_array(body, offset, np.dtype("<f4"), info.fits_shape)
    sinks, offset = _read_array(body, offset, np.dtype("u1"), info.sinks_shape)
    checksums, _ = _read_array(body, offset, np.dtype("<u8"), (info.layout().num_blocks,))
    mapping_or_none = mapping if info.reordered else None
    return SegmentHeader(info, checksums, sinks, mapping_or_none, fits)


def _read_array(
    body: bytes, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> tuple[npt.NDArray[Any], int]:
    """An array of the header, and where the next one begins."""
    flat = np.frombuffer(body, dtype, math.prod(shape), offset)
    # A copy, because tensors and loops require aligned and writable memory.
    return flat.reshape(shape).copy(), offset + flat.nbytes


def common_prefix_len(left: Tokens, right: Tokens) -> int:
    """How many leading tokens two sequences share."""
    length = min(len(left), len(right))
    if not length:
        return 0
    different = left[:length] != right[:length]
    first = int(different.argmax())
    return first if different[first] else length
