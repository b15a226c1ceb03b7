"""SGLang's keys and tokens in the store's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from impress_sglang.storage.segment import Tokens
from impress_sglang.store.prefix_hashes import namespace_text


def namespace_of(key: Any) -> str:
    """The namespace of a key or request: keeps other `extra_key` or `cache_salt` values apart."""
    return namespace_text(key.extra_key, key.cache_salt)


def as_tokens(token_ids: Sequence[int]) -> Tokens:
    """Token ids in the store's form, int32."""
    return np.array(token_ids, dtype=np.int32)
