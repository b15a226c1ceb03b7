"""Loops over coded keys and values, compiled; `precision.codec` is their reference.

Bytes are laid out as in `precision.layout.CodeLayout`: 4 bits of each element, and sections of one
bit of each value, or of pairs of bits of some channels of keys. An element is restored as the
middle of the values that share its known bits. Pools are float32, or bfloat16 as the bits of its
numbers in uint16.

Which bits a channel of keys has is the same for all tokens of a group. So pairs of a group are
turned into columns, one for each byte of a token, in which the pairs of a channel stand one below
the other; they are taken from there for eight tokens at a time, in the bytes of a word, and turned
back into rows. Whole groups are prepared before they are put into slots: a row that was written in
words cannot be read in vectors at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic, overload

from impress_sglang.loops.jit import compiled
from impress_sglang.loops.types import Float32s, Indices, Uint8s

_POOLS = ("float32[:, :, ::1]", "uint16[:, :, ::1]")
# As in `precision.codec`, which this package may not import.
GROUP_TOKENS = 64
NUM_SECTIONS = 4
# Bytes of a word, and thus of what is turned at once: so many tokens by so many channels.
WORD = 8
# The lowest bit, the two and the four lowest bits of each byte of a word.
_ONES = np.uint64(0x0101010101010101)
_FIFTEENS = np.uint64(0x0F0F0F0F0F0F0F0F)
_THREES = 0x0303030303030303


@intrinsic
def _bits_of(typing_context: Any, number: Any) -> Any:
    """The bits of a float32 number, uint32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def _number_of(typing_context: Any, bits: Any) -> Any:
    """The float32 number that has these bits, uint32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


def _get(pool: Any, slot: int, head: int, element: int) -> Any:
    """A number of a pool, float32."""
    raise NotImplementedError


def _set(pool: Any, slot: int, head: int, element: int, number: Any) -> None:
    """Put a float32 number into a pool, rounded to nearest even."""
    raise NotImplementedError


@overload(_get, inline="always")
def _get_compiled(pool: Any, slot: Any, head: Any, element: Any) -> Any:
    def same(pool: Any, slot: Any, head: Any, element: Any) -> Any:
        return pool[slot, head, element]

    def widened(pool: Any, slot: Any, head: Any, element: Any) -> Any:
        return _number_of(np.uint32(np.uint32(pool[slot, head, element]) << np.uint32(16)))

    return same if pool.dtype == types.float32 else widened


@overload(_set, inline="always")
def _set_compiled(pool: Any, slot: Any, head: Any, element: Any, number: Any) -> Any:
    def same(pool: Any, slot: Any, head: Any, element: Any, number: Any) -> None:
        pool[slot, head, element] = number

    def rounded(pool: Any, slot: Any, head: Any, element: Any, number: Any) -> None:
        bits = _bits_of(np.float32(number))
        odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
        word = np.uint32(bits + np.uint32(0x7FFF) + odd)
        pool[slot, head, element] = np.uint16(word >> np.uint32(16))

    return same if pool.dtype == types.float32 else rounded


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


def _pointer(
    context: Any, builder: Any, kind: Any, memory: Any, place: Any, to: Any = ir.IntType(64)
) -> Any:
    """Of what begins at `memory[place]`: a word, or another type."""
    data = context.make_array(kind)(context, builder, value=memory).data
    return builder.bitcast(builder.gep(data, [place]), to.as_pointer())


def _word_at(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return _pointer(context, builder, signature.args[0], *arguments[:2])


_BYTES = "uint8[::1]"


@compiled(f"({_BYTES}, int64, int64, int64, int64, {_BYTES}, int64)", makes_arrays=False)
def _to_columns(
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
def _find_pairs(
    sections: Uint8s, at: int, dim: int, wanted: int, places: Indices, shifts: Indices, gains: Any
) -> None:
    """Where the pairs of channels are in the columns of all sections.

    Args:
        sections: from `at` on of each channel, see `precision.codec.Codes`.
        at: see there.
        dim: number of channels.
        wanted: has a bit for each section that is present, the lowest for the first.
        places: [2 dim] receives the first byte of the column of each upper and then each lower
            pair; for those that are not present the column behind all others.
        shifts: [2 dim] receives by how many bits they are shifted in it.
        gains: [dim] receives by how much the middle of its cell is above the lowest value in it
            before the pairs of a channel that are present are known, less what it is after that.
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
        gains[channel] = upper + np.float32(0 if places[dim + channel] == none else 1.5)


