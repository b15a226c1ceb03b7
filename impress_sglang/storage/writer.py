"""Writes segments: one layer at a time, published only when complete.

Chunks are written to a temporary name, the header last, then come fsync, rename and fsync of the
directory, so that a file with its final name is always complete. Memory is bounded by one layer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from impress_sglang.codes.coding import LayerEncoder
from impress_sglang.storage.files import AlignedMemory, FileSystem
from impress_sglang.storage.layout import BLOCK_BYTES, PROBE, SegmentLayout
from impress_sglang.storage.segment import (
    MappingLists,
    SegmentHeader,
    SegmentInfo,
    block_checksums,
    encode_header,
)

TEMPORARY_SUFFIX = ".tmp"


class WriteAbandoned(Exception):
    """The KVs to write are no longer available or needed; no segment is published."""


class WriteDiscarded(WriteAbandoned):
    """The segment is no longer needed; it was already written when that became known."""


LayerReader = Callable[[int], tuple[Tensor, Tensor]]
"""Returns the KVs to write; called once per layer, in order, on the writing thread.

Keys [t, G, Dk] and values [t, G, Dv] are in logical order, on the CPU. It may raise
`WriteAbandoned`.
"""


def write_segment(
    path: Path,
    info: SegmentInfo,
    read_layer: LayerReader,
    files: FileSystem,
    *,
    direct: bool,
    mapping: MappingLists | None = None,
    coding: LayerEncoder | None = None,
    written_ns: int | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Write a segment, in the order of `mapping` [L, head groups, t], and publish it under `path`.

    `coding` codes layers, if the shape has codes.
    `written_ns`: time when these KVs were first written, for the age of the file; None for now.
    `is_wanted` is called last: a segment purged meanwhile is not published, so that the next start
    does not find it.

    Raises:
        OSError: the file system refused, for example because it is full; no file is left.
        WriteAbandoned: the reader gave up, or the segment is not needed; no file is left.
    """
    layout, shape = info.layout(), info.shape
    assert (coding is not None) == shape.coded, "nobody says how to code"
    shapes = info.arrays()
    checksums, sinks, fits = (np.zeros(*shapes[n][::-1]) for n in ("checksums", "sinks", "fits"))
    files.make_directory(path.parent)
    with publishing(files, path, direct=direct, is_wanted=is_wanted) as descriptor:
        memory = AlignedMemory(max(layout.max_layer_bytes, layout.header_bytes)).view
        first = 0
        for layer in range(shape.num_layers):
            keys, values = read_layer(layer)
            groups = None
            if coding is not None and layer < shape.first_raw:
                groups, fit = coding(layer, keys, values)
                fits[layer : layer + 1] = fit
                first_tokens = slice(sinks.shape[1])
                sinks[layer] = shape.rows_of(keys[first_tokens], values[first_tokens]).numpy()
            own_mapping = None if mapping is None else mapping[layer]
            body = memory[: layout.layer_bytes(layer)]
            _encode_layer(layout, layer, keys, values, own_mapping, body, groups)
            blocks = len(body) // BLOCK_BYTES
            checksums[first : first + blocks] = block_checksums(body, range(blocks))
            first += blocks
            files.write(descriptor, layout.layer_offset(layer), body)
        header = memory[: layout.header_bytes]
        header[:] = encode_header(SegmentHeader(info, checksums, sinks, mapping, fits))
        files.write(descriptor, 0, header)
        if written_ns is not None:
            # If a network file system refuses this, the age starts at zero.
            with contextlib.suppress(OSError):
                files.set_mtime(descriptor, written_ns)


@contextlib.contextmanager
def publishing(
    files: FileSystem, path: Path, *, direct: bool, is_wanted: Callable[[], bool] = lambda: True
) -> Iterator[int]:
    """Yield the descriptor of a new file, named `path` once it is durable; see `write_segment`.

    No file is left after an exception, also of the block.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | (os.O_DIRECT if direct else 0)
        with files.opened(temporary, flags) as descriptor:
            yield descriptor
            files.sync(descriptor)
        if not is_wanted():
            raise WriteDiscarded("nobody may have it any more")
        files.rename(temporary, path)
    except BaseException:
        # If this fails, the next start removes the file.
        with contextlib.suppress(OSError):
            files.unlink(temporary)
        raise
    files.sync_directory(path.parent)


def _encode_layer(
    layout: SegmentLayout,
    layer: int,
    keys: Tensor,
    values: Tensor,
    mapping: MappingLists | None,
    memory: memoryview,
    groups: Tensor | None,
) -> None:
    """Lay out a layer in `memory`; `groups` is its codes, if it has codes."""
    shape, flat = layout.shape, torch.frombuffer(memory, dtype=torch.uint8)
    if layer >= shape.first_raw:
        layout.rows.put_groups(shape.rows_of(keys, values), flat)
        return
    parts = flat[: layout.columns.num_bytes].split([pages.num_bytes for pages in layout.columns])
    for column, (pages, part) in enumerate(zip(layout.columns, parts, strict=True)):
        if pages.group_bytes:
            rows = values if column in shape.value_columns else keys
            if mapping is not None and column != PROBE:
                rows = rows[torch.from_numpy(np.argsort(mapping[shape.head_group_of(column)]))]
            heads = shape.heads[column]
            # For one head this is a view, which is copied in half the time.
            rows = rows[:, heads[0]] if len(heads) == 1 else rows[:, list(heads)]
            rows = rows.contiguous().view(torch.uint8)
            pages.put_groups(rows.view(layout.num_tokens, pages.group_bytes), part)
    if groups is not None:
        layout.codes[layer].put_groups(groups, flat[layout.columns.num_bytes :])
