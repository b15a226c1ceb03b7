"""KV reordering (IMPRESS, 4.4.1): which order a segment's tokens should have, and whether it pays.

Pure arithmetic on averages. The order is found per layer, by descending average, and never mixes
tokens of different nodes of the tree: a request that shares only the first node of a segment would
otherwise read around tokens that it does not have.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from impress_sglang.storage.layout import BLOCK_BYTES, SegmentLayout, Stream
from impress_sglang.storage.segment import MappingLists

Averages = npt.NDArray[np.float32]
_SELECTED_STREAMS = (Stream.OTHER_KEYS, Stream.VALUES)


def mapping_lists(key: Averages, node_starts: Sequence[int]) -> MappingLists:
    """Mapping lists of the best order known.

    Args:
        key: [L, t], what is large shall come first.
        node_starts: first token of each node, ascending, the first one 0.

    Returns:
        int64 [L, t]: the row of each token; a permutation of each node's own rows.
    """
    num_layers, num_tokens = key.shape
    mapping = np.empty((num_layers, num_tokens), np.int64)
    for start, stop in zip(node_starts, [*node_starts[1:], num_tokens], strict=True):
        order = np.argsort(-key[:, start:stop], axis=1, kind="stable")
        rows = np.broadcast_to(np.arange(start, stop), order.shape)
        np.put_along_axis(mapping[:, start:stop], order, rows, axis=1)
    return mapping.astype(np.dtype("<u2" if num_tokens <= 1 << 16 else "<u4"))


def expected_bytes(
    average: Averages, mapping: MappingLists | None, layout: SegmentLayout, gap_bytes: int
) -> float:
    """Bytes that reading one selection of all layers is expected to take, probe keys apart.

    Tokens are taken as selected independently with their average as probability. What is read as
    one is a block, a row, or what lies within a gap that is not worth skipping, if that is larger.
    """
    by_row = _chance_by_row(average, mapping)
    total = 0.0
    for stream in _SELECTED_STREAMS:
        row_bytes = layout.shape.row_bytes(stream)
        if row_bytes:
            unit = max(BLOCK_BYTES, min(gap_bytes, layout.chunk_stride(stream)))
            rows = max(1, round(unit / row_bytes))
            total += _expected_units(by_row, rows) * rows * row_bytes
    return total


def chunk_shares(
    average: Averages, mapping: MappingLists, layout: SegmentLayout
) -> npt.NDArray[np.float64]:
    """Expected share of selected rows of each chunk of a stream, float64 [L, chunks]."""
    by_row = _chance_by_row(average, mapping)
    starts = np.arange(0, layout.num_tokens, layout.chunk_tokens)
    rows = np.diff([*starts, layout.num_tokens])
    sums: npt.NDArray[np.float64] = np.add.reduceat(by_row.astype(np.float64), starts, axis=1)
    return sums / rows


def _chance_by_row(average: Averages, mapping: MappingLists | None) -> Averages:
    chance = np.clip(average, 0.0, 1.0)
    if mapping is None:
        return chance
    by_row = np.empty_like(chance)
    np.put_along_axis(by_row, mapping.astype(np.int64), chance, axis=1)
    return by_row


def _expected_units(by_row: Averages, rows: int) -> float:
    """Expected number of units of `rows` neighbouring rows with at least one selected row."""
    starts = np.arange(0, by_row.shape[1], rows)
    untouched = np.multiply.reduceat(1.0 - by_row.astype(np.float64), starts, axis=1)
    return float((1.0 - untouched).sum())
