"""Loops that restore rows of keys and values, compiled; `codes.rows.coder` is their reference.

Indices are unsigned: loops are made into vectors only where no index can count from the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from impress_sglang.loops.jit import compiled
from impress_sglang.loops.types import Float32s, Indices, Int32s, Uint8s, Uint16s, Uint64s

# Bins of a unit in which `quantise` begins to look for a level.
BINS = 32
# A gain is 2 ** ((code - GAIN_UNIT) / GAIN_STEPS).
GAIN_UNIT, GAIN_STEPS = 12, 4
_LEAST = 1e-30
_ONE, _TWO = np.uint64(1), np.uint64(2)


@compiled(
    "(uint8[:, ::1], uint64[:, ::1], uint64[:, ::1], uint64[::1], float32[:, ::1], float32[::1], "
    "uint8[:, ::1], float32[:, ::1])"
)
def unpack(
    rows: Uint8s,
    areas: Uint64s,
    runs: Uint64s,
    bounds: Uint64s,
    curves: Float32s,
    gains: Float32s,
    parts: Uint8s,
    out: Float32s,
) -> None:
    """Restore components of rows uint8 [t, row_bytes] into `out` [t, C]: levels times gains.

    For `areas`, `runs` and `bounds` see `codes.rows.row.RowTables`. `parts` uint8 [t, its parts]
    has zeros at the end of each row; the others are overwritten. `curves` are
    `codes.rows.row.CURVES`, `gains` [32].
    """
    tokens = np.uint64(len(rows))
    for number in range(3):
        begin, count, width, put = areas[number]
        mask = np.uint8((1 << width) - 1)
        for lane in range(np.uint64(8) // width):
            shift, first = np.uint8(lane * width), put + lane * count
            for token in range(tokens):
                for byte in range(count):
                    parts[token, first + byte] = (rows[token, begin + byte] >> shift) & mask
    for number in range(len(runs)):
        first, count, nibble, crumb, bit, bits = runs[number]
        p, q, r = curves[bits, 0], curves[bits, 1], curves[bits, 2]
        one = np.float32(1.0)
        half = one / np.float32(1 << bits)
        high, middle = np.uint8(bits & np.uint64(3)), np.uint8(bits & _ONE)
        for token in range(tokens):
            for inner in range(count):
                if bits == 8:
                    place = nibble + _TWO * inner
                    code = parts[token, place] << np.uint8(4) | parts[token, place + _ONE]
                else:
                    code = parts[token, nibble + inner] << high
                    code |= parts[token, crumb + inner] << middle
                    code |= parts[token, bit + inner]
                centre = np.float32(np.uint8(code)) * (half + half) + (half - one)
                square = centre * centre
                # Unlike `/` it does not ask for zero, which would keep the loop from vectors.
                level = np.divide(centre * (p + q * square), one - r * square)
                out[token, first + inner] = level
    for token in range(tokens):
        word = np.uint32(rows[token, 0]) | np.uint32(rows[token, 1]) << np.uint32(8)
        word |= np.uint32(rows[token, 2]) << np.uint32(16)
        word |= np.uint32(rows[token, 3]) << np.uint32(24)
        for group in range(len(bounds) - 1):
            gain = gains[(word >> np.uint32(5 * group)) & np.uint32(31)]
            for component in range(bounds[group], bounds[group + 1]):
                out[token, component] *= gain


@compiled("(uint32[::1], uint16[::1])", "(uint32[::1], uint32[::1])", makes_arrays=False)
def _put_words(words: Any, target: Any) -> None:
    """Put the bits of float32 numbers into a row of such, or of bfloat16, rounded to even."""
    cut = np.uint32(32 - 8 * target.itemsize)
    # What rounds to nearest even, if numbers are cut.
    below_half, odd = np.uint32(0x7FFF if cut else 0), np.uint32(1 if cut else 0)
    for place in range(len(target)):
        word = words[place]
        last = np.uint32(word >> np.uint32(16)) & odd
        target[place] = np.uint32(word + np.uint32(below_half + last)) >> cut


@compiled(
    *(
        "(uint16[:, ::1], float32[::1], float32[:, ::1], float32[:, ::1], boolean, int64[::1], "
        f"uint64, uint64, {pool}, {pool})"
        for pool in ("uint16[:, ::1]", "uint32[:, ::1]")
    )
)
def fill(
    product: Uint16s,
    mean: Float32s,
    cos: Float32s,
    sin: Float32s,
    halves: bool,
    slots: Indices,
    heads: int,
    dim: int,
    keys: Any,
    values: Any,
) -> None:
    """Turn keys, and put keys and values into slots int64 [t], distinct.

    `product` is bfloat16 [t, X], less the `mean` [X]: keys of all heads, then values. `cos` and
    `sin` are [t, rotated dimensions / 2]; for `halves` see `codes.rotation.KeyRotation`. Pools of
    keys [slots, heads * dim] and of values [slots, the rest of X] are of bfloat16 in 16 bits, or of
    float32 in 32.
    """
    half, split = np.uint64(cos.shape[1]), heads * dim
    numbers, turned = np.empty(len(mean), np.float32), np.empty(len(mean), np.float32)
    words, turned_words = numbers.view(np.uint32), turned.view(np.uint32)
    for token in range(np.uint64(len(product))):
        row = product[token]
        for feature in range(len(row)):
            words[feature] = np.uint32(row[feature]) << np.uint32(16)
        for feature in range(len(numbers)):
            numbers[feature] += mean[feature]
        c, s = cos[token], sin[token]
        for head in range(heads):
            x, y = numbers[head * dim : (head + _ONE) * dim], turned[head * dim :]
            # A loop for each side, because only what is written to one array is made into vectors.
            if halves:
                first, second, to = x[:half], x[half : _TWO * half], y[half : _TWO * half]
                for pair in range(len(c)):
                    y[pair] = first[pair] * c[pair] - second[pair] * s[pair]
                for pair in range(len(c)):
                    to[pair] = second[pair] * c[pair] + first[pair] * s[pair]
            else:
                for pair in range(half):
                    one, other = x[_TWO * pair], x[_TWO * pair + _ONE]
                    y[_TWO * pair] = one * c[pair] - other * s[pair]
                    y[_TWO * pair + _ONE] = other * c[pair] + one * s[pair]
            for place in range(_TWO * half, dim):
                y[place] = x[place]
        _put_words(turned_words, keys[slots[token]])
        _put_words(words[split:], values[slots[token]])


@compiled(
    "(float32[:, ::1], uint8[::1], uint64[::1], float32[::1], float32[::1], float32[::1], "
    "uint8[:, ::1], float32[::1], uint8[:, ::1], uint8[:, ::1])"
)
def quantise(
    components: Float32s,
    bits: Uint8s,
    bounds: Uint64s,
    levels: Float32s,
    ends: Float32s,
    gains: Float32s,
    guesses: Uint8s,
    worth: Float32s,
    codes: Uint8s,
    chosen: Uint8s,
) -> None:
    """Give components [t, C] the codes and gains that lose least, and restore them in place.

    A gain with which all is in the range of the codes is often better than the root mean square:
    one component beyond the range may lose more than all others of its group.

    Args:
        components: see above.
        bits: of each component, [C].
        bounds: see `codes.rows.row.RowTables`.
        levels: of 0 to 8 bits; those of b bits begin at 2**b - 1.
        ends: where cells of levels end, at the same places; the last one of each is infinite.
        gains: [32], see `codes.rows.coder.GAIN_TABLE`.
        guesses: [9, bins], the code of the lower end of each bin, `BINS` of them for 1.
        worth: what the squared error of a component counts, [C].
        codes: [t, C], is filled.
        chosen: gains [t, 6], is filled.
    """
    tried = np.empty(4, np.float64)
    numbers, found = np.empty(len(bits), np.float32), np.empty(len(bits), np.uint8)
    kept = np.empty(len(bits), np.float32)
    half = guesses.shape[1] // 2
    for token in range(len(components)):
        for group in range(len(bounds) - 1):
            start, stop = bounds[group], bounds[group + 1]
            square, peak = 0.0, 0.0
            for place in range(start, stop):
                size = abs(components[token, place])
                square += size * size
                peak = max(peak, size / levels[(np.uint64(2) << np.uint64(bits[place])) - _TWO])
            chosen[token, group] = 0
            if start == stop:
                continue
            tried[0] = GAIN_UNIT + GAIN_STEPS / 2 * np.log2(max(square / (stop - start), _LEAST))
            tried[1] = tried[0] + 1
            tried[2] = max(tried[0], GAIN_UNIT + GAIN_STEPS * np.log2(max(peak, _LEAST)))
            tried[3] = (tried[0] + tried[2]) / 2
            best, last = np.inf, -1
            for attempt in range(4):
                gain = int(min(max(np.rint(tried[attempt]), 0.0), len(gains) - 1.0))
                if gain == last:
                    continue
                last, lost = gain, 0.0
                factor = gains[gain]
                for place in range(start, stop):
                    component = components[token, place]
                    scaled = component / factor
                    offset = (np.int64(1) << np.int64(bits[place])) - 1
                    bin_ = min(max(np.int64(scaled * BINS + half), 0), 2 * half - 1)
                    code = np.int64(guesses[bits[place], bin_])
                    while scaled > ends[offset + code]:
                        code += 1
                    number = levels[offset + code] * factor
                    lost += worth[place] * (number - component) ** 2
                    numbers[place], found[place] = number, code
                if lost < best:
                    best = lost
                    chosen[token, group] = gain
                    for place in range(start, stop):
                        codes[token, place] = found[place]
                        kept[place] = numbers[place]
            for place in range(start, stop):
                components[token, place] = kept[place]


@compiled("(uint8[:, ::1], uint8[:, ::1], uint8[::1], int32[:, :, ::1], uint8[:, ::1])")
def pack(codes: Uint8s, gains: Uint8s, bits: Uint8s, places: Int32s, rows: Uint8s) -> None:
    """Write codes [t, C] and gains [t, 6] to rows of zeros [t, row_bytes].

    See `codes.rows.row.RowLayout.pack`; `places` are its `parts`.
    """
    for token in range(len(rows)):
        word = np.uint32(0)
        for group in range(gains.shape[1]):
            word |= np.uint32(gains[token, group]) << np.uint32(5 * group)
        for byte in range(4):
            rows[token, byte] = word >> np.uint32(8 * byte) & np.uint32(255)
        for component in range(np.uint64(len(bits))):
            code, left = np.uint64(codes[token, component]), np.uint64(bits[component])
            for kind in range(4):
                at = places[component, kind, 0]
                if at >= 0:
                    width = np.uint64(4 if kind < 2 else 4 - kind)
                    left -= width
                    part = code >> left & ((_ONE << width) - _ONE)
                    rows[token, np.uint64(at)] |= part << np.uint64(places[component, kind, 1])