@compiled(f"({_BYTES}, int64[::1], int64[::1], int64, {_BYTES})", makes_arrays=False)
def _join_pairs(
    columns: Uint8s, places: Indices, shifts: Indices, dim: int, joined: Uint8s
) -> None:
    """Both pairs of each channel as 4 bits, 0 for those not present: columns, channel by channel."""
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
def _to_rows(joined: Uint8s, count: int, dim: int, rows: Uint8s) -> None:
    """Turn columns of a group's length into `count` rows of `dim` bytes."""
    for row in range(0, count, WORD):
        for channel in range(0, dim, WORD):
            begin = channel * GROUP_TOKENS + row
            _turned(joined, begin, GROUP_TOKENS, rows, row * dim + channel, dim)


@compiled(f"({_BYTES}, int64, int64, {_BYTES}, int64)", makes_arrays=False)
def _add_upper(source: Uint8s, at: int, width: int, rows: Uint8s, to: int) -> None:
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
def _add_bits(source: Uint8s, at: int, width: int, rows: Uint8s, to: int, shift: int) -> None:
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
def _five_bits(
    source: Uint8s, upper: int, fifth: int, narrow: int, rows: Uint8s, to: int
) -> None:
    """A row of 8 x `narrow` codes, of which the upper 4 bits and the fifth ones are packed."""
    if narrow < WORD:
        for element in range(8 * narrow):
            rows[to + element] = 0
        _add_upper(source, upper, 4 * narrow, rows, to)
        _add_bits(source, fifth, narrow, rows, to, 3)
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


@compiled(
    *(
        f"({_BYTES}, int64, int64[::1], {_BYTES}, float32[:, :, :, ::1], int64, int64[::1], {pool})"
        for pool in _POOLS
    )
)
def restore_keys(
    groups: Uint8s,
    group_bytes: int,
    begin: Indices,
    sections: Uint8s,
    ranges: Float32s,
    first: int,
    slots: Indices,
    pool: Any,
) -> None:
    """Fill slots with the keys of the tokens from `first` on.

    Args:
        groups: groups of `group_bytes` bytes.
        group_bytes: see there.
        begin: where upper bits [tokens of a group, G, Dk / 2] and the first section [tokens of a
            group, G, Dk / 8] begin in a group.
        sections: [groups, G, Dk], flat; see `precision.codec.Codes`.
        ranges: [groups, G, 2, Dk], low and step of each channel.
        first: counted from the first token of the groups.
        slots: [n], distinct.
        pool: [slots, G, Dk].
    """
    heads, dim = pool.shape[1:]
    width, narrow = dim // 2, dim // 8
    columns = np.zeros((NUM_SECTIONS * narrow + 1) * GROUP_TOKENS, np.uint8)
    joined = np.empty(dim * GROUP_TOKENS, np.uint8)
    rows = np.empty(dim * GROUP_TOKENS, np.uint8)
    places, shifts = np.empty(2 * dim, np.int64), np.empty(2 * dim, np.int64)
    middles = np.empty(dim, np.float32)
    place = 0
    while place < len(slots):
        group, token = divmod(first + place, GROUP_TOKENS)
        count = min(GROUP_TOKENS - token, len(slots) - place)
        skipped = token % WORD
        whole = (skipped + count + WORD - 1) // WORD * WORD
        for head in range(heads):
            at = group * group_bytes + begin[1] + ((token - skipped) * heads + head) * narrow
            _to_columns(groups, at, heads * narrow, narrow, whole, columns, 0)
            _find_pairs(sections, (group * heads + head) * dim, dim, 1, places, shifts, middles)
            _join_pairs(columns, places, shifts, dim, joined)
            _to_rows(joined, whole, dim, rows)
            for channel in range(dim):
                middles[channel] = np.float32(7.5) - middles[channel]
            for inner in range(count):
                at = group * group_bytes + begin[0] + ((token + inner) * heads + head) * width
                if width % 64:
                    _add_upper(groups, at, width, rows, (skipped + inner) * dim)
                    continue
                # Slices, because LLVM makes vectors of 64 bytes of these and of nothing else.
                both = groups[at : at + width]
                own = rows[(skipped + inner) * dim : (skipped + inner + 1) * dim]
                for byte in range(width):
                    own[byte] |= (both[byte] & 15) << 4
                    own[width + byte] |= both[byte] & 240
            for inner in range(count):
                slot, own = slots[place + inner], (skipped + inner) * dim
                for element in range(dim):
                    middle = np.float32(rows[own + element]) + middles[element]
                    number = ranges[group, head, 0, element] + middle * ranges[group, head, 1, element]
                    _set(pool, slot, head, element, number)
        place += count


