"""Digests of prefixes: the name of a place in the tree, which outlasts restarts."""

from __future__ import annotations

import hashlib
import json

import numpy as np

from impress_sglang.storage.segment import Tokens

_INTEGERS = np.dtype("<i4")


def namespace_text(extra_key: str | None, cache_salt: str | None) -> str:
    """The text that separates requests with different `extra_key` or `cache_salt`."""
    return json.dumps([extra_key, cache_salt])


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
