"""The rotation of a model's keys (RoPE), which a basis undoes and blending turns further."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding, RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding
from torch import Tensor

from impress_sglang.codes.rotation import KeyRotation
from impress_sglang.errors import UnsupportedError

# Rotations whose factors depend on the position alone, as rows of `cos_sin_cache`.
_KNOWN_ROTATIONS = (
    RotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)


def rotation_of(model: Any, option: str) -> KeyRotation:
    """Make the rotation that moves a model's keys to other positions, as an option needs.

    Raises:
        UnsupportedError: its rotation is not known.
    """
    found = [own for own in model.modules() if hasattr(own, "cos_sin_cache")]
    # One object serves all layers.
    if len(found) != 1 or type(found[0]) not in _KNOWN_ROTATIONS:
        kinds = ", ".join(sorted({type(own).__name__ for own in found})) or "no rotary embedding"
        raise UnsupportedError(
            f"IMPRESS cannot move keys of {type(model).__name__} to other positions ({kinds}): "
            f"drop {option}"
        )
    (rotary,) = found

    def table(rows: int) -> Tensor:
        rotary._ensure_cos_sin_cache_length(rows - 1)
        cache: Tensor = rotary.cos_sin_cache
        return cache

    return KeyRotation(table, halves=rotary.is_neox_style)
