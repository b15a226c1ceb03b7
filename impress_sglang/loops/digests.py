"""XXH3-64 of blocks by the library, for machines without Numba; `xxh3` says why that is slower."""

from __future__ import annotations

import xxhash

from impress_sglang.loops.types import BLOCK_WORDS, Indices, Words


def first_bad_block(words: Words, blocks: Indices, checksums: Words, first: int) -> int:
    """The place in `blocks` of the first block that fails its checksum, -1 if none does.

    Args:
        words: uint64, memory that has blocks of `BLOCK_WORDS` words.
        blocks: int64 [n], the blocks of the memory that are verified.
        checksums: uint64, XXH3-64 of blocks.
        first: which of them is that of the first block of the memory.
    """
    for place, block in enumerate(blocks.tolist()):
        own = words[block * BLOCK_WORDS : (block + 1) * BLOCK_WORDS]
        if xxhash.xxh3_64_intdigest(own.data) != checksums[first + block]:
            return place
    return -1