@compiled(
    *(
        f"({_BYTES}, int64, int64[::1], float32[:, :, :, ::1], int64, int64[::1], {pool})"
        for pool in _POOLS
    )
)
def restore_values(
    groups: Uint8s,
    group_bytes: int,
    begin: Indices,
    ranges: Float32s,
    first: int,
    slots: Indices,
    pool: Any,
) -> None:
    """Fill slots with the values of the tokens from `first` on.

    Args:
        groups: groups of `group_bytes` bytes.
        group_bytes: see there.
        begin: where upper bits [tokens of a group, G, Dv / 2] and the first section [tokens of a
            group, G, Dv / 8] begin in a group.
        ranges: [groups, tokens of a group, G, 2], low and step of each vector.
        first: counted from the first token of the groups.
        slots: [n], distinct.
        pool: [slots, G, Dv].
    """
    heads, dim = pool.shape[1:]
    width, narrow = dim // 2, dim // 8
    rows = np.empty(dim * GROUP_TOKENS, np.uint8)
    place = 0
    while place < len(slots):
        group, token = divmod(first + place, GROUP_TOKENS)
        count = min(GROUP_TOKENS - token, len(slots) - place)
        for head in range(heads):
            for inner in range(count):
                vector = (token + inner) * heads + head
                at = group * group_bytes + begin[0] + vector * width
                bits = group * group_bytes + begin[1] + vector * narrow
                _five_bits(groups, at, bits, narrow, rows, inner * dim)
            for inner in range(count):
                slot, own = slots[place + inner], inner * dim
                low = ranges[group, token + inner, head, 0]
                step = ranges[group, token + inner, head, 1]
                for element in range(dim):
                    middle = np.float32(rows[own + element]) + np.float32(3.5)
                    _set(pool, slot, head, element, low + middle * step)
        place += count


