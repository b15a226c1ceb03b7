"""Hashes of windows of tokens, and the search for windows that are in a table.

A window's hash is a polynomial of its tokens modulo 2^64, so that the hash of the next window
follows from it; mixed with a seed, it becomes a key.

A table has a power of two of places. A pair of a key and a value is put into the first free place
from the one on that the lower bits of its key name. Several pairs may have one key.
"""

from __future__ import annotations

import numpy as np

from impress_sglang.loops.jit import compiled
from impress_sglang.loops.types import Indices, Int32s, Words

# Odd, so that powers of it are never zero.
_BASE = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
_ONE = np.uint64(1)
# Values of places that were never taken, and of those whose pair was removed.
EMPTY, GONE = -1, -2


@compiled("uint64(uint64, uint64)")
def mixed(word: np.uint64, seed: np.uint64) -> np.uint64:
    """A key all of whose bits depend on all bits of both."""
    word = word ^ seed
    word = (word ^ (word >> _SHIFT)) * _MIX
    word = (word ^ (word >> _SHIFT)) * _MIX
    return word ^ (word >> _SHIFT)


@compiled("uint64(int32[::1], int64, int64)")
def _hash(tokens: Int32s, start: int, length: int) -> np.uint64:
    word = np.uint64(0)
    for position in range(start, start + length):
        word = word * _BASE + np.uint64(tokens[position]) + _ONE
    return word


@compiled("uint64(int64)")
def _power(length: int) -> np.uint64:
    """The factor of the first token in the hash of a window of this length."""
    power = _ONE
    for _ in range(length - 1):
        power *= _BASE
    return power


@compiled("uint64(uint64, int32, int32, uint64)")
def _next(word: np.uint64, first: np.int32, behind: np.int32, power: np.uint64) -> np.uint64:
    """The hash of the next window: without its first token, and with the one behind it."""
    word -= (np.uint64(first) + _ONE) * power
    return word * _BASE + np.uint64(behind) + _ONE


@compiled("uint64[::1](int32[::1], int64, uint64)")
def window_keys(tokens: Int32s, length: int, seed: np.uint64) -> Words:
    """Keys of consecutive windows of `length` tokens, without overlap, uint64 [n // length].

    Args:
        tokens: int32 [n].
        length: of a window.
        seed: of all keys.
    """
    keys = np.empty(len(tokens) // length, np.uint64)
    for window in range(len(keys)):
        keys[window] = mixed(_hash(tokens, window * length, length), seed)
    return keys


@compiled("Tuple((int64[::1], uint64[::1]))(int32[::1], int64, uint64, uint64)")
def chosen_windows(
    tokens: Int32s, length: int, seed: np.uint64, one_of: np.uint64
) -> tuple[Indices, Words]:
    """Where some of the windows of `length` tokens begin, int64 [w], and their keys, uint64 [w].

    Args:
        tokens: int32 [n].
        length: of a window.
        seed: of all keys.
        one_of: a power of two; on average one in this many windows is chosen, by its key.
    """
    count, found = max(len(tokens) - length + 1, 0), 0
    starts, keys = np.empty(count, np.int64), np.empty(count, np.uint64)
    power = _power(length)
    word = _hash(tokens, 0, min(length, len(tokens)))
    for position in range(count):
        key = mixed(word, seed)
        if key & (one_of - _ONE) == 0:
            # Mixed again, because the lower bits of chosen keys are all zero.
            starts[found], keys[found] = position, mixed(key, seed)
            found += 1
        if position + 1 < count:
            word = _next(word, tokens[position], tokens[position + length], power)
    return starts[:found].copy(), keys[:found].copy()


def empty_table(places: int) -> tuple[Words, Indices]:
    """Keys uint64 [places] and values int64 [places] of a table; `places`: a power of two."""
    return np.zeros(places, np.uint64), np.full(places, EMPTY)


@compiled("int64(uint64[::1], int64[::1], uint64[::1], int64[::1], int64)")
def put_all(keys: Words, values: Indices, new_keys: Words, new_values: Indices, most: int) -> int:
    """Put pairs into a table, in place, but not those whose key has `most` already.

    Args:
        keys: of the table, which has more empty places than there are pairs.
        values: of the table.
        new_keys: uint64 [n].
        new_values: int64 [n], not negative.
        most: pairs with one key.

    Returns:
        how many places were taken that were empty: those of removed pairs are taken first.
    """
    mask, count = np.uint64(len(keys)) - _ONE, 0
    for new in range(len(new_keys)):
        key, equal, freed = new_keys[new], 0, False
        place = free = key & mask
        while values[place] != EMPTY and equal < most:
            if values[place] != GONE:
                equal += keys[place] == key
            elif not freed:
                freed, free = True, place
            place = (place + _ONE) & mask
        if equal < most:
            place = free if freed else place
            keys[place], values[place] = key, new_values[new]
            count += not freed
    return count


@compiled("(uint64[::1], int64[::1], uint64[::1], int64[::1])")
def remove_all(keys: Words, values: Indices, old_keys: Words, old_values: Indices) -> None:
    """Remove pairs from a table, in place; those that are not there are ignored."""
    mask = np.uint64(len(keys)) - _ONE
    for old in range(len(old_keys)):
        place = old_keys[old] & mask
        while values[place] != EMPTY and values[place] != old_values[old]:
            place = (place + _ONE) & mask
        if values[place] != EMPTY:
            values[place] = GONE


@compiled(
    "UniTuple(int64, 2)(int32[::1], int64, int64, uint64, int64[::1], uint64[::1], int64[::1])"
)
def find_window(
    tokens: Int32s,
    start: int,
    length: int,
    seed: np.uint64,
    found: Indices,
    keys: Words,
    values: Indices,
) -> tuple[int, int]:
    """Where the first window in a table begins, and its number of values; (-1, -1) if none.

    Args:
        tokens: int32 [n].
        start: where the first window begins.
        length: of a window.
        seed: of all keys.
        found: int64 [most of a key], receives the values.
        keys: of the table.
        values: of the table.
    """
    if start + length > len(tokens):
        return -1, -1
    power, mask = _power(length), np.uint64(len(keys)) - _ONE
    word = _hash(tokens, start, length)
    for position in range(start, len(tokens) - length + 1):
        key, count = mixed(word, seed), 0
        place = key & mask
        while values[place] != EMPTY:
            if values[place] >= 0 and keys[place] == key:
                found[count] = values[place]
                count += 1
            place = (place + _ONE) & mask
        if count:
            return position, count
        if position + length < len(tokens):
            word = _next(word, tokens[position], tokens[position + length], power)
    return -1, -1


@compiled("UniTuple(int64, 2)(int32[::1], int64, int64, int32[::1], int64)")
def equal_around(
    tokens: Int32s, first: int, position: int, own: Int32s, start: int
) -> tuple[int, int]:
    """How many tokens of two sequences are equal before two places, and from these on.

    Args:
        tokens: int32 [n].
        first: nothing before this one is compared.
        position: the place in `tokens`.
        own: int32 [m].
        start: the place in `own`.
    """
    before, after = 0, 0
    most = min(position - first, start)
    while before < most and tokens[position - before - 1] == own[start - before - 1]:
        before += 1
    most = min(len(tokens) - position, len(own) - start)
    while after < most and tokens[position + after] == own[start + after]:
        after += 1
    return before, after
