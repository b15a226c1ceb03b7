"""Orders of the queue in real servers: requests come as a Poisson process, at shares of capacity.

A third of the requests, each, finds its prefix in the pool, in the store, or nowhere. Capacity is
what the first server does while many clients keep it busy. Of each policy of SGLang there is a
server for each `--impress-schedule`; they are up together and take turns, in rounds of the same
requests at the same times. Prefixes and questions are random tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np

from bench.core.data import model_folder
from bench.core.options import DTYPE, KEEP, MODEL, SEED, Option, one_of
from bench.core.report import Column, Result, Row, Table
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
    Option("requests", 180, "at each load", quick=24),
    Option("rounds", 6, "in which servers take turns", quick=1),
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
WARMUP = 60
# Of each round; what machines do in some of them does not count.
ROUND_FIGURES = ("mean", "longest", "seconds")
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
    with servers(args) as pool:
        bench = _Bench(args, pool, prefixes)
        bench.prepare()
        rows = [row for order in args.orders for row in bench.measure(order, rng)]
    for row in rows:
        first = next(
            own for own in rows if (own["order"], own["load"]) == (row["order"], row["load"])
        )
        for name in ROUND_FIGURES:
            pairs = zip(row["rounds"], first["rounds"], strict=True)
            row[f"{name}_ratio"] = statistics.median(
                own[name] / other[name] for own, other in pairs
            )
    caption = (
        f"SSD: emulated, {args.ssd_mbps:g} MB/s; ratios: to the first of the same load, median of "
        f"{args.rounds} rounds"
    )
    return Result({"requests_per_s": bench.rate, "orders": rows}, [Table(COLUMNS, rows, caption)])


class _Bench:
    """A store with all prefixes, and servers that take turns."""

    def __init__(self, args: argparse.Namespace, pool: Servers, prefixes: list[list[int]]) -> None:
        self.rate = 0.0
        """Requests that the first server does in a second."""
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

    def measure(self, order: str, rng: np.random.Generator) -> list[Row]:
        """A row for each load and schedule."""
        args = self._args
        with contextlib.ExitStack() as stack:
            started = {
                schedule: stack.enter_context(self._scheduled(order, schedule))
                for schedule in args.schedules
            }
            warmup = _make_requests(args, WARMUP, self._prefixes, rng)
            for schedule, server in started.items():
                with step(f"{order}, {schedule}: warming up"):
                    began = time.perf_counter()
                    server.first_token_ms([own.tokens for own in warmup], CLIENTS)
                    self.rate = self.rate or WARMUP / (time.perf_counter() - began)
            rows = []
            for load in args.loads:
                found: dict[str, list[_Answered]] = {schedule: [] for schedule in started}
                for _ in range(args.rounds):
                    count = args.requests // args.rounds
                    asked = _make_requests(args, count, self._prefixes, rng)
                    for schedule, server in started.items():
                        with step(f"{order}, {schedule}: load {load:g}"):
                            found[schedule].append(_ask(server, asked, load * self.rate))
                for schedule, answered in found.items():
                    row = {"order": order, "schedule": schedule, "load": load}
                    rows.append(row | _figures(answered))
            for server in started.values():
                server.check_log()
        return rows

    @contextlib.contextmanager
    def _scheduled(self, order: str, schedule: str) -> Iterator[Server]:
        name = f"{order}-{schedule}"
        link_store(self._pool.folder / "prepared", self._pool.folder / name)
        # As by default, what is asked for once is not written.
        flags = (
            f"--schedule-policy={order}",
            f"--impress-schedule={schedule}",
            "--impress-write-after=2",
        )
        with self._server(name, *flags) as server:
            server.emulate_ssd(self._args.ssd_mbps)
            yield server

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


@dataclasses.dataclass(frozen=True, slots=True)
class _Answered:
    """Requests, milliseconds until each answer, where its prefix was, and seconds of all."""

    asked: Sequence[Asked]
    ttft_ms: list[float]
    paths: list[str]
    seconds: float


def _ask(server: Server, asked: Sequence[Asked], rate: float) -> _Answered:
    began = time.perf_counter()
    whens = [own.when / rate for own in asked]
    answers = server.generate_at([own.tokens for own in asked], whens)
    seconds = time.perf_counter() - began
    paths = [answer["meta_info"]["impress"]["path"] for _, answer in answers]
    return _Answered(asked, [round(own * 1e3, 1) for own, _ in answers], paths, seconds)


def _make_requests(
    args: argparse.Namespace, count: int, prefixes: list[list[int]], rng: np.random.Generator
) -> list[Asked]:
    whens = np.cumsum(rng.exponential(1.0, count)).tolist()
    questions = random_tokens(rng, count, QUESTION_TOKENS)
    unknown = iter(random_tokens(rng, count, args.prefix_tokens))
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


def _figures(answered: Sequence[_Answered]) -> Row:
    ttft = [ms for own in answered for ms in own.ttft_ms]
    kinds = [own.kind for part in answered for own in part.asked]
    by_kind = {
        kind: [ms for ms, own in zip(ttft, kinds, strict=True) if own == kind] for kind in KINDS
    }
    return {
        "requests": len(ttft),
        "ttft_ms_mean": round(statistics.fmean(ttft), 1),
        "ttft_ms_p50": round(float(np.percentile(ttft, 50)), 1),
        "ttft_ms_p99": round(float(np.percentile(ttft, 99)), 1),
        **{f"{kind}_ms": round(statistics.fmean(own), 1) for kind, own in by_kind.items()},
        "rounds": [
            {
                "mean": round(statistics.fmean(own.ttft_ms), 1),
                "longest": max(own.ttft_ms),
                "seconds": round(own.seconds, 2),
            }
            for own in answered
        ],
        "ttft_ms": ttft,
        "kinds": kinds,
        "paths": [path for own in answered for path in own.paths],
    }


COLUMNS = (
    Column("order", "order"),
    Column("schedule", "schedule"),
    Column("load", "load", "{:.0%}"),
    Column("TTFT ms", "ttft_ms_mean", "{:,.0f}"),
    Column("ratio", "mean_ratio", "{:.2f}"),
    Column("p50", "ttft_ms_p50", "{:,.0f}"),
    Column("p99", "ttft_ms_p99", "{:,.0f}"),
    Column("longest, ratio", "longest_ratio", "{:.2f}"),
    *(Column(kind, f"{kind}_ms", "{:,.0f}") for kind in KINDS),
    Column("seconds, ratio", "seconds_ratio", "{:.3f}"),
)
