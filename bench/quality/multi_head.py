"""The multi-head form of a grouped-query model: the same outputs, and a KV head per query head.

    python -m bench multi_head [MODEL]

The paper's models are multi-head, and how important tokens are identified depends on the number of
KV heads. Rows of the key and value projections are repeated once per query head that shares them,
so `bench.quality.accuracy --multi-head` asks the same model with as many times the KVs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.core.servers import BenchFailed
from demo.model import DemoModelMissing, model_path, repeat_kv_heads

SUFFIX = "-multi-head"
_WEIGHTS = "model.safetensors"


def multi_head_form(model: Path) -> Path:
    """Folder of the multi-head form, beside `model`; written once.

    Args:
        model: folder of a Llama-like model with one `model.safetensors`.

    Returns:
        The folder, or `model` itself if it is multi-head already.

    Raises:
        BenchFailed: it cannot be converted, or there is no room beside it.
    """
    config = read_config(model)
    if kv_heads_of(config) == config["num_attention_heads"]:
        return model
    target = model.with_name(model.name + SUFFIX)
    if (target / "config.json").is_file():
        return target
    if not (model / _WEIGHTS).is_file():
        raise BenchFailed(f"--multi-head needs a model with one {_WEIGHTS}, not {model}")
    try:
        return repeat_kv_heads(model, target)
    except (OSError, ValueError) as error:
        # Another process may have written it meanwhile.
        if (target / "config.json").is_file():
            return target
        raise BenchFailed(f"cannot write {target}: {error}") from error


def read_config(model: Path) -> dict[str, Any]:
    """The `config.json` of a model.

    Raises:
        BenchFailed: it has none.
    """
    try:
        config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchFailed(f"{model} is no folder of a model: {error}") from error
    return config


def kv_heads_of(config: dict[str, Any]) -> int:
    """Number of KV heads, which a multi-head model's configuration may leave out."""
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def kv_bytes_per_token(model: Path, dtype: str) -> int:
    """Bytes of a token's keys and values in all layers."""
    config = read_config(model)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    item_bytes = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
    return int(config["num_hidden_layers"] * 2 * kv_heads_of(config) * head_dim * item_bytes)


def main() -> int:
    """Convert; returns the exit status."""
    try:
        model = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else model_path()
        print(multi_head_form(model))
    except (BenchFailed, DemoModelMissing) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
