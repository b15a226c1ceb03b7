"""A store on S3: what a hit takes from there, from the drive in front of it, and computed.

One server stores random prompts, in its directory and in a bucket of SeaweedFS on this machine,
behind a proxy that adds --delay-ms to each request and counts them. Another with an empty directory
asks for them, and again when it has kept them. Columns: median TTFT in ms, computed, from the
first server's drive, from S3, and from what was kept; then what the endpoint counted for S3: reads,
their median size, how many were under way at most, and bytes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from bench.core.data import model_folder
from bench.core.object_store import BUCKET, Proxy, credentials, seaweed
from bench.core.options import DTYPE, KEEP, MODEL, SEED, Option
from bench.core.report import Result, Table, plain
from bench.core.servers import Server, servers, store_flags
from bench.core.session import BenchFailed, step

OPTIONS = (
    Option("prompts", 5, "random ones", quick=2),
    Option("prompt-tokens", 3000, "of each", quick=600),
    Option("delay-ms", (0.0, 20.0), "of each request to the endpoint"),
    *(MODEL, DTYPE, SEED, KEEP),
)
_WAIT_SECONDS = 300


def run(args: argparse.Namespace) -> Result:
    """Measure with each delay, in a folder of the bucket of its own."""
    model, rows = model_folder(args.model), []
    draw = np.random.default_rng(args.seed)
    prompts = draw.integers(100, 40_000, (args.prompts, args.prompt_tokens)).tolist()
    room = args.prompt_tokens * (args.prompts + 1)
    with servers(args) as pool, seaweed(pool.folder / "weed") as port:
        proxy = Proxy(port)
        for delay in args.delay_ms:
            proxy.fault = lambda asked, delay=delay: f"{delay / 1e3}s"  # type: ignore[misc]
            row = {"delay_ms": delay}
            for name in ("first", "second"):
                flags = [
                    *store_flags(pool.folder / f"{name}-{delay:g}"),
                    "--impress-keep=auto",
                    f"--impress-store=s3://{BUCKET}/{delay:g}",
                    f"--max-total-tokens={room}",
                ]
                how = {"environment": credentials(proxy.port)}
                full = f"{name}-{delay:g}"
                with pool.running(full, model, args.dtype, *flags, **how) as server, step(full):
                    server.generate(list(range(100, 140)), 4)
                    if name == "first":
                        row |= {"computed_ms": timed(server, prompts)}
                        server.flush()
                        wait(lambda: bucket_of(server)["sent"] >= len(prompts))
                        row |= {"drive_ms": timed(server, prompts)}
                    else:
                        row |= from_s3(server, proxy, prompts)
                    server.check_log()
            rows.append(row)
        proxy.close()
    return Result({"model": model.name, "rows": rows}, [Table(plain(*rows[0]), rows)])


def from_s3(server: Server, proxy: Proxy, prompts: list[list[int]]) -> dict[str, float]:
    """The figures of a server whose directory is empty."""
    wait(lambda: server.stats()["store"]["segments"] >= len(prompts))
    before, held = len(proxy.reads()), list[float]()
    for prompt in prompts:
        held.append(ttft(server, prompt))
        server.flush()
        # The next one is not to wait for the rest of this one.
        wait(lambda: not bucket_of(server)["fetching_bytes"])
    reads = proxy.reads()[before:]
    return {
        "s3_ms": median_ms(held),
        "kept_ms": timed(server, prompts),
        "reads": len(reads),
        "read_kb": round(statistics.median(own.size for own in reads) / 1024),
        "together": max(own.together for own in reads),
        "read_mb": round(sum(own.size for own in reads) / 1e6, 1),
    }


def timed(server: Server, prompts: list[list[int]]) -> float:
    """The median TTFT of prompts that are not in the pool."""
    server.flush()
    return median_ms([ttft(server, prompt) for prompt in prompts])


def ttft(server: Server, prompt: list[int]) -> float:
    """Seconds until the first token."""
    began = time.perf_counter()
    came = list(server.stream(prompt, 1))
    return came[0].at - began


def median_ms(seconds: list[float]) -> float:
    """In milliseconds."""
    return round(statistics.median(seconds) * 1e3, 1)


def bucket_of(server: Server) -> dict[str, float]:
    """What a server says of its bucket."""
    found: dict[str, float] = server.stats()["store"]["bucket"]
    return found


def wait(until: Callable[[], bool]) -> None:
    """Wait until it comes true.

    Raises:
        BenchFailed: it did not in time.
    """
    deadline = time.monotonic() + _WAIT_SECONDS
    while not until():
        if time.monotonic() > deadline:
            raise BenchFailed("what was stored has not arrived")
        time.sleep(0.1)
