"""A hash table of windows that grows by one bucket at a time.

It uses linear hashing (Litwin, VLDB 1980) with chains: each pair that is put into it splits a few
buckets, and nothing else is moved, however many pairs there are. Several entries may have one key,
and are found in the order in which they were put there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from impress_sglang.loops.jit import array_type, compiled, tuple_type
from impress_sglang.loops.types import Indices, Int32s, Words

# Buckets for each entry: a fifth of the chains have one, so most misses cost a single look.
BUCKETS_PER_ENTRY = 4
# The value of a free entry.
FREE = -1
# Places in `counts`: number of buckets; the largest power of two that is not larger; entries that
# were ever used; the first free one of these, plus one; the number of those that are not free.
BUCKETS, HALF, USED, FREED, TAKEN = range(5)


class WindowTable(NamedTuple):
    """Chains of pairs of a key and a non-negative value."""

    heads: Int32s
    """int32 [buckets or more], the first entry of each chain, plus one; 0: it is empty."""
    keys: Words
    """uint64 [entries]."""
    values: Indices
    """int64 [entries]."""
    nexts: Int32s
    """int32 [entries], the next entry of a chain, plus one; free entries are a chain as well."""
    counts: Indices
    """int64 [5]."""


TABLE = tuple_type(
    WindowTable,
    array_type(np.int32),
    array_type(np.uint64),
    array_type(np.int64),
    array_type(np.int32),
    array_type(np.int64),
)


def empty_table(entries: int) -> WindowTable:
    """A table with room for this many entries."""
    return WindowTable(
        np.zeros(BUCKETS_PER_ENTRY * entries + 2, np.int32),
        np.zeros(entries, np.uint64),
        np.zeros(entries, np.int64),
        np.zeros(entries, np.int32),
        np.array([2, 2, 0, 0, 0]),
    )


@compiled((TABLE, "uint64"), makes_arrays=False)
def _bucket(table: WindowTable, key: np.uint64) -> int:
    half = table.counts[HALF]
    place = int(np.int64(key & np.uint64(2 * half - 1)))
    return place if place < table.counts[BUCKETS] else place - half


@compiled((TABLE, "uint64"), makes_arrays=False)
def _first(table: WindowTable, key: np.uint64) -> int:
    """The first entry of the chain of a key; -1 if the chain is empty."""
    return int(table.heads[_bucket(table, key)]) - 1


@compiled((TABLE,), makes_arrays=False)
def _split(table: WindowTable) -> None:
    """Make the next bucket from entries of its counterpart in the lower half, in their order."""
    counts, heads, keys, nexts = table.counts, table.heads, table.keys, table.nexts
    new, half = counts[BUCKETS], counts[HALF]
    entry = int(heads[new - half]) - 1
    heads[new] = heads[new - half] = 0
    counts[BUCKETS] += 1
    moved = stayed = -1
    while entry >= 0:
        following = int(nexts[entry]) - 1
        moves = keys[entry] & np.uint64(half) != 0
        last = moved if moves else stayed
        if last >= 0:
            nexts[last] = entry + 1
        else:
            heads[new if moves else new - half] = entry + 1
        nexts[entry] = 0
        moved, stayed = (entry, stayed) if moves else (moved, entry)
        entry = following
    if counts[BUCKETS] == 2 * half:
        counts[HALF] = 2 * half


@compiled((TABLE, "uint64[::1]", "int64[::1]", "int64"), makes_arrays=False)
def put_all(table: WindowTable, new_keys: Words, new_values: Indices, most: int) -> None:
    """Put pairs into a table, in place, but never more than `most` with one key.

    Further pairs of a key that has `most` are ignored.

    Args:
        table: has room for them.
        new_keys: uint64 [n].
        new_values: int64 [n], not negative.
        most: the most entries of a key.
    """
    counts, keys, values, nexts = table.counts, table.keys, table.values, table.nexts
    for new in range(len(new_keys)):
        key, equal, last = new_keys[new], 0, -1
        entry = _first(table, key)
        while entry >= 0:
            equal += keys[entry] == key
            last, entry = entry, int(nexts[entry]) - 1
        if equal >= most:
            continue
        if counts[FREED]:
            entry = counts[FREED] - 1
            counts[FREED] = nexts[entry]
        else:
            entry = counts[USED]
            counts[USED] += 1
        keys[entry], values[entry], nexts[entry] = key, new_values[new], 0
        if last < 0:
            table.heads[_bucket(table, key)] = entry + 1
        else:
            nexts[last] = entry + 1
        counts[TAKEN] += 1
        while counts[BUCKETS] < BUCKETS_PER_ENTRY * counts[TAKEN]:
            _split(table)


@compiled((TABLE, "uint64[::1]", "int64[::1]"), makes_arrays=False)
def remove_all(table: WindowTable, old_keys: Words, old_values: Indices) -> None:
    """Remove pairs from a table, in place; pairs that are not there are ignored.

    Args:
        table: changed in place.
        old_keys: uint64 [n].
        old_values: int64 [n].
    """
    counts, values, nexts = table.counts, table.values, table.nexts
    for old in range(len(old_keys)):
        before, entry = -1, _first(table, old_keys[old])
        while entry >= 0 and values[entry] != old_values[old]:
            before, entry = entry, int(nexts[entry]) - 1
        if entry < 0:
            continue
        if before < 0:
            table.heads[_bucket(table, old_keys[old])] = nexts[entry]
        else:
            nexts[before] = nexts[entry]
        values[entry], nexts[entry] = FREE, counts[FREED]
        counts[FREED] = entry + 1
        counts[TAKEN] -= 1


@compiled((TABLE, "uint64", "int64[::1]"), makes_arrays=False)
def values_of(table: WindowTable, key: np.uint64, found: Indices) -> int:
    """Write values of a key to `found`, as many as there is room for; returns how many."""
    count, entry = 0, _first(table, key)
    while entry >= 0 and count < len(found):
        if table.keys[entry] == key:
            found[count] = table.values[entry]
            count += 1
        entry = int(table.nexts[entry]) - 1
    return count


@compiled((TABLE,), makes_arrays=False)
def count_reachable(table: WindowTable) -> int:
    """How many entries are in the chains of their keys; a wrong number if a chain has a cycle."""
    count, steps = 0, 0
    for bucket in range(table.counts[BUCKETS]):
        entry = int(table.heads[bucket]) - 1
        while entry >= 0 and steps <= table.counts[USED]:
            count += _bucket(table, table.keys[entry]) == bucket
            steps += 1
            entry = int(table.nexts[entry]) - 1
    return count
