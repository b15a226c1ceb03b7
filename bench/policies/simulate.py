"""Eviction, the queue and scheduling at the scale of papers: a simulated engine, without a model.

Each study is a table:

    paper     AttentionStore's Figure 21: hits of each policy with each size of the SSD
    depth     hits if at most so many requests wait in the engine and a gateway keeps the others
              back: of sessions with the first size, and of shared prefixes of which a quarter fits
    load      sessions that begin more or less often; at load 1 the engine would just serve them
    schedule  orders of the queue, with shared prefixes and some that nobody has had before, a
              16th of them on the device and an eighth in the host's memory

`window+BASE` is look-ahead with the paper's window, `queue+BASE` with the whole queue. `belady`
knows when everything is wanted again, and no policy has more hits if all items have one size.

The rates are those of LLaMA-13B on two A100: prefilling as AttentionStore tells it of LLaMA-65B on
four (2K tokens in 360 ms), by parameters and cards; a step of decoding as long as reading the
weights and 24 times 2,000 tokens at half of the memory's bandwidth; bus and SSD as told there. The
paper does not tell how long people think. *hits* are of the requests with a history; *again* are
tokens of histories that were computed once more; the first fifth of the requests is not measured.
TTFT includes waiting, *prefill* begins with the admission.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

from bench.core.charts import Bars, Lines
from bench.core.options import SEED, Option, one_of
from bench.core.report import Column, Result, Row, Table
from bench.core.session import BenchFailed, step
from bench.policies.eviction import BASES, Hierarchy, make_policy
from bench.policies.sessions import TALKS, Sessions, Shared, Workload
from bench.policies.simulation import ORDERS, Rates, Simulation, summarize

POLICIES = (
    *(name for name in BASES if name != "belady"),
    "window+lru",
    "queue+lru",
    "queue+score",
    "belady",
)
STUDIES = ("paper", "depth", "load", "schedule")
OPTIONS = (
    Option("studies", STUDIES, "what to simulate", parse=one_of(STUDIES)),
    Option("policies", POLICIES, "what the study `paper` compares", parse=one_of(POLICIES)),
    Option("talk", "sharegpt", "how sessions are", parse=one_of(TALKS)),
    Option("sessions", 9000, "how many", quick=900),
    Option("sessions-per-s", 1.0, "that begin"),
    Option("think-s", 60.0, "mean pause between an answer and the next turn"),
    Option("window-tokens", 4096, "of the model"),
    Option("device-gb", 0.0, "KVs that stay on the device"),
    Option("host-gb", 128.0, "memory for KVs", quick=12.8),
    Option("ssd-tb", (2.0, 10.0), "sizes of the SSD", parse=float, quick=(0.2, 1.0)),
    Option("kv-mb", 0.78, "KVs of a token"),
    Option("prefill-tokens-per-s", 14200.0, "of the engine"),
    Option("decode-ms", 30.0, "a step of all running requests"),
    Option("batch", 24, "requests that run at the same time"),
    Option("h2d-gbps", 26.0, "GB/s from host to device"),
    Option("ssd-gbps", 5.0, "GB/s from SSD to host"),
    Option("slow-ssd-gbps", 1.5, "of a second SSD in the study `schedule`"),
    Option("depths", (0, 4, 16, 64, 256, 1024), "requests that may wait, in the study `depth`"),
    Option("prefixes", 64, "that are shared"),
    Option("prefix-tokens", 2000, "of each"),
    Option("requests", 20000, "over shared prefixes", quick=2000),
    Option("zipf", 1.0, "exponent of the prefixes' popularity"),
    Option("sigma", None, "a normal popularity instead, in prefixes", parse=float),
    Option("unknown", 0.2, "share of requests with a prefix of their own, in `schedule`"),
    Option("loads", (0.5, 0.8, 0.95), "of what the engine serves, in `load` and `schedule`"),
    Option("no-fetch", False, "do not read ahead for waiting requests"),
    SEED,
)
WARM_UP = 0.2
# Arrivals per second that keep the queue full.
SATURATED = 1e6
# Of shared prefixes; a quarter of that into memory.
FITTING = 0.25
DEPTH_POLICIES = ("lru", "window+lru", "queue+lru", "score", "queue+score", "belady")
# Beside the loads that can be served.
OVERLOADS = (1.5, 3.0)


def run(args: argparse.Namespace) -> Result:
    """Run the studies."""
    laboratory = Laboratory(args)
    tables: list[Table] = []
    charts: list[Bars | Lines] = []
    figures: dict[str, Any] = {}
    for name in args.studies:
        with step(name):
            figures[name] = rows = RUN[name](args, laboratory)
        tables.append(_by_policy(rows) if name == "depth" else Table(_columns(rows), rows, name))
        charts += CHARTS[name](rows) if name in CHARTS else ()
    return Result(figures, tables, charts)


class Laboratory:
    """Runs simulations with the rates and sizes of the options."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.rates = Rates(
            args.prefill_tokens_per_s,
            args.decode_ms,
            args.batch,
            args.h2d_gbps,
            args.ssd_gbps,
            round(args.kv_mb * 1e6),
        )

    def with_ssd(self, gbps: float) -> Laboratory:
        """The same with another SSD."""
        return Laboratory(argparse.Namespace(**{**vars(self._args), "ssd_gbps": gbps}))

    def sessions(self, policy: str, ssd_tb: float, rate: float, depth: float = math.inf) -> Row:
        """Sessions over the caches of the options."""
        args = self._args
        talk = TALKS[args.talk]
        workload = Sessions(talk, args.sessions, rate, args.think_s, args.window_tokens, args.seed)
        sizes = {"device": args.device_gb * 1e9, "host": args.host_gb * 1e9, "ssd": ssd_tb * 1e12}
        return self._run(policy, sizes, workload, depth=depth)

    def shared(
        self,
        policy: str,
        sizes: dict[str, float],
        rate: float,
        unknown: float = 0.0,
        **how: Any,
    ) -> Row:
        """Requests over shared prefixes; sizes of caches in prefixes."""
        args = self._args
        workload = Shared(
            args.requests,
            args.prefixes,
            rate,
            zipf=None if args.sigma else args.zipf,
            sigma=args.sigma or 1.0,
            unknown=unknown,
            prefix_tokens=args.prefix_tokens,
            seed=args.seed,
        )
        size = args.prefix_tokens * self.rates.bytes_per_token
        return self._run(policy, {n: many * size for n, many in sizes.items()}, workload, **how)

    def _run(self, policy: str, sizes: dict[str, float], workload: Workload, **how: Any) -> Row:
        rule = make_policy(policy, sum(sizes.values()))
        hierarchy = Hierarchy(list(sizes.items()), rule)
        simulation = Simulation(
            self.rates, hierarchy, workload, fetch=not self._args.no_fetch, **how
        )
        served = simulation.run()
        if not served:
            raise BenchFailed("there is nothing to serve")
        found = summarize(simulation, served, round(WARM_UP * len(served)))
        return {"policy": policy, **found}


