"""Prefixes on SSD, and damage to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.segment import read_header
from tests.damage import flip_bit
from tests.serving.harness import Server


def segments(server: Server) -> set[Path]:
    return set(Path(server.stats()["store"]["directory"]).glob("segments/*/*.kv"))


def segment_of(server: Server, prompt: list[int]) -> Path:
    """The file with the last tokens of a stored prompt; newer ones may be rewritten ones."""
    headers = {path: read_header(path, FileSystem()) for path in segments(server)}
    stored = {path: header.info.tokens.tolist() for path, header in headers.items()}
    (found,) = (path for path, tokens in stored.items() if prompt[-len(tokens) :] == tokens)
    return found


def store_damaged(
    server: Server, length: int, seed: int, *, state: bool = False, **fields: Any
) -> list[int]:
    """A prefix on SSD with a byte flipped in a layer after the first one, or in the state that
    stands behind it."""
    before = segments(server)
    prefix = server.store(length, seed, **fields)
    first, *others = sorted(segments(server) - before, key=place_of)
    flip_value(others[0] if state else first)
    return prefix


def place_of(path: Path) -> int:
    """Where a segment begins; files of the same tick of the clock have the same times."""
    return read_header(path, FileSystem()).info.prefix_len


def flip_code(path: Path) -> None:
    """Flip a bit of the codes of the last tokens, in the second layer; exact KVs stay."""
    layout = read_header(path, FileSystem()).info.layout()
    codes = layout.codes[1]
    last = codes.group_offset(codes.num_groups - 1)
    flip_bit(path, layout.place(1, codes=True)[0] + last + 5, bit=4)


def flip_value(path: Path) -> None:
    """Flip a bit of a value of one of the last tokens, in the second layer.

    A prefix that is loaded as it was computed has no use for codes.
    """
    layout = read_header(path, FileSystem()).info.layout()
    column = layout.shape.value_columns[0]
    last = (layout.num_chunks - 1) * layout.columns[column].page_bytes
    flip_bit(path, layout.layer_offset(1) + layout.columns.starts[column] + last + 5, bit=4)
