"""What a pass of a model takes by new tokens and by tokens before them, and which form that has.

The server estimates computing as a * new tokens + b * attended pairs (`serving/estimate.py`). A
pass over few tokens takes longer than that: weights are read and kernels started in any case. Which
form the whole has decides what short passes say of long ones. A model with random weights, all its
layers its own, runs passes without SGLang; times are the host's from an idle device to an idle
device, medians. Three forms are fitted to all of them by relative errors:

    proportional    a n + b p
    added           c + a n + b p
    longer          max(c, a n + b p)

For each: the unknowns, and how many times too long or too short the worst estimate is, over all
passes and over those of at least `serving.estimate.LEAST_OBSERVED_TOKENS`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bench.core.options import SEED, Option, one_of
from bench.core.report import Result, Row, Table, plain
from bench.engine.model import Model, attention
from bench.engine.workload import MODELS
from impress_sglang.serving.estimate import LEAST_OBSERVED_TOKENS, pairs_of

CUDA = torch.cuda.is_available()
OPTIONS = (
    Option("model", "llama-3-8b", f"of {', '.join(MODELS)}", parse=one_of(MODELS)),
    Option("scale", 1.0, "heads, FFN and vocabulary in shares of the model's", quick=0.1),
    Option("layers", None, "instead of the model's", quick=2, parse=int),
    Option("device", "cuda" if CUDA else "cpu", "of torch"),
    Option("dtype", "bfloat16" if CUDA else "float32", "of the model"),
    Option("new", (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192), "tokens", quick=(1, 64)),
    Option("before", (0, 4096, 16384, 65536), "tokens", quick=(0, 256)),
    Option("repeat", 7, "passes of each kind", quick=2),
    SEED,
)
Times = npt.NDArray[np.float64]


def run(args: argparse.Namespace) -> Result:
    """Measure all passes, then fit."""
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    shape = MODELS[args.model].scaled(args.scale, args.layers)
    model = Model(shape, device, dtype, distinct_layers=shape.layers, seed=args.seed)
    size = (max(args.new) + max(args.before), shape.kv_heads, shape.head_dim)
    pools = [
        [torch.randn(size, device=device, dtype=dtype) for _ in range(2)]
        for _ in range(shape.layers)
    ]
    rows: list[Row] = []
    for before, new in itertools.product(args.before, args.new):
        times = [_seconds(model, pools, before, new) for _ in range(2 + args.repeat)][2:]
        seconds = statistics.median(times)
        pairs = pairs_of(before, new)
        rows.append({"before": before, "new": new, "pairs": pairs, "ms": round(seconds * 1e3, 3)})
    sizes = np.array([[row["new"], row["pairs"]] for row in rows], np.float64)
    measured = np.array([row["ms"] for row in rows])
    forms = [_fit(name, form, sizes, measured) for name, form in FORMS.items()]
    tables = [
        Table(plain("before", "new", "ms"), rows, f"{shape.name}, {args.dtype} on {args.device}"),
        Table(plain(*forms[0]), forms),
    ]
    return Result({"passes": rows, "forms": forms}, tables)


def _seconds(model: Model, pools: list[list[Tensor]], before: int, new: int) -> float:
    """One pass, until its token is on the host."""
    tokens = torch.randint(0, model.shape.vocabulary, (new,), device=model.device)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    began = time.perf_counter()
    hidden = model.embed(tokens)
    for layer, (keys, values) in enumerate(pools):
        queries, *own = model.project(layer, hidden)
        for pool, rows in zip((keys, values), own, strict=True):
            pool[before : before + new] = rows
        attended = attention(queries, keys[: before + new], values[: before + new])
        hidden = model.finish(layer, hidden, attended)
    int(model.first_token(hidden)[0])
    return time.perf_counter() - began


def _proportional(unknowns: Times, sizes: Times) -> Times:
    found: Times = sizes @ unknowns[1:]
    return found


def _added(unknowns: Times, sizes: Times) -> Times:
    return unknowns[0] + _proportional(unknowns, sizes)


def _longer(unknowns: Times, sizes: Times) -> Times:
    return np.maximum(unknowns[0], _proportional(unknowns, sizes))


FORMS: dict[str, Callable[[Times, Times], Times]] = {
    "proportional": _proportional,
    "added": _added,
    "longer": _longer,
}


def _fit(name: str, form: Callable[[Times, Times], Times], sizes: Times, measured: Times) -> Row:
    """Unknowns >= 0 with the least squares of log(estimate / measured)."""
    from scipy.optimize import least_squares

    largest = np.argmax(measured)
    start = np.log([measured.min(), *(measured[largest] / sizes[largest] / 2)])
    found = least_squares(lambda x: np.log(form(np.exp(x), sizes) / measured), start)
    unknowns = np.exp(found.x)
    errors = np.log(form(unknowns, sizes) / measured)
    long = errors[sizes[:, 0] >= LEAST_OBSERVED_TOKENS]
    row: dict[str, Any] = {"form": name, "c ms": None if name == "proportional" else unknowns[0]}
    row.update({"a us": unknowns[1] * 1e3, "b ns": unknowns[2] * 1e6})
    for key, part in (("all", errors), ("long", long)):
        row[f"{key}: too long"] = math.exp(max(part.max(), 0.0))
        row[f"{key}: too short"] = math.exp(max(-part.min(), 0.0))
    return {key: round(x, 4) if isinstance(x, float) else x for key, x in row.items()}
