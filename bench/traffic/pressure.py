"""Random traffic on a device pool that is too small for the prefixes which it asks for.

Two prefixes are stored, of 3,020 and 2,500 tokens. Then --clients ask for them at the same time,
half of the requests for a whole one and the others for one that is cut at some place, with 5 to 60
new tokens behind it and up to 11 to generate. A fifth wants exact KVs, and a fifth is aborted some
time within two seconds. The pool has room for --pools times the longer prefix, and SGLang checks
its accounting after each pass. Each pool and seed has a server of its own, with the same stored
prefixes. Whether answers are right under pressure is what `tests/serving/test_random.py` asks.

  seconds    until all were answered
  finished, aborted, failed    requests; failed ones were not asked to end as they did
  unasked    requests that were not made, since one before had no answer in --request-seconds, or
             the server had ended: see the state
  slowest    seconds of the slowest request that was finished
  MB, drive  read by finished requests, and by the server's processes for whomever
  loads      finished requests with a stored prefix that was not in the pool
  machine    its load average before the server was started
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import shutil
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import requests

from bench.core.data import model_folder
from bench.core.options import DTYPE, KEEP, MODEL, SEED, SERVER_FLAG, Option
from bench.core.report import Column, Result, Row, Table, plain
from bench.core.servers import Server, body_of, link_store, servers, store_flags
from bench.core.session import BenchFailed, step
from bench.traffic.clients import QUESTIONS, Counts, Handbook, draw

PREFIX_TOKENS = (3020, 2500)
SHORTEST_CUT = 600
OFTEN_CUT = 2400
EXACT = {"impress_bits": "exact"}
EXACT_SHARE = 0.2
ABORT_SHARE = 0.2
ABORT_SECONDS = 2.0
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2"}
OPTIONS = (
    Option("seeds", 10, "number of seeds, from --seed on", quick=1),
    Option("pools", (1.2, 1.5, 2.0, 4.0), "room for so many of the longer prefix", quick=(1.5,)),
    Option("requests", 60, "for each seed", quick=10),
    Option("clients", 6, "requests under way"),
    Option("ssd-mbps", 150.0, "bandwidth of the emulated SSD in MB/s; 0: the real one"),
    Option("request-seconds", 120.0, "after which a request without an answer is a hang"),
    Option("run-seconds", 300.0, "after which no request is waited for"),
    SERVER_FLAG,
    MODEL,
    DTYPE,
    SEED,
    KEEP,
)


class Asked(NamedTuple):
    """A request, and after how many seconds it is aborted, if it is."""

    name: str
    tokens: tuple[int, ...]
    new_tokens: int
    exact: bool
    abort_after: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """How a request ended: `outcome` is finished, aborted, failed, hung, died or unasked."""

    outcome: str
    seconds: float = 0.0
    told: str = ""


def make_traffic(prefixes: Sequence[Sequence[int]], count: int, seed: int) -> list[Asked]:
    """Requests in their order; equal arguments give equal ones."""
    chance, made = random.Random(f"{seed} pressure"), []
    for number in range(count):
        prefix = chance.choice(prefixes)
        whole = len(prefix)
        cut = chance.choice((whole, whole, OFTEN_CUT, chance.randrange(SHORTEST_CUT, whole)))
        tokens = (*prefix[:cut], *draw(chance, chance.randrange(5, 60)))
        new_tokens, exact = chance.randrange(1, 12), chance.random() < EXACT_SHARE
        after = chance.random() * ABORT_SECONDS if chance.random() < ABORT_SHARE else None
        made.append(Asked(f"{seed}-{number}", tokens, new_tokens, exact, after))
    return made


def run(args: argparse.Namespace) -> Result:
    """Measure all pools and seeds."""
    model = model_folder(args.model)
    handbook = Handbook(model).ask(QUESTIONS[0])[: PREFIX_TOKENS[0]]
    prefixes = [handbook, draw(random.Random(5), PREFIX_TOKENS[1])]
    rows: list[Row] = []
    with servers(args) as pool:
        prepared = pool.folder / "prepared"

        def running(name: str, store: Path, tokens: int) -> Any:
            sizes = f"--max-total-tokens={tokens}", "--chunked-prefill-size=512"
            flags = *sizes, *store_flags(store), *args.server_flag
            return pool.running(name, model, args.dtype, *flags, environment=STRICT)

        with step("prefixes"), running("prepare", prepared, 3 * PREFIX_TOKENS[0]) as server:
            for prefix in prefixes:
                server.store(prefix)
            server.check_log()
            server.stop()
        for room in args.pools:
            for seed in range(args.seed, args.seed + args.seeds):
                name, traffic = (
                    f"pool-{room:g}-seed-{seed}",
                    make_traffic(prefixes, args.requests, seed),
                )
                store = pool.folder / f"store-{name}"
                link_store(prepared, store)
                # What else the machine does decides how far seconds can be compared.
                load = round(os.getloadavg()[0], 1)
                with running(name, store, round(room * PREFIX_TOKENS[0])) as server, step(name):
                    row = measure(args, server, traffic)
                rows.append({"pool": room, "seed": seed, "machine_load": load, **row})
                shutil.rmtree(store)
    lengths = [len(prefix) for prefix in prefixes]
    figures = {"model": model.name, "prefix_tokens": lengths, "runs": rows}
    summaries = summarize(rows)
    tables = [Table(COLUMNS, rows), Table(plain(*summaries[0]), summaries)]
    return Result({**figures, "summary": summaries}, tables, notes=warnings(rows))


COLUMNS = (
    *plain("pool", "seed"),
    Column("seconds", "seconds", "{:.1f}"),
    *plain("finished", "aborted", "failed", "unasked"),
    Column("slowest", "slowest_s", "{:.1f}"),
    Column("MB", lambda row: row["read_bytes"] and row["read_bytes"] / 1e6, "{:,.0f}"),
    Column("drive", lambda row: row["drive_bytes"] and row["drive_bytes"] / 1e6, "{:,.0f}"),
    Column("loads", "loads", "{:.0f}"),
    Column("machine", "machine_load"),
    Column("state", "state"),
)


def summarize(rows: Sequence[Row]) -> list[Row]:
    """What all seeds of a pool have in common."""
    found = []
    for pool in dict.fromkeys(row["pool"] for row in rows):
        own = [row for row in rows if row["pool"] == pool]
        seconds = [row["seconds"] for row in own if row["state"] == "ok"]
        found.append(
            {
                "pool": pool,
                "seeds": len(own),
                "ok": len(seconds),
                "median_s": round(statistics.median(seconds), 1) if seconds else None,
                "worst_s": max(seconds, default=None),
                "failed": sum(row["failed"] for row in own),
            }
        )
    return found


def warnings(rows: Sequence[Row]) -> list[str]:
    """What went wrong."""
    return [
        f"warning: pool {row['pool']}, seed {row['seed']}: {row['state']}\n{row['told']}"
        for row in rows
        if row["state"] != "ok" or row["failed"]
    ]


def measure(args: argparse.Namespace, server: Server, traffic: Sequence[Asked]) -> Row:
    """The row of a run; whatever happens to the server is part of it."""
    # Compiled loops are loaded and buffers are made, but none of the prefixes is in the pool.
    server.generate(draw(random.Random(0), 400), 2)
    server.flush()
    server.emulate_ssd(args.ssd_mbps)
    counts = Counts(server)
    ended, seconds = Clients(args, server).ask_all(traffic)
    row = describe(ended) | {"seconds": round(seconds, 1)}
    row |= dict.fromkeys(("read_bytes", "drive_bytes", "loads"))
    try:
        if row["state"] == "ok":
            row |= counts.since()
        server.check_log()
        if row["state"] == "ok":
            server.stop()
    except BenchFailed as error:
        row["state"] = row["state"] if row["state"] != "ok" else "trouble"
        row["told"] = f"{row['told']}\n{error}"
    return row


def describe(ended: Sequence[Ended]) -> Row:
    """How many ended in which way, and how the server is."""
    count = Counter(own.outcome for own in ended)
    times = [own.seconds for own in ended if own.outcome == "finished"]
    return {
        **{name: count[name] for name in ("finished", "aborted", "failed", "unasked")},
        "slowest_s": round(max(times, default=0.0), 1),
        "mean_s": round(statistics.mean(times), 2) if times else None,
        "state": next((name for name in ("died", "hung") if count[name]), "ok"),
        "told": "\n".join(dict.fromkeys(own.told for own in ended if own.told)),
    }


class Clients:
    """Clients of a server which do not wait for ever."""

    def __init__(self, args: argparse.Namespace, server: Server) -> None:
        self._args = args
        self._server = server
        self._over = threading.Event()
        self._deadline = time.monotonic() + args.run_seconds

    def ask_all(self, traffic: Sequence[Asked]) -> tuple[list[Ended], float]:
        """How each request ended, and seconds until the last one did."""
        began = time.perf_counter()
        with ThreadPoolExecutor(self._args.clients) as pool:
            ended = list(pool.map(self._ask, traffic))
        return ended, time.perf_counter() - began

    def _ask(self, asked: Asked) -> Ended:
        if self._over.is_set():
            return Ended("unasked")
        left = max(1.0, self._deadline - time.monotonic())
        began = time.perf_counter()
        timer = threading.Timer(asked.abort_after or 0.0, self._abort, [asked.name])
        try:
            if asked.abort_after is not None:
                timer.start()
            answer = self._post(asked, min(self._args.request_seconds, left))
        except BenchFailed as error:
            return self._failed(asked, error, time.perf_counter() - began)
        finally:
            timer.cancel()
            if asked.abort_after is not None:
                timer.join()
        seconds = time.perf_counter() - began
        reason = answer["meta_info"]["finish_reason"] or {}
        if reason.get("type") == "length":
            return Ended("finished", seconds)
        if reason.get("type") == "abort" and asked.abort_after is not None:
            return Ended("aborted", seconds)
        return Ended("failed", seconds, told=f"{asked.name}: {reason}"[:500])

    def _failed(self, asked: Asked, error: BenchFailed, seconds: float) -> Ended:
        """By what went wrong: no answer, no server, or a refusal."""
        cause = error.__cause__
        outcomes = {requests.Timeout: "hung", requests.ConnectionError: "died"}
        outcome = next((own for kind, own in outcomes.items() if isinstance(cause, kind)), "failed")
        if outcome != "failed":
            self._over.set()
        return Ended(outcome, seconds, told=f"{asked.name}, {seconds:.0f} s: {cause!r}"[:500])

    def _post(self, asked: Asked, timeout: float) -> dict[str, Any]:
        body = body_of(asked.tokens, asked.new_tokens, EXACT if asked.exact else None)
        body["rid"] = asked.name
        response = self._server.request("POST", "/generate", json=body, timeout=timeout)
        answer: dict[str, Any] = response.json()
        return answer

    def _abort(self, name: str) -> None:
        # The request may have ended, and so may the server: what it says is the result.
        with contextlib.suppress(BenchFailed):
            self._server.request("POST", "/abort_request", json={"rid": name}, timeout=30)
