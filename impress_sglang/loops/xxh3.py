"""XXH3-64 of blocks of 4,096 bytes, compiled with Numba.

The library `xxhash` is called once per block from Python, which takes as long as hashing does, and
holds the interpreter's lock. This gives the same numbers, for this length only, as the algorithm is
specified (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, XXH3, large inputs,
default secret, seed 0); tests compare it with the library.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from impress_sglang.loops.jit import compiled
from impress_sglang.loops.types import BLOCK_WORDS, Indices, Words

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


def _secret(offset: int, count: int) -> Words:
    return np.frombuffer(_SECRET[offset : offset + 8 * count], "<u8").astype(np.uint64)


# Stripe s (64 bytes) is mixed with the 8 words of the secret from word s on; 16 stripes make a
# section. The last stripe of all has a place of its own in the secret.
_SECTION = np.concatenate([_secret(8 * stripe, 8) for stripe in range(16)])
_LAST_SECTION = np.concatenate([_SECTION[: 15 * 8], _secret(len(_SECRET) - 64 - 7, 8)])
_SCRAMBLE = _secret(len(_SECRET) - 64, 8)
_MERGE = _secret(11, 8)
_START = np.array(
    [_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0]],
    np.uint64,
)
_LENGTH = np.uint64(8 * BLOCK_WORDS * _PRIME64[0] % 2**64)
_PRIME = np.uint64(_PRIME32[0])
_AVALANCHE = np.uint64(0x165667919E3779F9)
_LOW = np.uint64(0xFFFFFFFF)
_32, _37, _47 = np.uint64(32), np.uint64(37), np.uint64(47)


@numba.njit(nogil=True)
def _folded_product(left: Any, right: Any) -> Any:
    """The two halves of the 128-bit product, combined by exclusive or."""
    low, high = left & _LOW, left >> _32
    other_low, other_high = right & _LOW, right >> _32
    crossed = high * other_low
    carried = (low * other_low >> _32) + (crossed & _LOW) + low * other_high
    upper = (crossed >> _32) + (carried >> _32) + high * other_high
    return upper ^ left * right


@numba.njit(nogil=True)
def _add_section(words: Words, secret: Words, lanes: Words, scratch: Words) -> None:
    """Add 16 stripes to the lanes; a sum, so that its terms can be added in any order.

    Halves are added to halves, which is vectorised, as eight sums over 16 stripes would not be.
    """
    products, plain = scratch[0], scratch[1]
    first, second = words[:64], words[64:128]
    first_key, second_key = secret[:64], secret[64:128]
    for j in range(64):
        one, two = first[j], second[j]
        mixed, other = one ^ first_key[j], two ^ second_key[j]
        products[j] = (mixed & _LOW) * (mixed >> _32) + (other & _LOW) * (other >> _32)
        plain[j] = one + two
    for j in range(32):
        products[j] += products[j + 32]
        plain[j] += plain[j + 32]
    for j in range(16):
        products[j] += products[j + 16]
        plain[j] += plain[j + 16]
    for j in range(8):
        lanes[j] += products[j] + products[j + 8]
        lanes[j ^ 1] += plain[j] + plain[j + 8]


@numba.njit(nogil=True)
def _digest(words: Words, lanes: Words, scratch: Words) -> Any:
    """XXH3-64 of `BLOCK_WORDS` words; the other arguments are memory to work in."""
    lanes[:] = _START
    for section in range(3):
        _add_section(words[128 * section : 128 * section + 128], _SECTION, lanes, scratch)
        for j in range(8):
            lanes[j] = (lanes[j] ^ (lanes[j] >> _47) ^ _SCRAMBLE[j]) * _PRIME
    _add_section(words[384:512], _LAST_SECTION, lanes, scratch)
    merged = _LENGTH
    for j in range(0, 8, 2):
        merged += _folded_product(lanes[j] ^ _MERGE[j], lanes[j + 1] ^ _MERGE[j + 1])
    merged = (merged ^ (merged >> _37)) * _AVALANCHE
    return merged ^ (merged >> _32)


@compiled("int64(uint64[::1], int64[::1], uint64[::1], int64)")
def first_bad_block(words: Words, blocks: Indices, checksums: Words, first: int) -> int:
    """See `digests.first_bad_block`."""
    lanes = np.empty(8, np.uint64)
    scratch = np.empty((2, 64), np.uint64)
    for place in range(len(blocks)):
        block = blocks[place]
        own = words[block * BLOCK_WORDS : (block + 1) * BLOCK_WORDS]
        if _digest(own, lanes, scratch) != checksums[first + block]:
            return place
    return -1
