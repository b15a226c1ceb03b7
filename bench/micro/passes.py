"""What a pass of a model takes by new tokens and by tokens before them, and what is learnt of it.

A model with random weights, all its layers its own, runs passes without SGLang; times are the
host's from an idle device to an idle device, medians. Then the product's
estimate is given `--passes` of them at random: of all kinds alike (`by all`), and fifty times as
often those of at most 64 new tokens (`by questions`). Shown is what it estimates, a dash where it
does not know, in ms.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bench.core.options import SEED, Option, one_of
from bench.core.report import Result, Row, Table, plain
from bench.engine.model import Model, attention
from bench.engine.workload import MODELS
from impress_sglang.cost import Estimator, pairs_of

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
    Option("passes", 200, "that are learnt from"),
    SEED,
)
QUESTION_TOKENS = 64


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
    by_all = _estimates(args, shape.hidden, rows, lambda row: 1)
    by_questions = _estimates(
        args, shape.hidden, rows, lambda row: 50 if row["new"] <= QUESTION_TOKENS else 1
    )
    for row, *found in zip(rows, by_all, by_questions, strict=True):
        row["by all"], row["by questions"] = found
    caption = f"{shape.name}, {args.dtype} on {args.device}"
    table = Table(plain("before", "new", "ms", "by all", "by questions"), rows, caption)
    return Result({"passes": rows}, [table])


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


def _estimates(
    args: argparse.Namespace, hidden: int, rows: Sequence[Row], weight: Callable[[Row], float]
) -> list[float | None]:
    """What is estimated for each pass after `--passes` of these, by their weights."""
    pick, estimator = random.Random(args.seed), Estimator(hidden)
    for row in pick.choices(rows, [weight(row) for row in rows], k=args.passes):
        estimator.note_forward(row["new"], row["pairs"], row["ms"] / 1e3)
    found = [estimator.computing.bound(row["new"], row["pairs"]) for row in rows]
    return [round(seconds * 1e3, 3) if seconds and known else None for seconds, known in found]
