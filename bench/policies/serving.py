"""Policies on one trace in real servers: TTFT, bytes and hits, as in the paper's Figures 16 to 21.

Every shared prefix is computed once and stored on SSD. Then each policy gets a server of its own,
one after another, with the same stored prefixes, cache sizes and requests: two thirds of a warm-up,
reordering for the policies that do it, the rest of the warm-up, a few requests at the emulated
speed, and the measured part. Its device pool has room for the requests under way only. TTFT is the
time of a request for one token over HTTP; all else is what the server counted meanwhile.
`recompute` has nothing to warm up, and runs the first six.

Prefixes are few-shot examples of PIQA, OpenBookQA and COPA, and which prefix a request takes
follows a normal distribution (section 6.1 of the IMPRESS paper). By default the SSD is emulated:
reads are slowed down to --ssd-mbps, so that a small model on a CPU has the proportions of a large
one on a GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from bench.core.data import READERS, load_tokenize, model_folder, read_rows
from bench.core.options import ASKING, Option, one_of
from bench.core.report import Result, Row, Table, ratio
from bench.core.servers import SPARE_TOKENS, Server, Servers, servers
from bench.core.session import BenchFailed, step
from bench.policies.trace import MIN_SIGMA, Tokens, make_trace
from impress_sglang.config import PART_POLICIES
from impress_sglang.config import POLICIES as ALL_POLICIES
from impress_sglang.storage.segment import SEGMENT_SUFFIX

POLICIES = (
    *("recompute", "as", "as+h2o+lru", "as+h2o+lfu"),
    *("paper+itf", "paper+itf+reorder", "paper", "impress"),
)
BASELINES = POLICIES[:4]
REORDERING = ("paper+itf+reorder", "paper")
# Stores differ by what they keep; each is written by a policy that reads it.
STORED_BY = {"exact": "as", "codes": "impress", "paper": "paper"}
# Shorter than any prefix of a trace.
MIN_PREFIX_TOKENS = 128


def store_kind(policy: str) -> str:
    """A key of `STORED_BY`."""
    if policy.startswith("paper"):
        return "paper"
    return "codes" if policy.startswith("impress") else "exact"


OPTIONS = (
    Option("policies", POLICIES, "to compare", parse=one_of(ALL_POLICIES)),
    Option("prefixes", 8, "number of shared prefixes", quick=4),
    Option("prefix-tokens", 1500, "tokens of each, about", quick=512),
    Option("warmup", 96, "requests that fill the caches first", quick=6),
    Option("requests", 40, "measured requests", quick=5),
    Option("sigma", None, "of the popularity, in prefixes (a quarter of them)", parse=float),
    Option("concurrency", 1, "requests that clients have under way"),
    Option("running", None, "how many of them run; the others wait (all run)", parse=int),
    Option("device-share", 0.10, "device cache of chunks, of all stored KVs"),
    Option("host-share", 0.15, "host cache of chunks, of all stored KVs"),
    Option("ssd-mbps", 30.0, "bandwidth of the emulated SSD in MB/s; 0: the real one"),
    Option("retention", 0.25, "share of tokens that policies other than impress load"),
    *ASKING,
)
DATA_SETS = ("copa", "openbookqa", "piqa")
RECOMPUTED = 6
# Part of the warm-up before reordering, and of requests at the emulated speed beside it.
FIRST_SHARE = 2 / 3
SETTLE_SHARE = 0.1


def run(args: argparse.Namespace) -> Result:
    """Measure all policies."""
    args.settle = max(1, round(args.warmup * SETTLE_SHARE))
    args.sigma = args.sigma or max(MIN_SIGMA, args.prefixes / 4)
    with servers(args) as pool:
        comparison = Comparison(args, pool)
        kinds = dict.fromkeys(map(store_kind, args.policies))
        # As the first policy has them.
        stored_bytes, *_ = map(comparison.prepare, kinds)
        device_mb, host_mb = tiers = (
            round(args.device_share * stored_bytes / 1e6, 1),
            round(args.host_share * stored_bytes / 1e6, 1),
        )
        rows = [comparison.measure(name, tiers) for name in args.policies]
    add_speedups(rows)
    note = f"SSD: emulated, {args.ssd_mbps:g} MB/s" if args.ssd_mbps else "SSD: the real one"
    caption = (
        f"{args.prefixes} prefixes of about {args.prefix_tokens} tokens; {note}; caches: device "
        f"{device_mb:g} MB, host {host_mb:g} MB of {stored_bytes / 1e6:,.0f} MB "
        "stored; MB and chunks are per request"
    )
    figures = {
        "model": comparison.model.name,
        "prefix_lengths": [len(prefix) for prefix in comparison.trace.prefixes],
        "stored_bytes": stored_bytes,
        "device_mb": device_mb,
        "host_mb": host_mb,
        "emulated_ssd_mbps": args.ssd_mbps or None,
        "policies": rows,
    }
    return Result(figures, [Table(rows, COLUMNS, caption)])


class Comparison:
    """The trace, its prefixes in stores, and a server for each policy."""

    def __init__(self, args: argparse.Namespace, pool: Servers) -> None:
        """Build the trace.

        Raises:
            BenchFailed: the data cannot give it.
        """
        if args.prefix_tokens < 2 * MIN_PREFIX_TOKENS:
            raise BenchFailed(f"--prefix-tokens must be at least {2 * MIN_PREFIX_TOKENS}")
        self.model = model_folder(args.model)
        datasets = {
            name: [READERS[name](row) for row in read_rows(args.data, name)] for name in DATA_SETS
        }
        with step("building the trace"):
            self.trace = make_trace(datasets, load_tokenize(self.model), args)
        self._args, self._pool = args, pool

    def prepare(self, kind: str) -> int:
        """Compute and store every prefix; returns bytes on SSD.

        Raises:
            BenchFailed: not all were stored.
        """
        store, prefixes = self._pool.folder / f"prepared-{kind}", self.trace.prefixes
        with (
            self._server(store.name, STORED_BY[kind], store) as server,
            step(f"computing the prefixes for {kind}"),
        ):
            for prefix in prefixes:
                # While a prefix is written, the pool has no room to write another.
                server.store(prefix)
            server.stop()
        sizes = [path.stat().st_size for path in store.glob("*/segments/*/*") if path.is_file()]
        if len(sizes) != len(prefixes):
            raise BenchFailed(
                f"{len(sizes)} segments were stored for {len(prefixes)} prefixes; is there room on "
                "the SSD?"
            )
        return sum(sizes)

    def measure(self, name: str, tiers: tuple[float, float]) -> Row:
        """The figures of a policy, on a server with all prefixes and caches of so many MB.

        Raises:
            BenchFailed: the server counted other requests than those that were measured.
        """
        measured, store = self.trace.measured, self._pool.folder / f"store-{name}"
        prepared = self._pool.folder / f"prepared-{store_kind(name)}"
        shutil.copytree(prepared, store, copy_function=link, ignore=shutil.ignore_patterns("lock"))
        with self._server(name, name, store, tiers) as server, step(f"{name}: measuring"):
            if name == "recompute":
                measured = measured[:RECOMPUTED]
                # There are no caches to fill, and one request is enough to grow buffers. The last
                # one, for the prefix that it leaves in the pool is not that of the first measured.
                self._ask(server, self.trace.settle[-1:])
            else:
                self._warm_up(server, name)
            before = server.stats()
            ttft_ms = self._ask(server, measured)
            found = counted(before, server.stats(), len(measured))
        shutil.rmtree(store)
        return make_row(name, ttft_ms, found)

    def _ask(self, server: Server, prompts: Sequence[Tokens]) -> list[float]:
        """Milliseconds to the first token of each request."""
        found = server.generate_together(prompts, self._args.concurrency)
        return [seconds * 1e3 for seconds in found]

    def _warm_up(self, server: Server, name: str) -> None:
        """All requests before the measured ones."""
        warmup = self.trace.warmup
        # An order is found from the first part; the second one fills the caches again.
        first = round(len(warmup) * FIRST_SHARE)
        self._ask(server, warmup[:first])
        if name in REORDERING:
            server.reorder()
        self._ask(server, warmup[first:])
        # Caches fill alike at any speed; how reads are cut follows the speed that is seen.
        server.emulate_ssd(self._args.ssd_mbps)
        self._ask(server, self.trace.settle)

    def _server(
        self, name: str, policy: str, store: Path, tiers: tuple[float, float] = (0, 0)
    ) -> AbstractContextManager[Server]:
        # No more than the requests under way: prefixes of earlier ones have to be loaded.
        running = self._args.running or self._args.concurrency
        slots = running * self.trace.longest_prompt + SPARE_TOKENS
        flags = [f"--max-total-tokens={slots}", f"--max-running-requests={running}"]
        flags += policy_flags(policy, store, self._args.retention, tiers)
        return self._pool.running(
            name, self.model, self._args.dtype, *flags, *self._args.server_flag
        )


def link(source: str, target: str) -> None:
    """Segments never change; the journal, to which servers write, is copied."""
    (os.link if Path(source).suffix == SEGMENT_SUFFIX else shutil.copy2)(source, target)


def policy_flags(
    policy: str, store: Path, retention: float, tiers: tuple[float, float]
) -> list[str]:
    """Arguments of the extension for one policy; `retention` is for those that use parts."""
    flags = ["--enable-impress", f"--impress-ssd-dir={store}", f"--impress-policy={policy}"]
    if policy == "recompute":
        return flags
    flags += [
        # What is compared is loading, so prefixes are stored at once and never computed instead.
        "--impress-write-after=1",
        "--impress-load=always",
        f"--impress-min-prefix-tokens={MIN_PREFIX_TOKENS}",
        f"--impress-retention={retention if policy in PART_POLICIES else 1.0}",
        # A measured request leaves nothing behind.
        "--impress-approximation-depth=0",
        f"--impress-device-gb={tiers[0] / 1e3:.6f}",
        f"--impress-host-gb={tiers[1] / 1e3:.6f}",
    ]
    if policy in REORDERING:
        flags.append("--impress-reorder-interval=0")
    return flags


def make_row(policy: str, ttft_ms: Sequence[float], found: Mapping[str, float]) -> Row:
    """The figures of one policy, from counters of all its requests; a ratio of nothing is None."""
    accessed = found["chunks_accessed"]
    p50, p99 = np.percentile(ttft_ms, [50, 99]).round(2).tolist()
    return {
        "policy": policy,
        "requests": len(ttft_ms),
        "ttft_ms_mean": round(float(np.mean(ttft_ms)), 2),
        "ttft_ms_p50": p50,
        "ttft_ms_p99": p99,
        "io_share": ratio(found["wait_ms"], sum(ttft_ms)),
        "device_hit_ratio": ratio(found["device_chunks"], accessed),
        "host_hit_ratio": ratio(found["host_chunks"], accessed),
        "ssd_ratio": ratio(found["ssd_chunks"], accessed),
        "ssd_mb": round(found["ssd_bytes"] / 1e6 / len(ttft_ms), 2),
        "chunks": round(found["chunks_loaded"] / len(ttft_ms), 1),
        "important_device_hit_ratio": ratio(
            found["important_device_bytes"], found["important_bytes"]
        ),
        **{name: round(total, 2) for name, total in found.items()},
        "ttft_ms": [round(ms, 2) for ms in ttft_ms],
    }


COLUMNS = (
    *("policy", "requests", "requests_ssd", "ttft_ms_mean", "ttft_ms_p50", "ttft_ms_p99"),
    *("speedup_over_best_baseline", "io_share", "ssd_mb", "chunks"),
    *("device_hit_ratio", "host_hit_ratio", "important_device_hit_ratio"),
)


def add_speedups(rows: Sequence[Row]) -> None:
    """Add to each row how many times faster it is than the fastest baseline of the run."""
    means = [row["ttft_ms_mean"] for row in rows if row["policy"] in BASELINES]
    for row in rows:
        row["speedup_over_best_baseline"] = ratio(min(means, default=0.0), row["ttft_ms_mean"])


def counted(before: Mapping[str, Any], after: Mapping[str, Any], requests: int) -> dict[str, float]:
    """What was counted between two answers of `GET /impress/stats`.

    Raises:
        BenchFailed: not so many requests.
    """
    found = {
        name: total - before["totals"][name]
        for name, total in after["totals"].items()
        if not isinstance(total, dict)
    }
    if found["requests"] != requests:
        raise BenchFailed(f"a server counted {found['requests']:g} requests, not {requests}")
    return found
