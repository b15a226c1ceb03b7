"""What a server writes where most prompts are sent once, by the sights that make one worth it.

Prompts begin with one of a few shared prefixes, popular by a Zipf law, or are nobody else's; the
trace is the same for each `--impress-write-after`, and the pool holds only what runs.

*written* are bytes written to SSD, *of all* by the bytes of the KVs of all prompts, *worth* by
those of the shared prefixes: at best 1 and what codes add. *cached* is the share of the shared
tokens that were not computed. *a day* is of a server that computes --tokens-per-s of a model with
--kv-kb per token, if it writes the same share.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from bench.core.data import make_model
from bench.core.options import DTYPE, KEEP, SEED, Option
from bench.core.report import Column, Result, Row, Table
from bench.core.servers import Servers, servers
from bench.core.session import step
from bench.micro.overhead import SHAPE
from bench.policies.trace import random_tokens

OPTIONS = (
    Option("write-after", (1, 2, 3), "sights of a prefix before it is written"),
    Option("requests", 400, "in the trace", quick=40),
    Option("once", 0.8, "share of the prompts that nobody sends again"),
    Option("prefixes", 16, "that the others share", quick=4),
    Option("prompt-tokens", 512, "of each prompt; a question of 32 is its own"),
    Option("zipf", 1.0, "exponent of the prefixes' popularity"),
    Option("concurrency", 4, "requests under way"),
    Option("tokens-per-s", 10000, "of the server whose day is told"),
    Option("kv-kb", 131.0, "per token of its model (Llama-3-8B in 16 bits)"),
    DTYPE,
    SEED,
    KEEP,
)
QUESTION_TOKENS = 32
# Of `random_tokens`.
VOCAB = 20_000
DAY = 86400
_HEAD_DIM = SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
# Keys and values in float32.
_TOKEN_BYTES = 2 * 4 * _HEAD_DIM * SHAPE["num_key_value_heads"] * SHAPE["num_hidden_layers"]


def run(args: argparse.Namespace) -> Result:
    """Serve the trace once for each number of sights."""
    prompts, shared = _trace(args)
    with servers(args) as pool:
        make_model(pool.folder / "model", **SHAPE | {"vocab_size": VOCAB})
        rows = [_serve(args, pool, count, prompts, shared) for count in args.write_after]
    columns = (
        Column("write after", "write_after"),
        Column("written MB", lambda row: row["written_bytes"] / 1e6, "{:,.1f}"),
        Column("of all", "of_all", "{:.2f}"),
        Column("worth", "of_shared", "{:.2f}"),
        Column("cached", "cached", "{:.0%}"),
        Column("TB a day", "tb_a_day", "{:,.1f}"),
    )
    caption = f"{args.requests} prompts of {args.prompt_tokens} tokens, {args.once:.0%} sent once"
    return Result({"servers": rows}, [Table(columns, rows, caption)])


def _trace(args: argparse.Namespace) -> tuple[list[list[int]], list[int]]:
    """Prompts, and which prefix each has; -1: none that is shared."""
    rng = np.random.default_rng(args.seed)
    length = args.prompt_tokens - QUESTION_TOKENS
    prefixes = random_tokens(rng, args.prefixes, length)
    weights = 1.0 / np.arange(1, args.prefixes + 1) ** args.zipf
    drawn = rng.choice(args.prefixes, args.requests, p=weights / weights.sum())
    shared = np.where(rng.random(args.requests) < args.once, -1, drawn).tolist()
    alone = random_tokens(rng, args.requests, args.prompt_tokens)
    prompts = [
        own if prefix < 0 else prefixes[prefix] + own[length:]
        for prefix, own in zip(shared, alone, strict=True)
    ]
    return prompts, shared


def _serve(
    args: argparse.Namespace,
    pool: Servers,
    write_after: int,
    prompts: list[list[int]],
    shared: list[int],
) -> Row:
    name = f"write-after-{write_after}"
    with pool.running(
        name,
        pool.folder / "model",
        args.dtype,
        # Nothing stays in the pool for long.
        f"--max-total-tokens={args.concurrency * (args.prompt_tokens + 128)}",
        f"--max-running-requests={args.concurrency}",
        "--skip-tokenizer-init",
        "--enable-impress",
        f"--impress-write-after={write_after}",
        f"--impress-ssd-dir={pool.folder / name}",
    ) as server:
        with step(f"{name}: serving"):
            answers = server.generate_together(prompts, at_once=args.concurrency)
        server.flush()
        stats = server.stats()
        server.check_log()
    return _row(args, write_after, stats, answers, shared)


def _row(
    args: argparse.Namespace,
    write_after: int,
    stats: dict[str, Any],
    answers: list[dict[str, Any]],
    shared: list[int],
) -> Row:
    written = stats["store"]["bytes_written"]
    again = [prefix for prefix in set(shared) if prefix >= 0 and shared.count(prefix) > 1]
    length = args.prompt_tokens - QUESTION_TOKENS
    of_all = written / (len(shared) * args.prompt_tokens * _TOKEN_BYTES)
    cached = [
        own["meta_info"]["cached_tokens"] / length
        for own, prefix in zip(answers, shared, strict=True)
        if prefix >= 0
    ]
    return {
        "write_after": write_after,
        "written_bytes": written,
        "segments": stats["store"]["segments"],
        "of_all": round(of_all, 4),
        "of_shared": round(written / (len(again) * length * _TOKEN_BYTES), 4),
        "cached": round(float(np.mean(cached)), 4),
        "tb_a_day": round(of_all * args.tokens_per_s * args.kv_kb * 1e3 * DAY / 1e12, 2),
    }
