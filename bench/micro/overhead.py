"""What IMPRESS costs who has no use for it: throughput, pair by pair.

Two servers are up at the same time, one with --enable-impress, the other one stock SGLang with the
same rectangular attention on a CPU. The same fresh prompts go to one and then to the other, many
short rounds, in an order that is drawn for each pair, so that what else the machine does hits both.

  short    prompts below --impress-min-prefix-tokens: the store is never asked, nothing is stored
  unshared longer prompts of which no two begin alike: each is written to SSD at once (a server that
           is told nothing writes none of them)

The ratio is the median over pairs of the throughput with IMPRESS over that of the other, with its
95% interval (bootstrap).
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.core.options import DTYPE, KEEP, SEED, Option, one_of
from bench.core.report import Result, Row, Table, interval
from bench.core.servers import OURS, STOCK, Server, servers
from bench.core.session import step

VOCAB = 4000
# Its steps take about 10 ms on two cores, as those of a large model on a GPU: work on the
# scheduler's thread weighs the same.
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
WARM_UP_ROUNDS = 4
NEW_TOKENS = 16
AT_ONCE = 8
# There is no tokenizer, and nothing to say in text.
FLAGS = ("--max-total-tokens=16000", f"--max-running-requests={AT_ONCE}", "--skip-tokenizer-init")


class Workload(NamedTuple):
    """A round: so many requests with prompts of [shortest, longest] tokens."""

    requests: int
    shortest: int
    longest: int


WORKLOADS = {"short": Workload(16, 16, 120), "unshared": Workload(8, 300, 600)}
OPTIONS = (
    Option("workloads", tuple(WORKLOADS), "of short, unshared", parse=one_of(WORKLOADS)),
    Option("pairs", 60, "rounds on each server", quick=4),
    *(DTYPE, SEED, KEEP),
)


def run(args: argparse.Namespace) -> Result:
    """Measure all workloads."""
    with servers(args) as pool, contextlib.ExitStack() as stack:
        model = make_model(pool.folder / "model")
        ours = ("--enable-impress", "--impress-write-after=1")
        ours += (f"--impress-ssd-dir={pool.folder / 'kv'}",)
        pair = {
            name: stack.enter_context(
                pool.running(name, model, args.dtype, *FLAGS, *flags, preload=preload)
            )
            for name, flags, preload in (("other", (), STOCK), ("impress", ours, OURS))
        }
        rows = [compare(args, pair, name) for name in args.workloads]
    return Result({"workloads": rows}, [Table(rows)])


def make_model(folder: Path) -> Path:
    """Save a Llama with random weights in float32; returns its folder."""
    import torch
    import transformers

    torch.manual_seed(1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(folder)
    return folder


def compare(args: argparse.Namespace, pair: Mapping[str, Server], name: str) -> Row:
    """The figures of a workload."""
    workload, chance = WORKLOADS[name], random.Random(f"{args.seed} {name}")
    seconds: dict[str, list[float]] = {which: [] for which in pair}
    with step(f"{name}: {args.pairs} pairs"):
        for number in range(-WARM_UP_ROUNDS, args.pairs):
            lengths = [chance.randint(*workload[1:]) for _ in range(workload.requests)]
            # Nobody has seen them before.
            prompts = [chance.choices(range(3, VOCAB), k=length) for length in lengths]
            for which in chance.sample(sorted(pair), 2):
                began = time.perf_counter()
                pair[which].generate_together(prompts, AT_ONCE, new_tokens=NEW_TOKENS)
                if number >= 0:
                    seconds[which].append(time.perf_counter() - began)
    ratios = np.divide(seconds["other"], seconds["impress"]).round(4).tolist()
    low, high = interval([ratios], args.seed, np.median)
    return {
        "workload": name,
        "pairs": len(ratios),
        **{f"{which}_s": round(statistics.median(times), 4) for which, times in seconds.items()},
        "throughput_ratio": round(statistics.median(ratios), 4),
        "from": round(low, 4),
        "to": round(high, 4),
        "ratios": ratios,
    }
