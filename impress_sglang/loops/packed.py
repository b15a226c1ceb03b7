"""Loops over packed bits of keys and values, compiled, for `loops.codes`.

Which bits a channel of keys has is the same for all tokens of a group. So pairs of a group are
turned into columns, one for each byte of a token, in which the pairs of a channel stand one below
the other; they are taken from there for a whole group at a time, and turned back into rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from impress_sglang.loops.jit import compiled
from impress_sglang.loops.types import Float32s, Indices, Uint8s

# As in `codes.planes.codec`, which this package may not import.
GROUP_TOKENS = 64
NUM_SECTIONS = 4
# Bytes of a word, and thus of what is turned at once: so many tokens by so many channels.
WORD = 8
# The lowest bit, the two and the four lowest bits of each byte of a word.
_ONES = np.uint64(0x0101010101010101)
_THREES = 0x0303030303030303
_FIFTEENS = np.uint64(0x0F0F0F0F0F0F0F0F)
# The type of packed bits.
_BYTES = "uint8[::1]"


@intrinsic
def _word(typing_context: Any, memory: Any, at: Any) -> Any:
    """The word whose first byte is `memory[at]`, uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_word_at(context, builder, signature, arguments), align=1)

    return types.uint64(memory, types.int64), generate


@intrinsic
def _put_word(typing_context: Any, memory: Any, at: Any, word: Any) -> Any:
    """Write a word, uint64, to the bytes from `memory[at]` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target = _word_at(context, builder, signature, arguments)
        builder.store(arguments[2], target, align=1)
        return context.get_dummy_value()

    return types.void(memory, types.int64, types.uint64), generate


@intrinsic
def _turned(
    typing_context: Any, source: Any, at: Any, stride: Any, target: Any, to: Any, apart: Any
) -> Any:
    """Read words, `stride` bytes apart from `source[at]` on, as the rows of a square of bytes.

    Its columns are written as words `apart` bytes apart from `target[to]` on.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        square = ir.Constant(ir.VectorType(ir.IntType(64), WORD), ir.Undefined)
        for row in range(WORD):
            place = _moved(builder, arguments[1], arguments[2], row)
            own = _pointer(context, builder, signature.args[0], arguments[0], place)
            square = builder.insert_element(square, builder.load(own, align=1), _index(row))
        flat = builder.bitcast(square, ir.VectorType(ir.IntType(8), WORD * WORD))
        order = [row * WORD + column for column in range(WORD) for row in range(WORD)]
        mask = ir.Constant(ir.VectorType(ir.IntType(32), WORD * WORD), order)
        turned = builder.bitcast(builder.shuffle_vector(flat, flat, mask), square.type)
        for row in range(WORD):
            place = _moved(builder, arguments[4], arguments[5], row)
            own = _pointer(context, builder, signature.args[3], arguments[3], place)
            builder.store(builder.extract_element(turned, _index(row)), own, align=1)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(source, i64, i64, target, i64, i64), generate


