"""Damages files of a store at rest, as disks and people do."""

from __future__ import annotations

import os
import struct
from pathlib import Path

BLOCK_BYTES = 4096


def segments(root: Path) -> list[Path]:
    """The segment files under a store's directory."""
    return sorted(root.rglob("*.kv"))


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        assert byte, f"{path} ends before {offset}"
        file.seek(offset)
        file.write(bytes([byte[0] ^ (1 << bit)]))


def flip_data_bit(segment: Path, block: int = 0) -> None:
    """One bit of a block of a segment's KVs is wrong."""
    flip_bit(segment, header_bytes(segment) + block * BLOCK_BYTES + 17)


def truncate(path: Path, by: int = BLOCK_BYTES) -> None:
    os.truncate(path, max(path.stat().st_size - by, 0))


def take_away(root: Path) -> Path:
    """The directory is gone; returns where it is."""
    away = root.with_name(root.name + ".away")
    root.rename(away)
    return away


def retract(root: Path) -> None:
    """The directory is back, in the place of what was made meanwhile."""
    if root.exists():
        number = len(list(root.parent.glob(f"{root.name}.meanwhile-*")))
        root.rename(root.with_name(f"{root.name}.meanwhile-{number}"))
    root.with_name(root.name + ".away").rename(root)


def header_bytes(segment: Path) -> int:
    """Bytes of a segment before its KVs."""
    with segment.open("rb") as file:
        size: int = struct.unpack("<8sQ", file.read(16))[1]
    return size
