"""Computes how much storage and memory prefixes of a model take, and how long reading them takes.

The sizes follow from the layout of segment files, without tokens and checksums.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from impress_sglang.cli import CommandError
from impress_sglang.codes.groups.codec import DIM_GRAIN
from impress_sglang.codes.rows.basis import Basis
from impress_sglang.config import BITS, BITS_TEXT, CODES, ImpressConfig
from impress_sglang.errors import ImpressError
from impress_sglang.storage.layout import KVShape, SegmentLayout
from impress_sglang.transfer.basis_codec import shape_by

_GB = 1e9


def plan(args: Namespace) -> dict[str, Any]:
    prefixes, tokens, per_second = args.prefixes, args.tokens, args.drive_gbps * _GB
    positive = min(prefixes, tokens) >= 1 and args.per_day >= 0 and per_second > 0
    if not positive or args.bits not in BITS:
        raise CommandError(
            f"prefixes, tokens and the drive's rate must be positive, and bits one of {BITS_TEXT}"
        )
    shape = shape_of(_config_of(args.model), args.bits)
    if args.basis is not None:
        try:
            shape = shape_by(Basis.load(args.basis).keeping(args.bits), shape)
        except ImpressError as error:
            raise CommandError(str(error)) from error
    shape = replace(shape, exact=args.keep != CODES)
    layout = SegmentLayout(shape, ImpressConfig().chunk_tokens, tokens, 0)
    read = sum(part.num_bytes for part in layout.codes)
    exact = tokens * shape.num_layers * shape.token_bytes
    stored = layout.file_bytes
    return {
        "kv_bytes_per_token": exact // tokens,
        "file_mb": round(stored / 1e6, 1),
        "ssd_gb": round(prefixes * stored / _GB, 1),
        "cache_gb": round(prefixes * read / _GB, 1),
        "read_mb": round(read / 1e6, 1),
        "read_share": round(read / exact, 3),
        "read_ms": round(read / per_second * 1e3, 1),
        "read_exact_ms": round(exact / per_second * 1e3, 1),
        "buffer_gb": round(2 * layout.max_layer_bytes / _GB, 3),
        "written_gb_per_day": round(args.per_day * stored / _GB, 1),
    }


def shape_of(config: Mapping[str, Any], bits: float) -> KVShape:
    """Return the shape of a model's KVs, in codes of `bits`, on one rank that has all heads."""
    config = config.get("text_config") or config
    if config.get("kv_lora_rank"):
        raise CommandError("the model compresses its KVs (MLA), of which no sizes are known here")
    try:
        heads = int(config["num_attention_heads"])
        dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        layers = int(config["num_hidden_layers"])
        key_heads = int(config.get("num_key_value_heads") or heads)
        name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        dtype = getattr(torch, name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CommandError(f"the model's config.json does not say its KVs: {error!r}") from error
    if not isinstance(dtype, torch.dtype) or not key_heads or heads % key_heads:
        raise CommandError("the model's config.json does not say its KVs")
    if dim % DIM_GRAIN:
        raise CommandError(
            f"heads of {dim} dimensions, no multiple of {DIM_GRAIN}, are not supported"
        )
    return KVShape(layers, heads, key_heads, dim, dim, dtype, (), bits)


def _config_of(model: Path) -> Mapping[str, Any]:
    path = model / "config.json" if model.is_dir() else model
    try:
        config: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(config, dict):
            return config
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} cannot be read: {error}") from error
    raise CommandError(f"{path} is not a model's configuration")
