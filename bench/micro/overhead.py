"""What IMPRESS or an option of it costs who has no use for it: throughput, pair by pair.

Two servers are up at the same time, one with --enable-impress and another one: stock SGLang with
the same rectangular attention on a CPU, or, with --against, IMPRESS with some other flags. The same
fresh prompts go to one and then to the other, many short rounds, in an order that is drawn for each
pair, so that what else the machine does hits both.

  short    prompts below --impress-min-prefix-tokens: the store is never asked, nothing is stored
  unshared longer prompts of which no two begin alike: each is written to SSD, with
            --write-after 1 (2, the default of a server, writes none of them)

The ratio is the median over pairs of the throughput with IMPRESS over that of the other, with its
95% interval (bootstrap).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np

from bench.core.data import make_model
from bench.core.options import DTYPE, KEEP, SEED, Option, one_of
from bench.core.report import Result, Row, Table, interval, plain
from bench.core.servers import STOCK, Server, servers
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


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """A round: so many requests with prompts of [shortest, longest] tokens."""

    requests: int
    shortest: int
    longest: int

    def prompts(self, chance: random.Random) -> list[list[int]]:
        """Token ids that nobody has seen before."""
        lengths = [chance.randint(self.shortest, self.longest) for _ in range(self.requests)]
        return [chance.choices(range(3, VOCAB), k=length) for length in lengths]


WORKLOADS = {
    "short": Workload(requests=16, shortest=16, longest=120),
    "unshared": Workload(requests=8, shortest=300, longest=600),
}
OPTIONS = (
    Option("workloads", tuple(WORKLOADS), "of short, unshared", parse=one_of(WORKLOADS)),
    Option("pairs", 60, "rounds on each server", quick=4),
    Option("concurrency", 8, "requests under way"),
    Option("pool-tokens", 16000, "of the device pool"),
    Option("write-after", 1, "sights after which a prompt is written"),
    Option("against", (), "flags for the other server: --impress-lookahead=off", parse=str),
    DTYPE,
    SEED,
    KEEP,
)


def run(args: argparse.Namespace) -> Result:
    """Measure all workloads."""
    with _both(args) as pair:
        rows = [_compare(args, pair, name) for name in args.workloads]
    names = ("workload", "pairs", "other_s", "impress_s", "throughput_ratio", "from", "to")
    return Result({"workloads": rows}, [Table(plain(*names), rows)])


@contextlib.contextmanager
def _both(args: argparse.Namespace) -> Iterator[dict[str, Server]]:
    """Both servers: `impress`, and the `other` one."""
    with servers(args) as pool, contextlib.ExitStack() as stack:
        model = make_model(pool.folder / "model", **SHAPE)
        flags = [
            f"--max-total-tokens={args.pool_tokens}",
            f"--max-running-requests={args.concurrency}",
            # There is no tokenizer, and nothing to say in text.
            "--skip-tokenizer-init",
        ]
        ours = ["--enable-impress", f"--impress-write-after={args.write_after}"]

        def start(name: str, more: Sequence[str] | None) -> Server:
            """With flags of IMPRESS; None: stock."""
            own = [] if more is None else [*ours, f"--impress-ssd-dir={pool.folder / name}", *more]
            preload = STOCK if more is None else None
            server = pool.running(name, model, args.dtype, *flags, *own, preload=preload)
            return stack.enter_context(server)

        yield {"other": start("other", args.against or None), "impress": start("impress", [])}


def _compare(args: argparse.Namespace, pair: dict[str, Server], name: str) -> Row:
    workload, chance = WORKLOADS[name], random.Random(f"{args.seed} {name}")
    seconds: dict[str, list[float]] = {which: [] for which in pair}
    with step(f"{name}: {args.pairs} pairs"):
        for number in range(-WARM_UP_ROUNDS, args.pairs):
            prompts = workload.prompts(chance)
            order = sorted(pair)
            chance.shuffle(order)
            for which in order:
                began = time.perf_counter()
                pair[which].generate_together(prompts, args.concurrency, new_tokens=NEW_TOKENS)
                if number >= 0:
                    seconds[which].append(time.perf_counter() - began)
    times = zip(seconds["other"], seconds["impress"], strict=True)
    ratios = [other / impress for other, impress in times]
    low, high = interval([ratios], args.seed, np.median)
    return {
        "workload": name,
        **{f"{which}_s": round(statistics.median(own), 4) for which, own in seconds.items()},
        "throughput_ratio": round(statistics.median(ratios), 4),
        "from": round(low, 4),
        "to": round(high, 4),
        "pairs": len(ratios),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }
