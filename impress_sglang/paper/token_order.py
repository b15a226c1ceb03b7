"""KV reordering (IMPRESS, 4.4.1): which order a segment's tokens should have, and whether it pays.

Pure arithmetic on averages. The order is found per layer and head group, by descending average, and
never mixes tokens of different nodes of the tree: a request that shares only the first node of a
segment would otherwise read past tokens that its prompt does not have.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from impress_sglang.storage.layout import BLOCK_BYTES, SegmentLayout
from impress_sglang.storage.segment import MappingLists

Averages = npt.NDArray[np.float32]


def mapping_lists(key: Averages, node_starts: Sequence[int]) -> MappingLists:
    """Mapping lists of the best order known.

    Args:
        key: [L, head groups, t]; tokens with large values come first.
        node_starts: first token of each node, ascending, the first one 0.

    Returns:
        unsigned [L, head groups, t]: the row of each token; a permutation of each node's own rows.
    """
    num_tokens = key.shape[-1]
    mapping = np.empty(key.shape, np.int64)
    for start, stop in zip(node_starts, [*node_starts[1:], num_tokens], strict=True):
        order = np.argsort(-key[..., start:stop], axis=-1, kind="stable")
        rows = np.broadcast_to(np.arange(start, stop), order.shape)
        np.put_along_axis(mapping[..., start:stop], order, rows, axis=-1)
    return mapping.astype(np.dtype("<u2" if num_tokens <= 1 << 16 else "<u4"))


def expected_bytes(
    average: Averages, mapping: MappingLists | None, layout: SegmentLayout, gap_bytes: int
) -> float:
    """Expected bytes read for one selection in all layers, without those of probe columns.

    Tokens are assumed to be selected independently, with their averages as probabilities. The unit
    of reading is a block, a row, or a gap that is not worth skipping, whichever is largest.
    """
    by_row, shape = _chance_by_row(average, mapping), layout.shape
    total = 0.0
    for column in shape.columns[1:]:
        row_bytes = shape.row_bytes(column)
        if row_bytes:
            unit = max(BLOCK_BYTES, min(gap_bytes, layout.chunk_stride(column)))
            rows = max(1, round(unit / row_bytes))
            head_group = by_row[:, shape.head_group_of(column)]
            total += _expected_units(head_group, rows) * rows * row_bytes
    return total


def chunk_shares(
    average: Averages, mapping: MappingLists, layout: SegmentLayout
) -> npt.NDArray[np.float64]:
    """Expected share of wanted rows of every chunk of a segment, in the order of its ids.

    float64 [chunks of all layers]; probe columns are read whole at each access.
    """
    by_row, shape = _chance_by_row(average, mapping), layout.shape
    starts = np.arange(0, layout.num_tokens, layout.chunk_tokens)
    rows = np.diff([*starts, layout.num_tokens])
    means = np.add.reduceat(by_row.astype(np.float64), starts, axis=-1) / rows
    shares = np.ones((shape.num_layers, len(shape.columns), layout.num_chunks))
    for column in shape.columns[1:]:
        shares[:, column] = means[:, shape.head_group_of(column)]
    return shares.reshape(-1)


def _chance_by_row(average: Averages, mapping: MappingLists | None) -> Averages:
    chance = np.clip(average, 0.0, 1.0)
    if mapping is None:
        return chance
    by_row = np.empty_like(chance)
    np.put_along_axis(by_row, mapping.astype(np.int64), chance, axis=-1)
    return by_row


def _expected_units(by_row: Averages, rows: int) -> float:
    """Expected number of units of `rows` neighbouring rows with at least one selected row."""
    starts = np.arange(0, by_row.shape[1], rows)
    untouched = np.multiply.reduceat(1.0 - by_row.astype(np.float64), starts, axis=1)
    return float((1.0 - untouched).sum())
