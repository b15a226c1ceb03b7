"""Orders of the queue in real servers: requests come as a Poisson process, at shares of capacity.

A third of the requests, each, finds its prefix in the pool, in the store, or nowhere. Capacity is
what the first server does while many clients keep it busy. All orders get the same requests at the
same times, at each load; each of SGLang's policies gets a server with each `--impress-schedule`.
Prefixes and questions are random tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Sequence

import numpy as np

from bench.core.data import model_folder
from bench.core.options import DTYPE, KEEP, MODEL, SEED, Option, one_of
from bench.core.report import Column, Result, Row, Table, ratio
from bench.core.servers import SPARE_TOKENS, Server, Servers, servers
from bench.core.session import step
from bench.policies.compared import Tiers, link_store, policy, policy_flags
from bench.policies.trace import random_tokens
from impress_sglang.options import SCHEDULES

OPTIONS = (
    Option("orders", ("fcfs", "lpm"), "policies of SGLang"),
    Option("schedules", SCHEDULES, "that change its order", parse=one_of(SCHEDULES)),
    Option("policy", "impress", "of loading, see bench serving", parse=policy),
    Option("loads", (0.5, 0.8, 0.95), "of capacity", quick=(0.8,)),
    Option("prefixes", 48, "that are stored and not in the pool", quick=8),
    Option("resident", 4, "that are", quick=2),
    Option("prefix-tokens", 256, "of each"),
    Option("requests", 300, "at each load", quick=24),
    Option("running", 2, "requests that run; the others wait"),
    Option("ssd-mbps", 10.0, "bandwidth of the emulated SSD in MB/s"),
    MODEL,
    DTYPE,
    SEED,
    KEEP,
)
QUESTION_TOKENS = 16
# They keep a server busy while its capacity is measured.
CLIENTS = 16
KINDS = ("resident", "stored", "unknown")
# What is read for a prefix stays nowhere.
_TIERS = Tiers(0, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A request: of which of `KINDS`, its tokens, and when it comes, in mean distances."""

    kind: str
    tokens: list[int]
    when: float


def run(args: argparse.Namespace) -> Result:
    """Measure all orders."""
    rng = np.random.default_rng(args.seed)
    prefixes = random_tokens(rng, args.prefixes + args.resident, args.prefix_tokens)
    # One for capacity, and one for each load.
    rounds = [_make_requests(args, prefixes, rng) for _ in range(len(args.loads) + 1)]
    rows: list[Row] = []
    rate = None
    with servers(args) as pool:
        bench = _Bench(args, pool, prefixes)
        bench.prepare()
        for order in args.orders:
            for schedule in args.schedules:
                found = bench.measure(order, schedule, rounds, rate)
                rate = rate or found[0]["rate"]
                rows += found
    for row in rows:
        first = next(own for own in rows if own["load"] == row["load"])
        for name in ("ttft_ms_mean", "ttft_ms_p99", "seconds"):
            row[f"{name}_ratio"] = ratio(row[name], first[name])
    caption = f"SSD: emulated, {args.ssd_mbps:g} MB/s; ratios to the first of the same load"
    return Result({"orders": rows}, [Table(COLUMNS, rows, caption)])