@intrinsic
def _joined(
    typing_context: Any,
    columns: Any,
    upper: Any,
    more: Any,
    lower: Any,
    less: Any,
    target: Any,
    to: Any,
) -> Any:
    """Join two columns of a group's length, of two bits of each byte, to one of four.

    The bits of the column at `columns[upper]` begin at bit `more` of its bytes; those at `lower`,
    which become the lower ones, at bit `less`. The result is written from `target[to]` on.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        column = ir.VectorType(ir.IntType(64), GROUP_TOKENS // WORD)

        def all_alike(word: Any) -> Any:
            one = builder.insert_element(ir.Constant(column, ir.Undefined), word, _index(0))
            mask = ir.Constant(ir.VectorType(ir.IntType(32), column.count), [0] * column.count)
            return builder.shuffle_vector(one, one, mask)

        def pairs(place: Any, shift: Any) -> Any:
            own = _pointer(context, builder, signature.args[0], arguments[0], place, column)
            shifted = builder.lshr(builder.load(own, align=1), all_alike(shift))
            return builder.and_(shifted, ir.Constant(column, [_THREES] * column.count))

        two = ir.Constant(column, [2] * column.count)
        above = builder.shl(pairs(arguments[1], arguments[2]), two)
        both = builder.or_(above, pairs(arguments[3], arguments[4]))
        own = _pointer(context, builder, signature.args[5], arguments[5], arguments[6], column)
        builder.store(both, own, align=1)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(columns, i64, i64, i64, i64, target, i64), generate


def _index(number: int) -> Any:
    return ir.Constant(ir.IntType(32), number)


def _moved(builder: Any, begin: Any, stride: Any, count: int) -> Any:
    return builder.add(begin, builder.mul(stride, ir.Constant(stride.type, count)))


def _pointer(context: Any, builder: Any, kind: Any, memory: Any, place: Any, to: Any = None) -> Any:
    """Of what begins at `memory[place]`: a word, or another type."""
    data = context.make_array(kind)(context, builder, value=memory).data
    return builder.bitcast(builder.gep(data, [place]), (to or ir.IntType(64)).as_pointer())


def _word_at(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return _pointer(context, builder, signature.args[0], *arguments[:2])


@compiled(f"({_BYTES}, int64, int64, int64, int64, {_BYTES}, int64)", makes_arrays=False)
def to_columns(
    source: Uint8s, at: int, stride: int, width: int, count: int, columns: Uint8s, to: int
) -> None:
    """Turn `count` rows, a multiple of `WORD`, of `width` bytes into columns of a group's length.

    Rows are `stride` bytes apart from `source[at]` on; columns stand one after another from
    `columns[to]` on.
    """
    if width < WORD:
        for row in range(count):
            for byte in range(width):
                columns[to + byte * GROUP_TOKENS + row] = source[at + row * stride + byte]
        return
    for row in range(0, count, WORD):
        for byte in range(0, width, WORD):
            # The last bytes again, if they are no whole word.
            first = min(byte, width - WORD)
            begin = to + first * GROUP_TOKENS + row
            _turned(source, at + row * stride + first, stride, columns, begin, GROUP_TOKENS)


@compiled(
    f"({_BYTES}, int64, int64, int64, int64[::1], int64[::1], float32[::1])", makes_arrays=False
)
def find_pairs(
    sections: Uint8s,
    at: int,
    dim: int,
    wanted: int,
    places: Indices,
    shifts: Indices,
    means: Float32s,
) -> None:
    """Where the pairs of channels are in the columns of all sections.

    Args:
        sections: from `at` on of each channel, see `codes.planes.codec.Codes`.
        at: see there.
        dim: number of channels.
        wanted: has a bit for each section that is present, the lowest for the first.
        places: [2 dim] receives the first byte of the column of each upper and then each lower
            pair; for those that are not present the column behind all others.
        shifts: [2 dim] receives by how many bits they are shifted in it.
        means: [dim] receives what the pairs of a channel that are present add on average, in steps.
    """
    width = dim // 8
    none = NUM_SECTIONS * width * GROUP_TOKENS
    # How many pairs of each section were seen, in the 16-bit parts of a word.
    seen = np.uint64(0)
    for lower in range(2):
        for channel in range(dim):
            section = np.int64(sections[at + channel]) >> (4 * lower) & 15
            part = np.uint64(16 * section)
            place = np.int64((seen >> part) & np.uint64(0xFFFF))
            seen += np.uint64(1) << part
            quarter = (place >= width) + (place >= 2 * width) + (place >= 3 * width)
            column = (section * width + place - quarter * width) * GROUP_TOKENS
            # Selected, because a branch would often be guessed wrong.
            places[lower * dim + channel] = column if wanted >> section & 1 else none
            shifts[lower * dim + channel] = 2 * quarter
    for channel in range(dim):
        upper = np.float32(0 if places[channel] == none else 6)
        means[channel] = upper + np.float32(0 if places[dim + channel] == none else 1.5)


@compiled(f"({_BYTES}, int64[::1], int64[::1], int64, {_BYTES})", makes_arrays=False)
def join_pairs(columns: Uint8s, places: Indices, shifts: Indices, dim: int, joined: Uint8s) -> None:
    """Both pairs of each channel as 4 bits, 0 for those not present: a column of each channel."""
    for channel in range(dim):
        _joined(
            columns,
            places[channel],
            shifts[channel],
            places[dim + channel],
            shifts[dim + channel],
            joined,
            channel * GROUP_TOKENS,
        )


@compiled(f"({_BYTES}, int64, int64, {_BYTES})", makes_arrays=False)
def to_rows(joined: Uint8s, count: int, dim: int, rows: Uint8s) -> None:
    """Turn columns of a group's length into `count` rows of `dim` bytes."""
    for row in range(0, count, WORD):
        for channel in range(0, dim, WORD):
            begin = channel * GROUP_TOKENS + row
            _turned(joined, begin, GROUP_TOKENS, rows, row * dim + channel, dim)


