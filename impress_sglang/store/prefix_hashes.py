"""Digests of prefixes, which identify places in the tree across restarts; and hashes.

Hashes of all prefixes of a prompt let other modules remember prompts without keeping them. Hashes
of windows do not depend on their position in the prompt.
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
# One window of this number is chosen, on average.
_WINDOWS_PER_CHOICE = np.uint64(32)
_SEED_BYTES = 8
_TOKEN_DTYPE = np.dtype("<i4")
Hashes: TypeAlias = npt.NDArray[np.uint64]


def namespace_text(
    extra_key: str | None, cache_salt: str | None, adapter: str | None = None
) -> str:
    """Return text that differs for requests with different `extra_key`, `cache_salt` or adapter."""
    return json.dumps([extra_key, cache_salt, *([] if adapter is None else [adapter])])


def prefix_digest(namespace: str, tokens: Tokens) -> str:
    """Return the digest of a namespace and a prefix, 32 hex digits."""
    return extend_digest(empty_digest(namespace), tokens).hexdigest()


def empty_digest(namespace: str) -> hashlib.blake2b:
    return hashlib.blake2b(namespace.encode() + b"\0", digest_size=16)


def extend_digest(digest: hashlib.blake2b, tokens: Tokens) -> hashlib.blake2b:
    longer = digest.copy()
    longer.update(np.ascontiguousarray(tokens, _TOKEN_DTYPE).data)
    return longer


class PrefixHashes:
    """Keyed hashes, unpredictable without the 16-byte seed, which is random unless one is given."""

    def __init__(self, seed: bytes | None = None) -> None:
        seed = seed or secrets.token_bytes(2 * _SEED_BYTES)
        self._key = seed[:_SEED_BYTES]
        self._odd = int.from_bytes(seed[_SEED_BYTES:], "little") | 1
        self._powers = _powers(self._odd, BLOCK_TOKENS + 1)[1:]

    def of(self, namespace: str, tokens: Tokens) -> Hashes:
        """Hash all prefixes of whole blocks of a prompt, shortest first, uint64 [n // 64].

        `tokens`: the prompt from its start, int32 [n].
        """
        blocks = len(tokens) // BLOCK_TOKENS
        rows = tokens[: blocks * BLOCK_TOKENS].reshape(-1, BLOCK_TOKENS).astype(np.uint64)
        # A block's hash depends on its position; a prefix's hash is made of their sum.
        places = np.arange(1, blocks + 1, dtype=np.uint64) * self._powers[-1]
        return splitmix64(
            np.cumsum(splitmix64(rows @ self._powers + places)) + self._start(namespace)
        )

    def windows(self, namespace: str, tokens: Tokens) -> tuple[Indices, Hashes]:
        """Choose windows of 64 tokens; returns their starts, ascending, int64 [w], and hashes,
        uint64 [w].

        A window is chosen by its content, one in 32 on average, so that the same text has the same
        windows in any position.
        """
        hashes = self.rolling_windows(namespace, tokens, BLOCK_TOKENS)
        chosen = np.flatnonzero(hashes % _WINDOWS_PER_CHOICE == 0)
        # Mixed again, because the lower bits of chosen hashes are all zero.
        return chosen, splitmix64(hashes[chosen] + self._start(namespace))

    def rolling_windows(self, namespace: str, tokens: Tokens, length: int) -> Hashes:
        """Hash the window of `length` tokens at each position, uint64 [n - length + 1].

        A hash is a polynomial of the tokens modulo 2^64, and does not depend on the position.
        """
        if len(tokens) < length:
            return np.empty(0, np.uint64)
        powers = _powers(self._odd, len(tokens))
        sums = np.cumsum(tokens.astype(np.uint64) * powers)
        sums = np.concatenate([np.zeros(1, np.uint64), sums])
        inverse = _powers(pow(self._odd, -1, 2**64), len(tokens) - length + 1)
        return splitmix64((sums[length:] - sums[:-length]) * inverse ^ self._start(namespace))

    def block_windows(self, namespace: str, tokens: Tokens, length: int) -> Hashes:
        """Hash consecutive windows without overlap, uint64 [n // length]."""
        rows = tokens[: len(tokens) // length * length].reshape(-1, length).astype(np.uint64)
        return splitmix64(rows @ _powers(self._odd, length) ^ self._start(namespace))

    def _start(self, namespace: str) -> Hashes:
        name = hashlib.blake2b(namespace.encode(), key=self._key, digest_size=_SEED_BYTES)
        return np.frombuffer(name.digest(), np.uint64)

    def rows(self, hashes: Hashes, count: int) -> Hashes:
        """Return `count` independent hashes of each hash, uint64 [count, n]."""
        rows = np.arange(1, count + 1, dtype=np.uint64)[:, None] * self._powers[0]
        return splitmix64(hashes + rows)


def _powers(base: int, count: int) -> Hashes:
    """Return the powers of a number modulo 2^64, from the 0th on, uint64 [count]."""
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)


def splitmix64(values: Hashes) -> Hashes:
    """Mix each value so that all bits of the result depend on all of its bits (splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
