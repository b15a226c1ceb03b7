"""A store on S3: what a hit takes from there, from the drive, from what was kept, and computed.

Three servers share a bucket of SeaweedFS on this machine, behind a proxy that can delay requests
and counts them. The first stores random prompts in its directory and in the bucket, the second has
kept them, and the third has room for two, so that each that is asked for comes from S3. All of them
run throughout. Each round has each way once, in an order that is drawn, for one of the prompts, or
one that is new; the round before the first is not counted. Files of servers are read with O_DIRECT.
Those of SeaweedFS are in the page cache: its drive is not part of S3 here.

Rows: the median TTFT in ms, its 95% interval by bootstrap, and the median and interval of the ratio
to the drive in the same round; of S3 also what the endpoint counted: reads for each hit, their
median size, and how many were under way at most.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.core.data import model_folder
from bench.core.object_store import BUCKET, Asked, Proxy, credentials, seaweed
from bench.core.options import DTYPE, KEEP, MODEL, SEED, Option
from bench.core.report import Result, Row, Table, interval
from bench.core.servers import Server, servers, store_flags, wait
from bench.core.session import BenchFailed, step

OPTIONS = (
    Option("prompts", 4, "random ones, three or more"),
    Option("prompt-tokens", 1500, "of each", quick=600),
    Option("delay-ms", (0.0, 20.0), "of each request to the endpoint"),
    Option("rounds", 9, "in which each way is measured once", quick=1),
    *(MODEL, DTYPE, SEED, KEEP),
)
COMPUTED, DRIVE, KEPT = "computed", "drive", "kept"
_WAIT_SECONDS = 300


def run(args: argparse.Namespace) -> Result:
    """Measure all ways in turn."""
    model, draw = model_folder(args.model), np.random.default_rng(args.seed)
    prompts, fresh = (
        draw.integers(100, 40_000, (count, args.prompt_tokens)).tolist()
        for count in (args.prompts, args.rounds + 1)
    )
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(servers(args))
        proxy = Proxy(stack.enter_context(seaweed(pool.folder / "weed")))
        stack.callback(proxy.close)

        def start(name: str, gb: float = 100.0) -> Server:
            flags = [
                *store_flags(pool.folder / name),
                *("--impress-keep=auto", f"--impress-ssd-gb={gb:.6f}"),
                *("--impress-min-free-gb=0", f"--impress-store=s3://{BUCKET}/bench"),
                f"--max-total-tokens={2 * args.prompt_tokens}",
            ]
            how = {"environment": credentials(proxy.port)}
            return stack.enter_context(pool.running(name, model, args.dtype, *flags, **how))

        first, second = start("first"), start("second")
        with step("storing"):
            for prompt in prompts:
                first.store(prompt)
            until(lambda: first.stats()["store"]["bucket"]["sent"] >= len(prompts))
        file_gb = first.stats()["store"]["used_bytes"] / len(prompts) / 1e9
        third = start("third", 2.5 * file_gb)
        with step("keeping"):
            for server in (second, third):
                until(lambda server=server: server.stats()["store"]["segments"] >= len(prompts))
            for prompt in prompts:
                hit(second, prompt)

        far = {f"S3, {delay:g} ms": f"{delay / 1e3}s" for delay in args.delay_ms}
        ways = {COMPUTED: first, DRIVE: first, KEPT: second} | dict.fromkeys(far, third)
        found: dict[str, list[tuple[float, list[Asked]]]] = {name: [] for name in ways}
        turns = itertools.cycle(prompts)
        for number in range(args.rounds + 1):
            for name in random.Random(number).sample([*ways], len(ways)):
                delay, known = far.get(name, ""), prompts[number % len(prompts)]
                prompt = next(turns) if delay else fresh[number] if name == COMPUTED else known
                proxy.fault = lambda asked, delay=delay: delay
                before = len(proxy.reads())
                took = hit(ways[name], prompt, {"impress_store": name != COMPUTED})
                reads = proxy.reads()[before:]
                if bool(reads) != bool(delay):
                    raise BenchFailed(f"{name}: {len(reads)} reads from S3")
                found[name].append((took, reads))
        for server in (first, second, third):
            server.check_log()
    seconds = {name: [took for took, _ in hits[1:]] for name, hits in found.items()}
    rows = [{"way": name, **spread(times, seconds[DRIVE])} for name, times in seconds.items()]
    for row, hits in zip(rows[3:], [found[name] for name in far], strict=True):
        row |= counted([reads for _, reads in hits[1:]])
    return Result({"model": model.name, "rows": rows}, [Table(rows)])


def spread(seconds: Sequence[float], base: Sequence[float]) -> Row:
    """Median in ms, and of the ratio to another way in the same round, each with its interval."""
    found = {"ttft_ms": np.array(seconds) * 1e3, "ratio": np.divide(seconds, base)}
    row = Row()
    for name, values in found.items():
        low, high = interval([values], of=np.median)
        row |= {name: float(np.median(values)), f"{name}_low": low, f"{name}_high": high}
    return {name: round(value, 1 if value >= 10 else 3) for name, value in row.items()}


def hit(server: Server, prompt: Sequence[int], custom: Mapping[str, Any] | None = None) -> float:
    """The TTFT behind an empty pool; returns when nothing of it goes on."""
    server.flush()
    began = time.perf_counter()
    came = list(server.stream(prompt, 1, custom))
    until(lambda: not server.stats()["store"]["bucket"]["fetching_bytes"])
    return came[0].at - began


def counted(hits: Sequence[Sequence[Asked]]) -> Row:
    """What the endpoint counted."""
    reads = [read for one in hits for read in one]
    return {
        "reads": round(len(reads) / len(hits), 1),
        "read_kb": round(statistics.median(read.size for read in reads) / 1024),
        "together": max(read.together for read in reads),
    }


def until(true: Callable[[], bool]) -> None:
    """Wait until it comes true.

    Raises:
        BenchFailed: it did not in time.
    """
    if not wait(_WAIT_SECONDS, true):
        raise BenchFailed("what was stored has not arrived")