@compiled(f"({_BYTES}, int64, int64, {_BYTES}, int64)", makes_arrays=False)
def add_upper(source: Uint8s, at: int, width: int, rows: Uint8s, to: int) -> None:
    """Set the upper 4 bits of a row of 2 x `width` codes, which stand packed at `source[at]`."""
    if width < WORD:
        for byte in range(width):
            rows[to + byte] |= (source[at + byte] & 15) << 4
            rows[to + width + byte] |= source[at + byte] & 240
        return
    for byte in range(0, width, WORD):
        # The last bytes again, if they are no whole word: a bit may be set twice.
        begin = min(byte, width - WORD)
        word = _word(source, at + begin)
        first, second = to + begin, to + width + begin
        _put_word(rows, first, _word(rows, first) | (word & _FIFTEENS) << np.uint64(4))
        _put_word(rows, second, _word(rows, second) | (word & ~_FIFTEENS))


@compiled(f"({_BYTES}, int64, int64, {_BYTES}, int64, int64)", makes_arrays=False)
def add_bits(source: Uint8s, at: int, width: int, rows: Uint8s, to: int, shift: int) -> None:
    """Set a bit of each element of a row: from `source[at]` on one bit, packed, of each."""
    if width < WORD:
        for byte in range(width):
            for place in range(8):
                rows[to + place * width + byte] |= (source[at + byte] >> place & 1) << shift
        return
    for byte in range(0, width, WORD):
        # The last bytes again, if they are no whole word: a bit may be set twice.
        first = min(byte, width - WORD)
        word = _word(source, at + first)
        for place in range(8):
            begin = to + place * width + first
            bits = ((word >> np.uint64(place)) & _ONES) << np.uint64(shift)
            _put_word(rows, begin, _word(rows, begin) | bits)


@compiled(f"({_BYTES}, int64, int64, int64, {_BYTES}, int64)", makes_arrays=False)
def five_bits(source: Uint8s, upper: int, fifth: int, narrow: int, rows: Uint8s, to: int) -> None:
    """A row of 8 x `narrow` codes, of which the upper 4 bits and the fifth ones are packed."""
    if narrow < WORD:
        for element in range(8 * narrow):
            rows[to + element] = 0
        add_upper(source, upper, 4 * narrow, rows, to)
        add_bits(source, fifth, narrow, rows, to, 3)
        return
    for byte in range(0, narrow, WORD):
        # The last bytes again, if they are no whole word.
        begin = min(byte, narrow - WORD)
        bits = _word(source, fifth + begin)
        for place in range(4):
            at = place * narrow + begin
            word = _word(source, upper + at)
            first = ((bits >> np.uint64(place)) & _ONES) << np.uint64(3)
            second = ((bits >> np.uint64(place + 4)) & _ONES) << np.uint64(3)
            _put_word(rows, to + at, (word & _FIFTEENS) << np.uint64(4) | first)
            _put_word(rows, to + 4 * narrow + at, (word & ~_FIFTEENS) | second)
