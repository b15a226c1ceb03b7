"""Work for every token, chunk, block or element, as loops compiled with Numba."""

from __future__ import annotations

from impress_sglang.loops.chances import likely_flags, move_averages, move_codes, weigh_codes
from impress_sglang.loops.planning import (
    add_cached_blocks,
    chunk_hits,
    chunk_pages,
    locate_rows,
    missing_blocks,
    tally,
    touched_chunks,
    vector_addresses,
)
from impress_sglang.loops.scores import record_scores, scores_of, update_scores

__all__ = [
    "add_cached_blocks",
    "chunk_hits",
    "chunk_pages",
    "likely_flags",
    "locate_rows",
    "missing_blocks",
    "move_averages",
    "move_codes",
    "record_scores",
    "scores_of",
    "tally",
    "touched_chunks",
    "update_scores",
    "vector_addresses",
    "weigh_codes",
]
