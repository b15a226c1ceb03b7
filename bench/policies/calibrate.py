"""The simulated engine against a real server: one trace, hits of the pool and TTFT.

A server with the policy `as` keeps some of the shared prefixes in its pool, by LRU, and all of them
on an emulated SSD; it runs one request at a time. The trace is cut into rounds. In the first half
of each, requests wait for one another, which tells the rates of the server. In the second half they
come as a Poisson process, and queue. The same arrivals are then simulated with those rates.
Prefixes and questions are random tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bench.core.data import kv_bytes_per_token, model_folder
from bench.core.options import DTYPE, KEEP, MODEL, SEED, Option
from bench.core.report import Result, Row, Table, plain
from bench.core.servers import Server, servers
from bench.core.session import step
from bench.policies.compared import Tiers, policy_flags
from bench.policies.eviction import Hierarchy, make_policy
from bench.policies.sessions import Item, Request, zipf_weights
from bench.policies.simulation import Rates, Simulation
from bench.policies.trace import random_tokens

OPTIONS = (
    Option("prefixes", 12, "that are shared", quick=6),
    Option("prefix-tokens", 512, "of each"),
    Option("resident", 4, "prefixes that the pool has room for", quick=2),
    Option("requests", 120, "in both halves of all rounds", quick=24),
    Option("zipf", 0.8, "exponent of the prefixes' popularity"),
    Option("rounds", 6, "in which both halves take turns", quick=2),
    Option("load", 0.7, "of what the server can serve, in the second half"),
    Option("ssd-mbps", 30.0, "bandwidth of the emulated SSD in MB/s"),
    MODEL,
    DTYPE,
    SEED,
    KEEP,
)
Asked = tuple[int, list[int]]
"""A prefix by its number, and all tokens of a request."""
ALONE, QUEUED = "one by one", "as they come"
QUESTION_TOKENS = 16
# Between requests that wait for one another.
_PAUSE_SECONDS = 1000.0
# What is read ahead for a queued request would have no tier to stay in.
_TIERS = Tiers(0, 0, readahead=0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """A request: its half, its prefix, arrival and TTFT in seconds, and where it came from."""

    half: str
    prefix: int
    arrival: float
    seconds: float
    source: str


@dataclasses.dataclass(frozen=True, slots=True)
class Replayed:
    """A workload of requests that were seen; see `sessions.Workload`."""

    seen: Sequence[Seen]
    items: Sequence[Item]
    prefix_tokens: int

    def first(self) -> Iterator[Request]:
        """All of them."""
        kept = self.prefix_tokens + QUESTION_TOKENS
        for own in self.seen:
            item = self.items[own.prefix]
            yield Request(item, own.arrival, self.prefix_tokens, QUESTION_TOKENS, 1, kept)

    def after(self, request: Request, now: float) -> Request | None:
        """Nothing."""
        return None


def run(args: argparse.Namespace) -> Result:
    """Measure, then simulate."""
    model = model_folder(args.model)
    rng = np.random.default_rng(args.seed)
    prefixes = random_tokens(rng, args.prefixes, args.prefix_tokens)
    weights = zipf_weights(args.prefixes, args.zipf)
    drawn = rng.choice(args.prefixes, args.requests, p=weights / weights.sum()).tolist()
    questions = random_tokens(rng, args.requests, QUESTION_TOKENS)
    asked = [(number, prefixes[number] + own) for number, own in zip(drawn, questions, strict=True)]
    # Beside the prefixes, for the last questions about them.
    slots = args.resident * (args.prefix_tokens + QUESTION_TOKENS) + args.prefix_tokens // 2
    with servers(args) as pool:
        flags = policy_flags("as", pool.folder / "store", 1.0, _TIERS)
        room = (f"--max-total-tokens={slots}", "--max-running-requests=1")
        with pool.running("calibrate", model, args.dtype, *room, *flags) as server:
            with step("computing the prefixes"):
                computed = [_compute(server, tokens) for tokens in prefixes]
            server.emulate_ssd(args.ssd_mbps)
            with step("warming up"):
                seen = _one_by_one(server, list(enumerate(prefixes)), "warm-up", 0.0)
            for part in np.array_split(np.arange(len(asked)), args.rounds):
                own = [asked[number] for number in part]
                seen += _round(server, own, args.load, seen[-1].arrival, rng)
            server.check_log()
    alone = [own for own in seen if own.half == ALONE]
    token_bytes = kv_bytes_per_token(model, args.dtype)
    rates = fit(statistics.median(computed), alone, args.prefix_tokens, token_bytes)
    found = replay(rates, seen, args.prefixes, args.prefix_tokens, slots)
    rows = [_row(half, seen, found) for half in (ALONE, QUEUED)]
    figures = {
        "rates": dataclasses.asdict(rates),
        "halves": rows,
        "requests": [
            {
                **dataclasses.asdict(own),
                "simulated_seconds": other.seconds,
                "simulated_source": other.source,
            }
            for own, other in zip(seen, found, strict=True)
        ],
    }
    return Result(figures, [Table(plain(*rows[0]), rows)])


def fit(computed: float, alone: Sequence[Seen], prefix_tokens: int, token_bytes: int) -> Rates:
    """Rates from the seconds of a request that computes a prefix, and of those that did not queue.

    A resident prefix leaves the overhead, the question included.
    """
    resident, loaded = (
        statistics.fmean(own.seconds for own in alone if own.source == source)
        for source in ("device", "ssd")
    )
    prefill = prefix_tokens / (computed - resident)
    return Rates(
        prefill_tokens_per_s=prefill,
        decode_ms=1.0,
        batch=1,
        # What is not on the device has to be read, which takes much longer.
        h2d_gbps=1e3,
        ssd_gbps=prefix_tokens * token_bytes / loaded / 1e9,
        bytes_per_token=token_bytes,
        overhead_ms=(resident - QUESTION_TOKENS / prefill) * 1e3,
    )


def replay(
    rates: Rates, seen: Sequence[Seen], prefixes: int, prefix_tokens: int, slots: int
) -> list[Seen]:
    """What a simulated engine makes of the same arrivals, with all prefixes on SSD before."""
    room = [("device", float(slots * rates.bytes_per_token)), ("ssd", float("inf"))]
    hierarchy = Hierarchy(room, make_policy("lru", 0.0))
    items = [Item(number) for number in range(prefixes)]
    for item in items:
        hierarchy.put(item, prefix_tokens * rates.bytes_per_token, 1, 0.0)
    served = Simulation(rates, hierarchy, Replayed(seen, items, prefix_tokens)).run()
    # Requests are served in the order in which they came.
    return [
        dataclasses.replace(before, seconds=own.first_token - own.arrival, source=str(own.source))
        for before, own in zip(seen, served, strict=True)
    ]


def _compute(server: Server, tokens: Sequence[int]) -> float:
    (seconds, _), *_ = server.generate_at([tokens], [0.0])
    # It is written before the pool is emptied.
    server.flush()
    return seconds


def _round(
    server: Server, asked: Sequence[Asked], load: float, after: float, rng: np.random.Generator
) -> list[Seen]:
    """Both halves; the second one comes as fast as the first one allows."""
    half = len(asked) // 2
    with step(ALONE):
        alone = _one_by_one(server, asked[:half], ALONE, after)
    mean = statistics.fmean(own.seconds for own in alone)
    arrivals = np.cumsum(rng.exponential(mean / load, len(asked) - half)).tolist()
    with step(QUEUED):
        return alone + _queueing(server, asked[half:], arrivals, alone[-1].arrival)


def _one_by_one(server: Server, asked: Sequence[Asked], half: str, after: float) -> list[Seen]:
    arrivals = [_PAUSE_SECONDS * place for place in range(1, len(asked) + 1)]
    answers = [server.generate_at([tokens], [0.0])[0] for _, tokens in asked]
    return _seen(half, asked, arrivals, answers, after)


def _queueing(
    server: Server, asked: Sequence[Asked], arrivals: Sequence[float], after: float
) -> list[Seen]:
    """Ask at these times, in seconds from now."""
    answers = server.generate_at([tokens for _, tokens in asked], arrivals)
    return _seen(QUEUED, asked, arrivals, answers, after + _PAUSE_SECONDS)


def _seen(
    half: str,
    asked: Sequence[Asked],
    arrivals: Sequence[float],
    answers: Sequence[tuple[float, dict[str, Any]]],
    after: float,
) -> list[Seen]:
    return [
        Seen(half, prefix, after + arrival, seconds, answer["meta_info"]["impress"]["path"])
        for (prefix, _), arrival, (seconds, answer) in zip(asked, arrivals, answers, strict=True)
    ]


def _row(half: str, measured: Sequence[Seen], simulated: Sequence[Seen]) -> Row:
    sides = [[own for own in side if own.half == half] for side in (measured, simulated)]
    hits = [statistics.fmean(own.source == "device" for own in side) for side in sides]
    seconds = [statistics.fmean(own.seconds for own in side) for side in sides]
    return {
        "half": half,
        "requests": len(sides[0]),
        "hits_measured": round(hits[0], 4),
        "hits_simulated": round(hits[1], 4),
        "ttft_ms_measured": round(seconds[0] * 1e3, 1),
        "ttft_ms_simulated": round(seconds[1] * 1e3, 1),
        "error": round(seconds[1] / seconds[0] - 1, 4),
    }
