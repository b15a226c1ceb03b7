"""Loops over coded keys and values, compiled; `precision.codec` is their reference.

Bytes stand as `precision.layout.CodeLayout` says: 4 bits of each element in the base and 2 in each
plane. What is restored is the middle of the values that the known bits share.
"""

from __future__ import annotations

from impress_sglang.loops.jit import compiled
from impress_sglang.loops.types import Float32s, Indices, Uint8s

_ROWS = "float32[:, :, ::1]"


@compiled(f"(uint8[:, :, :, ::1], float32[:, :, :, ::1], int64, {_ROWS})")
def restore_keys(base: Uint8s, ranges: Float32s, first: int, rows: Float32s) -> None:
    """Restore keys [n, G, Dk], those of the tokens from `first` on.

    Args:
        base: [groups, tokens of a group, G, Dk / 2].
        ranges: [groups, G, 2, Dk], low and step of each channel.
        first: counted from the first token of the base.
        rows: what is filled.
    """
    group_tokens = base.shape[1]
    for place in range(rows.shape[0]):
        group, token = divmod(first + place, group_tokens)
        for head in range(rows.shape[1]):
            codes, row = base[group, token, head], rows[place, head]
            low, step = ranges[group, head, 0], ranges[group, head, 1]
            for pair in range(len(codes)):
                even, odd = 2 * pair, 2 * pair + 1
                row[even] = low[even] + ((codes[pair] & 15) * 16 + 7.5) * step[even]
                row[odd] = low[odd] + ((codes[pair] >> 4) * 16 + 7.5) * step[odd]


@compiled(f"(uint8[:, :, :, ::1], float32[:, :, :, ::1], int64, {_ROWS})")
def restore_values(base: Uint8s, ranges: Float32s, first: int, rows: Float32s) -> None:
    """Restore values [n, G, Dv], those of the tokens from `first` on.

    Args:
        base: [groups, tokens of a group, G, Dv / 2].
        ranges: [groups, tokens of a group, G, 2], low and step of each vector.
        first: counted from the first token of the base.
        rows: what is filled.
    """
    group_tokens = base.shape[1]
    for place in range(rows.shape[0]):
        group, token = divmod(first + place, group_tokens)
        for head in range(rows.shape[1]):
            codes, row = base[group, token, head], rows[place, head]
            low, step = ranges[group, token, head, 0], ranges[group, token, head, 1]
            for pair in range(len(codes)):
                row[2 * pair] = low + ((codes[pair] & 15) * 16 + 7.5) * step
                row[2 * pair + 1] = low + ((codes[pair] >> 4) * 16 + 7.5) * step


@compiled(f"(uint8[:, :, ::1], float32[::1], int64[::1], {_ROWS})")
def add_planes(parts: Uint8s, cells: Float32s, entry_of: Indices, rows: Float32s) -> None:
    """Add to rows what planes add to their elements, in steps of the element's range.

    Args:
        parts: [n, tokens, D / 4], two bits of an element each.
        cells: [n], steps from one value of the two bits to the next.
        entry_of: [n], which row each part belongs to.
        rows: [rows, tokens, D].
    """
    for place in range(parts.shape[0]):
        cell, entry = cells[place], rows[entry_of[place]]
        for token in range(parts.shape[1]):
            codes, row = parts[place, token], entry[token]
            for byte in range(len(codes)):
                for element in range(4):
                    code = (codes[byte] >> (2 * element)) & 3
                    row[4 * byte + element] += (code - 1.5) * cell
