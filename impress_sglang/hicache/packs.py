"""Packs: files of pages that were written together, found again by their headers.

    magic, pages (u64), xxh3-64 of the two and all that follows, identity (16 bytes)
    of each page: key (16 bytes), offset (u64), bytes (u64), xxh3-64 of its bytes
    the pages, each from a block of 4 KiB on

A page is read whole or not at all, so it has one checksum. A file gets its name when all of it is
on the drive.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import BLOCK_BYTES, round_up
from impress_sglang.storage.writer import publishing

SUFFIX = ".pages"
KEY_BYTES = 16
_MAGIC = b"IMPRPAG\x01"
_PREAMBLE = struct.Struct("<8sQQ16s")
_ENTRY = struct.Struct(f"<{KEY_BYTES}sQQQ")
# Of what a header says of itself before it is verified.
_MOST_PAGES = 1 << 20


class BadPack(Exception):
    """The header of a pack is damaged, or of another identity."""


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """Where the bytes of a page are: in which file, from which byte on, how many, and checksum."""

    pack: str
    offset: int
    size: int
    checksum: int

    @property
    def stop(self) -> int:
        """Where the next page begins."""
        return self.offset + round_up(self.size, BLOCK_BYTES)

    def is_whole(self, content: memoryview) -> bool:
        """Whether these are the bytes that were stored."""
        return xxhash.xxh3_64_intdigest(content) == self.checksum


def pack_bytes(sizes: Sequence[int]) -> int:
    """Bytes of a file with pages of these sizes."""
    return _header_bytes(len(sizes)) + sum(round_up(size, BLOCK_BYTES) for size in sizes)


def fill_pack(
    view: memoryview, pack: str, identity: bytes, pages: Mapping[bytes, memoryview]
) -> dict[bytes, Page]:
    """Fill memory of `pack_bytes` with a pack; returns where its pages are."""
    at, found = _header_bytes(len(pages)), dict[bytes, Page]()
    for key, content in pages.items():
        page = Page(pack, at, len(content), xxhash.xxh3_64_intdigest(content))
        view[at : at + page.size] = content
        view[at + page.size : page.stop] = bytes(page.stop - at - page.size)
        at, found[key] = page.stop, page
    entries = b"".join(
        _ENTRY.pack(key, page.offset, page.size, page.checksum) for key, page in found.items()
    )
    rest = identity + entries
    header = _PREAMBLE.pack(_MAGIC, len(found), _digest(len(found), rest), identity) + entries
    view[: len(header)] = header
    view[len(header) : _header_bytes(len(found))] = bytes(_header_bytes(len(found)) - len(header))
    return found


def write_pack(files: FileSystem, path: Path, content: memoryview, *, direct: bool) -> None:
    """Write a pack, and publish it once it is durable; `OSError` leaves no part of it behind."""
    with publishing(files, path, direct=direct) as descriptor:
        files.write(descriptor, 0, content)


def read_pack(files: FileSystem, path: Path, identity: bytes) -> dict[bytes, Page]:
    """The pages of a pack.

    Raises:
        BadPack: it is damaged, or the pack of other weights.
        OSError: it cannot be read.
    """
    preamble = bytearray(_PREAMBLE.size)
    try:
        with files.opened(path, os.O_RDONLY) as descriptor:
            files.read(descriptor, 0, memoryview(preamble))
            magic, count, digest, owner = _PREAMBLE.unpack(preamble)
            if magic != _MAGIC or count > _MOST_PAGES:
                raise BadPack("it is no pack of pages")
            entries = bytearray(count * _ENTRY.size)
            files.read(descriptor, _PREAMBLE.size, memoryview(entries))
    except EOFError as error:
        raise BadPack("it ends within its header") from error
    if _digest(count, owner + entries) != digest:
        raise BadPack("its header fails its checksum")
    if owner != identity:
        raise BadPack("it is of other weights")
    return {key: Page(path.name, *where) for key, *where in _ENTRY.iter_unpack(entries)}


def _header_bytes(pages: int) -> int:
    return round_up(_PREAMBLE.size + pages * _ENTRY.size, BLOCK_BYTES)


def _digest(count: int, rest: bytes) -> int:
    return xxhash.xxh3_64_intdigest(_MAGIC + struct.pack("<Q", count) + rest)
