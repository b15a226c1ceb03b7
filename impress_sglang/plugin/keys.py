"""SGLang's keys and tokens in the store's form.

With adapters (LoRA), prefixes are kept apart by weights, never by a name or a path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from impress_sglang.storage.segment import Tokens
from impress_sglang.store.identity import weights_digest
from impress_sglang.store.prefix_hashes import namespace_text

_DIGEST = "_impress_digest"
_MEDIA = np.iinfo(np.int32).max


def namespace_of(key: Any) -> str:
    """The namespace of a key or request: keeps other `extra_key` or `cache_salt` values apart."""
    return namespace_text(key.extra_key, key.cache_salt)


def as_tokens(token_ids: Sequence[int]) -> Tokens:
    """Token ids in the store's form, int32; those that stand for media become one that is no text.

    They have 62 bits, of which the last 32 may be those of text.
    """
    return np.minimum(np.asarray(token_ids, np.int64), _MEDIA).astype(np.int32)


def namespace_of_request(req: Any, manager: Any) -> str:
    """The namespace of a request as it came; `manager` is SGLang's `LoRAManager`, if it has one.

    SGLang appends the id of an adapter to `extra_key`, which may be the same for other weights.
    """
    if req.lora_id is None:
        return namespace_text(req.extra_key, req.cache_salt)
    extra_key = req.extra_key.removesuffix(req.lora_id) or None
    return namespace_text(extra_key, req.cache_salt, _digest(manager.loras[req.lora_id]))


def _digest(adapter: Any) -> str:
    """Of all that an adapter does to KVs; kept with it, because it takes a while."""
    found: str | None = getattr(adapter, _DIGEST, None)
    if found is None:
        tensors = [
            (f"{number} {name}", tensor)
            for number, layer in enumerate(adapter.layers)
            for name, tensor in layer.weights.items()
        ]
        tensors += adapter.embedding_layers.items()
        tensors += adapter.added_tokens_embeddings.items()
        found = f"{weights_digest(tensors)} {adapter.scaling!r}"
        setattr(adapter, _DIGEST, found)
    return found
