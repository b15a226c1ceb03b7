"""Predicts which blocks a layer will want, learnt from what earlier requests wanted.

Chances are kept per block of the file and not per token: reading ahead reads blocks, and the share
of requests that wanted a block needs no assumption on how its tokens depend on each other. Each
version of a segment has its own, since its order decides which tokens share a block.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from impress_sglang import loops
from impress_sglang.importance.averages import STEPS, moved_codes
from impress_sglang.loops.types import Flags, Uint8s
from impress_sglang.storage.layout import BLOCK_BYTES, PROBE, SegmentLayout

# Blocks that are less likely than this are not read ahead, however cheap.
LEAST_CHANCE = 0.1

_CODES = np.arange(STEPS + 1)

# For a segment whose tokens stand in the order of their averages, but whose averages are not known
# (after a restart): most of a selection is in as many first rows as are selected.
ORDERED_SHARES = ((1.0, 0.7), (2.0, 0.2))
ORDERED_REST = 0.04


def first_shares(
    layout: SegmentLayout, retention: float, *, ordered: bool
) -> npt.NDArray[np.float64]:
    """Expected share of wanted rows of every chunk, before anything is known of the segment.

    Args:
        layout: the segment's layout.
        retention: share of the tokens that a layer uses.
        ordered: whether the rows stand in the order of importance.

    Returns:
        float64 [chunks of all layers], in the order of `layout.chunk_index`.
    """
    shape, chunks, parts = layout.shape, layout.num_chunks, []
    for column in shape.columns:
        shares = np.full(chunks, 1.0 if column == PROBE else retention)
        if ordered and column != PROBE:
            rank = (np.arange(chunks) + 0.5) * layout.chunk_tokens / layout.num_tokens
            shares[:] = ORDERED_REST
            for times, share in reversed(ORDERED_SHARES):
                shares[rank < times * retention] = share
        parts.append(shares)
    return np.tile(np.concatenate(parts), shape.num_layers)


class BlockHistory:
    """The chance that each block of a segment is wanted, uint8 [L, blocks of a layer]."""

    def __init__(self, layout: SegmentLayout, chunk_shares: npt.NDArray[np.float64]) -> None:
        """Begin with what is expected of the chunks.

        Args:
            layout: the segment's layout.
            chunk_shares: float64 [chunks of all layers], expected share of wanted rows.
        """
        shares = chunk_shares.reshape(layout.shape.num_layers, -1)
        parts = []
        for column in layout.shape.columns:
            blocks = layout.column_bytes(column) // BLOCK_BYTES
            if not blocks:
                continue
            first = layout.chunk_index(0, column, 0)
            own = shares[:, first : first + layout.num_chunks]
            rows = max(1, round(BLOCK_BYTES / layout.shape.row_bytes(column)))
            per_chunk = layout.chunk_stride(column) // BLOCK_BYTES
            wanted = 1.0 - (1.0 - np.clip(own, 0.0, 1.0)) ** rows
            parts.append(np.repeat(wanted, per_chunk, axis=1)[:, :blocks])
        chances = np.concatenate(parts, axis=1)
        self.codes: Uint8s = np.rint(chances * STEPS).astype(np.uint8)
        """All chances, in steps of 1/255; not to be changed."""
        # Requests noted of each layer, for its keys and for its values.
        self._requests = np.zeros((len(self.codes), 2), np.int64)

    def note(self, layer: int, *, values: bool, blocks: slice, wanted: Flags) -> None:
        """Note which blocks of a layer's keys or values a request wanted, one flag for each."""
        requests = self._requests[layer]
        requests[int(values)] += 1
        kept, raised = moved_codes(int(requests[int(values)]))
        loops.move_codes(self.codes[layer, blocks], wanted, kept, raised)


def likely_blocks(chances: Uint8s, candidates: Flags, waste_budget: float) -> Flags:
    """Choose the candidates that are worth reading ahead: as many as possible of the likeliest.

    What is expected to be read in vain is at most `waste_budget` of what is expected to be wanted.

    Args:
        chances: uint8, in steps of 1/255, of any shape.
        candidates: bool of the same shape, the blocks that would have to be read.
        waste_budget: 0 or more.
    """
    flat, possible = chances.reshape(-1), candidates.reshape(-1)
    counts = loops.weigh_codes(flat, possible)
    in_vain = np.cumsum((counts * (STEPS - _CODES))[::-1])[::-1]
    fits = np.flatnonzero(in_vain <= waste_budget * float(counts @ _CODES))
    lowest = int(fits[0]) if len(fits) else STEPS + 1
    threshold = max(lowest, round(LEAST_CHANCE * STEPS))
    return loops.likely_flags(flat, possible, threshold).reshape(chances.shape)
