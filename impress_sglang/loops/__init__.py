"""What planning a read does for every token, chunk and block, as loops over flat arrays.

Compiled with Numba, which SGLang brings along; without it (`NAME` is "numpy") the same functions
are vectorised with NumPy, which takes several times as long. Tests compare the two.

Arrays are contiguous and of the dtypes that the functions name. Results that are arrays are new,
except where a function says that it changes its arguments.
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("numba") is not None:
    from impress_sglang.loops.compiled import (
        NAME,
        add_cached_blocks,
        chunk_hits,
        find_candidates,
        likely_flags,
        locate_rows,
        missing_blocks,
        move_averages,
        move_codes,
        record_scores,
        tally,
        touched_chunks,
        vector_addresses,
        weigh_codes,
    )
    from impress_sglang.loops.xxh3 import first_bad_block
else:
    from impress_sglang.loops.vectorised import (
        NAME,
        add_cached_blocks,
        chunk_hits,
        find_candidates,
        first_bad_block,
        likely_flags,
        locate_rows,
        missing_blocks,
        move_averages,
        move_codes,
        record_scores,
        tally,
        touched_chunks,
        vector_addresses,
        weigh_codes,
    )

__all__ = [
    "NAME",
    "add_cached_blocks",
    "chunk_hits",
    "find_candidates",
    "first_bad_block",
    "likely_flags",
    "locate_rows",
    "missing_blocks",
    "move_averages",
    "move_codes",
    "record_scores",
    "tally",
    "touched_chunks",
    "vector_addresses",
    "weigh_codes",
]