def compare_as_paper(args: argparse.Namespace, laboratory: Laboratory) -> list[Row]:
    """The study `paper`."""
    return [
        {"case": f"{ssd_tb:g} TB", **laboratory.sessions(name, ssd_tb, args.sessions_per_s)}
        for ssd_tb in args.ssd_tb
        for name in args.policies
    ]


def vary_depth(args: argparse.Namespace, laboratory: Laboratory) -> list[Row]:
    """The study `depth`."""
    sizes = {"host": FITTING / 4 * args.prefixes, "ssd": FITTING * 3 / 4 * args.prefixes}
    rows = []
    for depth in (*args.depths, math.inf):
        shown = f"{depth} waiting" if depth < math.inf else "all waiting"
        for name in DEPTH_POLICIES:
            own = laboratory.sessions(name, args.ssd_tb[0], args.sessions_per_s, depth)
            rows.append({"case": f"sessions, {shown}", **own})
        for name in DEPTH_POLICIES:
            own = laboratory.shared(name, sizes, SATURATED, depth=depth)
            rows.append({"case": f"prefixes, {shown}", **own})
    return sorted(rows, key=lambda row: str(row["case"]).startswith("prefixes"))


def vary_load(args: argparse.Namespace, laboratory: Laboratory) -> list[Row]:
    """The study `load`."""
    most = laboratory.sessions("queue+lru", args.ssd_tb[0], SATURATED)
    capacity = args.sessions / most["seconds"]
    return [
        {"case": f"load {load:g}", **laboratory.sessions(name, args.ssd_tb[0], load * capacity)}
        for load in (*args.loads, *OVERLOADS)
        for name in ("lru", "window+lru", "queue+lru", "belady")
    ]