class _Bench:
    """A store with all prefixes, and a server for each order."""

    def __init__(self, args: argparse.Namespace, pool: Servers, prefixes: list[list[int]]) -> None:
        self._args = args
        self._pool = pool
        self._prefixes = prefixes
        self._model = model_folder(args.model)
        # For requests under way, and the prefixes that stay.
        prompt = args.prefix_tokens + QUESTION_TOKENS + SPARE_TOKENS
        self._slots = (args.running + args.resident) * prompt

    def prepare(self) -> None:
        """Store the prefixes."""
        with self._server("prepared") as server, step("computing the prefixes"):
            for tokens in self._prefixes:
                server.store(tokens)
            server.stop()

    def measure(
        self, order: str, schedule: str, rounds: Sequence[list[Asked]], rate: float | None
    ) -> list[Row]:
        """A row for each load; without the `rate` of requests per second, it is measured."""
        name = f"{order}-{schedule}"
        link_store(self._pool.folder / "prepared", self._pool.folder / name)
        flags = (f"--schedule-policy={order}", f"--impress-schedule={schedule}")
        rows = []
        with self._server(name, *flags) as server:
            server.emulate_ssd(self._args.ssd_mbps)
            with step(f"{name}: warming up"):
                began = time.perf_counter()
                server.first_token_ms([own.tokens for own in rounds[0]], CLIENTS)
                rate = rate or len(rounds[0]) / (time.perf_counter() - began)
            for load, asked in zip(self._args.loads, rounds[1:], strict=True):
                with step(f"{name}: load {load:g}"):
                    whens = [own.when / load / rate for own in asked]
                    began = time.perf_counter()
                    answers = server.generate_at([own.tokens for own in asked], whens)
                    seconds = time.perf_counter() - began
                row = {"order": order, "schedule": schedule, "load": load, "rate": round(rate, 3)}
                rows.append({**row, **_figures(asked, answers, seconds)})
            server.check_log()
        return rows

    def _server(self, name: str, *flags: str) -> contextlib.AbstractContextManager[Server]:
        ours = policy_flags(self._args.policy, self._pool.folder / name, 1.0, _TIERS)
        return self._pool.running(
            name,
            self._model,
            self._args.dtype,
            f"--max-total-tokens={self._slots}",
            f"--max-running-requests={self._args.running}",
            *ours,
            *flags,
        )


def _make_requests(
    args: argparse.Namespace, prefixes: list[list[int]], rng: np.random.Generator
) -> list[Asked]:
    whens = np.cumsum(rng.exponential(1.0, args.requests)).tolist()
    questions = random_tokens(rng, args.requests, QUESTION_TOKENS)
    unknown = iter(random_tokens(rng, args.requests, args.prefix_tokens))
    found = []
    for when, question in zip(whens, questions, strict=True):
        kind = KINDS[rng.integers(len(KINDS))]
        if kind == "unknown":
            prefix = next(unknown)
        elif kind == "resident":
            prefix = prefixes[rng.integers(args.resident)]
        else:
            prefix = prefixes[args.resident + rng.integers(args.prefixes)]
        found.append(Asked(kind, prefix + question, when))
    return found


def _figures(
    asked: Sequence[Asked], answers: Sequence[tuple[float, dict[str, object]]], seconds: float
) -> Row:
    ttft = [own * 1e3 for own, _ in answers]
    by_kind = {
        f"{kind}_ms": round(
            statistics.fmean(ms for ms, own in zip(ttft, asked, strict=True) if own.kind == kind), 1
        )
        for kind in KINDS
    }
    return {
        "requests": len(asked),
        "ttft_ms_mean": round(statistics.fmean(ttft), 1),
        "ttft_ms_p50": round(float(np.percentile(ttft, 50)), 1),
        "ttft_ms_p99": round(float(np.percentile(ttft, 99)), 1),
        **by_kind,
        "seconds": round(seconds, 1),
        "ttft_ms": [round(ms, 1) for ms in ttft],
        "paths": [answer["meta_info"]["impress"]["path"] for _, answer in answers],
    }


COLUMNS = (
    Column("order", "order"),
    Column("schedule", "schedule"),
    Column("load", "load", "{:.0%}"),
    Column("TTFT ms", "ttft_ms_mean", "{:,.0f}"),
    Column("ratio", "ttft_ms_mean_ratio", "{:.2f}"),
    Column("p50", "ttft_ms_p50", "{:,.0f}"),
    Column("p99", "ttft_ms_p99", "{:,.0f}"),
    Column("ratio", "ttft_ms_p99_ratio", "{:.2f}"),
    *(Column(kind, f"{kind}_ms", "{:,.0f}") for kind in KINDS),
    Column("seconds", "seconds_ratio", "{:.3f}"),
)
