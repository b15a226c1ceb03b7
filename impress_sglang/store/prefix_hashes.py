"""Digests of prefixes, which name places in the tree and outlast restarts; and hashes.

Of all prefixes of a prompt at once, to remember prompts without keeping them, and of some of its
windows, the same wherever the same text is.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from impress_sglang.loops.types import Indices
from impress_sglang.storage.segment import Tokens

# Prefixes are hashed at multiples of this number of tokens.
BLOCK_TOKENS = 64
# On average, one of this number of windows is chosen.
_ONE_OF = np.uint64(32)
_SEED_BYTES = 8
_INTEGERS = np.dtype("<i4")
Hashes: TypeAlias = npt.NDArray[np.uint64]


def namespace_text(
    extra_key: str | None, cache_salt: str | None, adapter: str | None = None
) -> str:
    """The text that separates requests with different `extra_key`, `cache_salt` or adapter."""
    return json.dumps([extra_key, cache_salt, *([] if adapter is None else [adapter])])


def prefix_digest(namespace: str, tokens: Tokens) -> str:
    """Digest of a namespace and a prefix, 32 hex digits."""
    return extended(begun_digest(namespace), tokens).hexdigest()


def begun_digest(namespace: str) -> hashlib.blake2b:
    """The digest of a prefix of no tokens."""
    return hashlib.blake2b(namespace.encode() + b"\0", digest_size=16)


def extended(digest: hashlib.blake2b, tokens: Tokens) -> hashlib.blake2b:
    """The digest of a prefix that is followed by these tokens."""
    longer = digest.copy()
    longer.update(np.ascontiguousarray(tokens, _INTEGERS).data)
    return longer


class PrefixHashes:
    """Hashes that nobody can predict who has not their seed of 16 bytes: each object its own."""

    def __init__(self, seed: bytes | None = None) -> None:
        seed = seed or secrets.token_bytes(2 * _SEED_BYTES)
        self._key = seed[:_SEED_BYTES]
        self._odd = int.from_bytes(seed[_SEED_BYTES:], "little") | 1
        self._powers = _powers(self._odd, BLOCK_TOKENS + 1)[1:]

    def of(self, namespace: str, tokens: Tokens) -> Hashes:
        """Hashes of all prefixes of whole blocks in a namespace, shortest first, uint64 [n // 64].

        `tokens` are those of a prompt from its start, int32 [n].
        """
        blocks = len(tokens) // BLOCK_TOKENS
        rows = tokens[: blocks * BLOCK_TOKENS].reshape(-1, BLOCK_TOKENS).astype(np.uint64)
        # Each block's hash depends on its place; that of a prefix is made of their sum.
        places = np.arange(1, blocks + 1, dtype=np.uint64) * self._powers[-1]
        return mixed(np.cumsum(mixed(rows @ self._powers + places)) + self._start(namespace))

    def windows(self, namespace: str, tokens: Tokens) -> tuple[Indices, Hashes]:
        """Windows of 64 tokens: where they begin, ascending, int64 [w], and hashes, uint64 [w].

        Their content decides which windows are chosen, one in 32 on average, so that the same text
        has the same ones wherever it is.
        """
        hashes = self.all_windows(namespace, tokens, BLOCK_TOKENS)
        chosen = np.flatnonzero(hashes % _ONE_OF == 0)
        # Mixed again, because the lower bits of chosen hashes are all zero.
        return chosen, mixed(hashes[chosen] + self._start(namespace))

    def all_windows(self, namespace: str, tokens: Tokens, length: int) -> Hashes:
        """The hash of the window of `length` tokens at each place, uint64 [n - length + 1].

        It is a polynomial of the tokens modulo 2^64, and does not depend on the place.
        """
        if len(tokens) < length:
            return np.empty(0, np.uint64)
        powers = _powers(self._odd, len(tokens))
        sums = np.cumsum(tokens.astype(np.uint64) * powers)
        sums = np.concatenate([np.zeros(1, np.uint64), sums])
        inverse = _powers(pow(self._odd, -1, 2**64), len(tokens) - length + 1)
        return mixed((sums[length:] - sums[:-length]) * inverse ^ self._start(namespace))

    def apart_windows(self, namespace: str, tokens: Tokens, length: int) -> Hashes:
        """The hashes of consecutive windows without overlap, uint64 [n // length]."""
        rows = tokens[: len(tokens) // length * length].reshape(-1, length).astype(np.uint64)
        return mixed(rows @ _powers(self._odd, length) ^ self._start(namespace))

    def _start(self, namespace: str) -> Hashes:
        name = hashlib.blake2b(namespace.encode(), key=self._key, digest_size=_SEED_BYTES)
        return np.frombuffer(name.digest(), np.uint64)

    def rows(self, hashes: Hashes, count: int) -> Hashes:
        """`count` independent hashes of each of these hashes, uint64 [count, n]."""
        rows = np.arange(1, count + 1, dtype=np.uint64)[:, None] * self._powers[0]
        return mixed(hashes + rows)


def _powers(base: int, count: int) -> Hashes:
    """Powers of a number modulo 2^64, from the 0th on, uint64 [count]."""
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)


def mixed(values: Hashes) -> Hashes:
    """Mix each value so that all bits of the result depend on all of its bits (splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
