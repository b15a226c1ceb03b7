"""Identity of the model of stored KVs: a digest of everything that changes their values.

It includes all weights, not their name: a fine-tune served under the same name, another dtype or
another RoPE base has another identity, so that KVs of one are never used for the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

import torch
import xxhash
from torch import Tensor

from impress_sglang.storage.directory import MODEL_DIGITS
from impress_sglang.storage.segment import FORMAT_VERSION

_BLOCK_ELEMENTS = 1 << 22
_ODD_MULTIPLIER = 0x9E3779B1


def weights_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Digest names, shapes, dtypes and every bit of named tensors, on any device.

    A tensor on an accelerator is reduced there, so that no weights are copied. The digest of the
    same weights differs between a CPU and an accelerator, and so do their KVs.
    """
    state = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors):
        state.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:{_fingerprint(tensor)}".encode())
    return state.hexdigest()


def model_identity(
    *, weights: str, architecture: Mapping[str, object], shape: object, tp_rank: int, tp_size: int
) -> str:
    """Return the name of a model's store, 32 hex digits.

    `architecture`: parameters of the model's configuration that change KVs and are not in the
    weights (RoPE, norms, positions). `shape`: shape of the KVs.
    """
    fields = {
        "format": FORMAT_VERSION,
        "weights": weights,
        "architecture": {key: repr(value) for key, value in architecture.items()},
        "shape": repr(shape),
        "tp": [tp_rank, tp_size],
    }
    text = json.dumps(fields, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def rank_identity(identities: Sequence[str], rank: int) -> str:
    """Return the name of one rank's store, 32 hex digits, from the identities of all ranks in
    order.

    Names of different ranks differ only in the last four digits (`same_model`).
    """
    if len(identities) == 1:
        return identities[0]
    model = hashlib.blake2b("".join(identities).encode(), digest_size=MODEL_DIGITS // 2)
    return f"{model.hexdigest()}{rank:04x}"


def _fingerprint(tensor: Tensor) -> int:
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if raw.device.type == "cpu":
        return xxhash.xxh3_128_intdigest(raw.numpy())
    return _device_fingerprint(raw)


def _device_fingerprint(raw: Tensor) -> int:
    """Return a position-weighted sum of 32-bit words in wrapping 64-bit arithmetic."""
    if raw.numel() % 4:
        raw = torch.nn.functional.pad(raw, (0, 4 - raw.numel() % 4))
    # A slice of 16-bit weights may begin in the middle of a 32-bit word.
    words = (raw.clone() if raw.storage_offset() % 4 else raw).view(torch.int32)
    total = 0
    for start in range(0, words.numel(), _BLOCK_ELEMENTS):
        block = words[start : start + _BLOCK_ELEMENTS].to(torch.int64)
        positions = torch.arange(start + 1, start + 1 + block.numel(), device=block.device)
        mixed = (block + positions) * (positions * _ODD_MULTIPLIER | 1)
        total = (total * 31 + int((mixed ^ (mixed >> 29)).sum())) & 0xFFFFFFFFFFFFFFFF
    return total