def vary_order(args: argparse.Namespace, laboratory: Laboratory) -> list[Row]:
    """The study `schedule`."""
    sizes = {"device": args.prefixes / 16, "host": args.prefixes / 8, "ssd": 4.0 * args.prefixes}
    rows = []
    for gbps in dict.fromkeys((args.ssd_gbps, args.slow_ssd_gbps)):
        own = laboratory.with_ssd(gbps)
        most = own.shared("queue+score", sizes, SATURATED, args.unknown)
        capacity = args.requests / most["seconds"]
        for load in args.loads:
            for order in ORDERS:
                rate = load * capacity
                found = own.shared("queue+score", sizes, rate, args.unknown, order=order)
                rows.append({"case": f"{gbps:g} GB/s, load {load:g}, {order}", **found})
    return rows


RUN: dict[str, Callable[[argparse.Namespace, Laboratory], list[Row]]] = dict(
    zip(STUDIES, (compare_as_paper, vary_depth, vary_load, vary_order), strict=True)
)


def draw_hits(rows: Sequence[Row]) -> list[Bars | Lines]:
    """Bars for each size of the SSD."""
    return [
        Bars(
            f"simulated-hits-{case.replace(' ', '').lower()}",
            f"hits with an SSD of {case}, %",
            "hits, %",
            {row["policy"]: 100 * (row["hit_ratio"] or 0) for row in rows if row["case"] == case},
        )
        for case in dict.fromkeys(row["case"] for row in rows)
    ]


CHARTS = {"paper": draw_hits}


def _by_policy(rows: Sequence[Row]) -> Table:
    """Hits in a row for each case."""
    cases: dict[str, Row] = {}
    for row in rows:
        cases.setdefault(row["case"], {"case": row["case"]})[row["policy"]] = row["hit_ratio"]
    columns = [Column("case", "case")]
    columns += [Column(name, name, "{:.1%}") for name in DEPTH_POLICIES]
    return Table(columns, list(cases.values()), "depth")


def _columns(rows: Sequence[Row]) -> list[Column]:
    tiers = [tier for tier in ("device", "host", "ssd") if f"{tier}_hit_ratio" in rows[0]]
    return [
        Column("case", "case"),
        Column("policy", "policy"),
        Column("n", "requests"),
        Column("hits", "hit_ratio", "{:.1%}"),
        *(Column(tier, f"{tier}_hit_ratio", "{:.1%}") for tier in tiers),
        Column("of all", "hit_ratio_of_all", "{:.1%}"),
        Column("again", "computed_again", "{:.1%}"),
        Column("queue", "queue_mean", "{:,.0f}"),
        Column("TTFT s", "ttft_s_mean", "{:,.2f}"),
        Column("p50", "ttft_s_p50", "{:,.2f}"),
        Column("p99", "ttft_s_p99", "{:,.2f}"),
        Column("prefill ms", "prefill_ms_mean", "{:,.0f}"),
        Column("SSD GB", "ssd_read_gb", "{:,.0f}"),
        Column("written", "ssd_written_gb", "{:,.0f}"),
    ]