@compiled(
    *(
        f"({_BYTES}, int64, int64, int64[:, ::1], {_BYTES}, float32[:, :, :, ::1], int64, "
        f"int64[::1], {pool})"
        for pool in _POOLS
    )
)
def raise_keys(
    planes: Uint8s,
    plane_bytes: int,
    unit_tokens: int,
    units: Indices,
    sections: Uint8s,
    steps: Float32s,
    first: int,
    slots: Indices,
    pool: Any,
) -> None:
    """Add planes to the keys that slots hold.

    Args:
        planes: planes of units, each of `plane_bytes` bytes, which begin with keys.
        plane_bytes: see there.
        unit_tokens: number of tokens of a unit, a multiple of `WORD`.
        units: [k, 5]: head, first token (counted from that of the first slot, may be below 0), and
            which of `planes` are its planes, -1 for one that is not added.
        sections: [groups, G, Dk], flat; see `precision.codec.Codes`.
        steps: of the ranges, [groups, 1, G, Dk].
        first: place of the first slot's token in the first group.
        slots: [n], distinct.
        pool: [slots, G, Dk].
    """
    heads, dim = pool.shape[1:]
    narrow = dim // 8
    columns = np.zeros((NUM_SECTIONS * narrow + 1) * GROUP_TOKENS, np.uint8)
    joined = np.empty(dim * GROUP_TOKENS, np.uint8)
    rows = np.empty(dim * GROUP_TOKENS, np.uint8)
    places, shifts = np.empty(2 * dim, np.int64), np.empty(2 * dim, np.int64)
    middles = np.empty(dim, np.float32)
    for number in range(len(units)):
        head, start = units[number, 0], units[number, 1]
        inner, stop = max(0, -start), min(unit_tokens, len(slots) - start)
        while inner < stop:
            group, token = divmod(first + start + inner, GROUP_TOKENS)
            count = min(GROUP_TOKENS - token, stop - inner)
            skipped = token % WORD
            whole = (skipped + count + WORD - 1) // WORD * WORD
            wanted = 0
            for section in range(1, NUM_SECTIONS):
                plane = units[number, 1 + section]
                if plane >= 0:
                    wanted |= 1 << section
                    at = plane * plane_bytes + (inner - skipped) * narrow
                    to = section * narrow * GROUP_TOKENS
                    _to_columns(planes, at, narrow, narrow, whole, columns, to)
            at = (group * heads + head) * dim
            _find_pairs(sections, at, dim, wanted, places, shifts, middles)
            _join_pairs(columns, places, shifts, dim, joined)
            _to_rows(joined, whole, dim, rows)
            for more in range(count):
                slot, own = slots[start + inner + more], (skipped + more) * dim
                for element in range(dim):
                    gained = np.float32(rows[own + element]) - middles[element]
                    better = _get(pool, slot, head, element) + gained * steps[group, 0, head, element]
                    _set(pool, slot, head, element, better)
            inner += count


@compiled(
    *(
        f"({_BYTES}, int64, int64, int64, int64[:, ::1], float32[:, :, :, ::1], int64, "
        f"int64[::1], {pool})"
        for pool in _POOLS
    )
)
def raise_values(
    planes: Uint8s,
    plane_bytes: int,
    begin: int,
    unit_tokens: int,
    units: Indices,
    steps: Float32s,
    first: int,
    slots: Indices,
    pool: Any,
) -> None:
    """Add planes to the values that slots hold.

    Args:
        planes: planes of units, each of `plane_bytes` bytes, of which values begin at `begin`.
        plane_bytes: see there.
        begin: see there.
        unit_tokens: number of tokens of a unit.
        units: as of `raise_keys`.
        steps: of the ranges, [groups, tokens of a group, G, 1].
        first: place of the first slot's token in the first group.
        slots: [n], distinct.
        pool: [slots, G, Dv].
    """
    dim = pool.shape[2]
    narrow, rows = dim // 8, np.empty(dim * GROUP_TOKENS, np.uint8)
    for number in range(len(units)):
        head, start = units[number, 0], units[number, 1]
        inner, stop = max(0, -start), min(unit_tokens, len(slots) - start)
        while inner < stop:
            group, token = divmod(first + start + inner, GROUP_TOKENS)
            count = min(GROUP_TOKENS - token, stop - inner)
            rows[: count * dim] = 0
            middle = np.float32(0)
            for section in range(1, NUM_SECTIONS):
                plane = units[number, 1 + section]
                if plane >= 0:
                    shift = NUM_SECTIONS - 1 - section
                    middle += np.float32(1 << shift) / np.float32(2)
                    at = plane * plane_bytes + begin + inner * narrow
                    for more in range(count):
                        _add_bits(planes, at + more * narrow, narrow, rows, more * dim, shift)
            for more in range(count):
                slot, own = slots[start + inner + more], more * dim
                step = steps[group, token + more, head, 0]
                for element in range(dim):
                    gained = np.float32(rows[own + element]) - middle
                    better = _get(pool, slot, head, element) + gained * step
                    _set(pool, slot, head, element, better)
            inner += count
