"""The segment file: its header, and checks that make a bad file a miss.

The header holds what is needed to find the segment again without the index: the identity of the
model, the namespace, the digest and length of the tokens before it, its own tokens, and the
checksum of every chunk. It is written last, so a file without a valid header was never finished.
See docs/format.md for the bytes.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from impress_sglang.errors import ChunkUnreadable
from impress_sglang.storage.layout import BLOCK_BYTES, KVShape, SegmentLayout, round_up

MAGIC = b"IMPRSEG\x01"
FORMAT_VERSION = 1
SEGMENT_SUFFIX = ".kv"
# magic, header bytes, bytes of the JSON description, xxh3-64 of the two sizes and all that follows
_PREAMBLE = struct.Struct("<8sQQQ")
_MAX_HEADER_BYTES = 1 << 30

Tokens = npt.NDArray[np.int32]
Checksums = npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True)
class SegmentInfo:
    """What a segment is, apart from its KVs.

    `prefix_digest` is the digest of the namespace and all `prefix_len` tokens before `tokens`;
    `approximate` says that the KVs were computed after a partly loaded prefix.
    """

    segment_id: str
    identity: str
    namespace: str
    prefix_digest: str
    prefix_len: int
    tokens: Tokens
    approximate: bool
    shape: KVShape
    chunk_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens in this segment."""
        return len(self.tokens)

    def describes_same(self, other: SegmentInfo) -> bool:
        """Whether another description says the same of the same segment."""
        return self._description() == other._description() and np.array_equal(
            self.tokens, other.tokens
        )

    def layout(self) -> SegmentLayout:
        """Where the bytes stand."""
        draft = SegmentLayout(self.shape, self.chunk_tokens, self.num_tokens, BLOCK_BYTES)
        size = _PREAMBLE.size + len(self._description()) + self.tokens.nbytes
        header = round_up(size + draft.num_checksums * 8, BLOCK_BYTES)
        return dataclasses.replace(draft, header_bytes=header)

    def _description(self) -> bytes:
        fields = {
            "version": FORMAT_VERSION,
            "segment_id": self.segment_id,
            "identity": self.identity,
            "namespace": self.namespace,
            "prefix_digest": self.prefix_digest,
            "prefix_len": self.prefix_len,
            "num_tokens": self.num_tokens,
            "approximate": self.approximate,
            "chunk_tokens": self.chunk_tokens,
            "shape": self.shape.to_fields(),
        }
        return json.dumps(fields, sort_keys=True).encode()


def checksum(data: memoryview | bytes) -> int:
    """XXH3-64 of `data`."""
    return xxhash.xxh3_64_intdigest(data)


def encode_header(info: SegmentInfo, checksums: Checksums) -> bytes:
    """The header of a segment, padded to its size in the layout."""
    layout = info.layout()
    assert checksums.shape == (layout.num_checksums,)
    description = info._description()
    tokens = info.tokens.astype("<i4", copy=False).tobytes()
    body = description + tokens + checksums.astype("<u8", copy=False).tobytes()
    body = body.ljust(layout.header_bytes - _PREAMBLE.size, b"\0")
    digest = _header_checksum(layout.header_bytes, len(description), body)
    return _PREAMBLE.pack(MAGIC, layout.header_bytes, len(description), digest) + body


def read_header(path: Path) -> tuple[SegmentInfo, Checksums]:
    """Read and verify the header of a segment file.

    Raises:
        ChunkUnreadable: the file is missing, short, of another format, or fails its checksum.
    """
    name = path.name.removesuffix(SEGMENT_SUFFIX)
    try:
        with path.open("rb") as file:
            preamble = file.read(_PREAMBLE.size)
            header_bytes, description_bytes, expected = _parse_preamble(name, preamble)
            body = file.read(header_bytes - _PREAMBLE.size)
    except OSError as error:
        raise ChunkUnreadable(name, f"header cannot be read: {error}") from error
    complete = len(body) == header_bytes - _PREAMBLE.size
    if not complete or _header_checksum(header_bytes, description_bytes, body) != expected:
        raise ChunkUnreadable(name, "header is short or fails its checksum")
    return _decode_body(name, body, description_bytes)


def _header_checksum(header_bytes: int, description_bytes: int, body: bytes) -> int:
    return checksum(struct.pack("<QQ", header_bytes, description_bytes) + body)


def _parse_preamble(name: str, preamble: bytes) -> tuple[int, int, int]:
    if len(preamble) < _PREAMBLE.size:
        raise ChunkUnreadable(name, "file ends before its header")
    magic, header_bytes, description_bytes, expected = _PREAMBLE.unpack(preamble)
    if magic != MAGIC or not _PREAMBLE.size < header_bytes <= _MAX_HEADER_BYTES:
        raise ChunkUnreadable(name, "not a segment of this format")
    return header_bytes, description_bytes, expected


def _decode_body(name: str, body: bytes, description_bytes: int) -> tuple[SegmentInfo, Checksums]:
    fields: dict[str, Any] = json.loads(body[:description_bytes])
    if fields["version"] != FORMAT_VERSION:
        raise ChunkUnreadable(name, f"format version {fields['version']} is not supported")
    tokens = np.frombuffer(body, "<i4", fields["num_tokens"], description_bytes)
    info = SegmentInfo(
        segment_id=fields["segment_id"],
        identity=fields["identity"],
        namespace=fields["namespace"],
        prefix_digest=fields["prefix_digest"],
        prefix_len=fields["prefix_len"],
        tokens=tokens.astype(np.int32),
        approximate=fields["approximate"],
        shape=KVShape.from_fields(fields["shape"]),
        chunk_tokens=fields["chunk_tokens"],
    )
    offset = description_bytes + tokens.nbytes
    checksums = np.frombuffer(body, "<u8", info.layout().num_checksums, offset)
    return info, checksums.astype(np.uint64)
