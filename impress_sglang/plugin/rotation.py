"""The rotation of a model's keys, as SGLang's rotary embeddings apply it."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding, RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding
from torch import Tensor

from impress_sglang.codes.rotation import KeyRotation
from impress_sglang.errors import UnsupportedError

# Rotations whose factors depend on the position only, as rows of `cos_sin_cache`.
_KNOWN_ROTATIONS = (
    RotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)


def rotation_of(model: Any, option: str) -> KeyRotation:
    """Return the rotation of a model's keys, which an option needs, or raise `UnsupportedError`."""
    rotations = [module for module in model.modules() if hasattr(module, "cos_sin_cache")]
    # One object serves all layers.
    if len(rotations) != 1 or type(rotations[0]) not in _KNOWN_ROTATIONS:
        names = sorted({type(rotation).__name__ for rotation in rotations})
        kinds = ", ".join(names) or "no rotary embedding"
        raise UnsupportedError(
            f"IMPRESS cannot move keys of {type(model).__name__} to other positions ({kinds}): "
            f"drop {option}"
        )
    (rotary,) = rotations
    replaced = list[Tensor]()

    def table(rows: int) -> Tensor:
        if rows > (before := len(rotary.cos_sin_cache)):
            # CUDA graphs go on to read the one that was there when they were captured.
            replaced.append(rotary.cos_sin_cache)
            # Doubled at least, so that all that are kept take no more than the last one.
            rotary._ensure_cos_sin_cache_length(max(rows, 2 * before) - 1)
        return rotary.cos_sin_cache

    return KeyRotation(table, halves=rotary.is_neox_style)
