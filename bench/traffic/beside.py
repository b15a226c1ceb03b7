"""What a request's load of a stored prefix costs those who run beside it, and itself.

The demo's model, caches of 0 GB, and a device pool with room for all. One client streams a long
answer while another one asks for a prefix of --prefix-tokens random tokens, or for the same where
it is in the pool and nothing is loaded: the stream's longest, second and median gap in ms and
tokens that came meanwhile, TTFT of the other one and MB it read; medians of --repeats.

Many clients at once and chats are in `python -m bench trace`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.core.data import model_folder
from bench.core.options import DTYPE, KEEP, MODEL, SEED, SERVER_FLAG, Option
from bench.core.report import Result, Row, Table, plain
from bench.core.servers import Server, servers, store_flags
from bench.core.session import step
from bench.traffic.clients import Stream, gaps_of, tokens_between

NOT_STORED: dict[str, Any] = {"impress_store": False}
EXACT: dict[str, Any] = {"impress_bits": "exact", **NOT_STORED}
SIZES = ("--max-total-tokens=20000", "--chunked-prefill-size=512")
SHORT_TOKENS = 40
QUESTION_TOKENS = 8
# Of a stream before the other request comes.
BEFORE_TOKENS = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Beside:
    """What somebody asks for beside a stream: a stored prefix or a new one, or nothing at all.

    `resident`: the prefix is in the pool already, so that nothing is loaded.
    """

    name: str
    stored: bool | None = True
    resident: bool = False
    mbps: float = 0.0
    custom: Mapping[str, Any] = dataclasses.field(default_factory=lambda: NOT_STORED)


GAPS = (
    Beside("nothing", stored=None),
    Beside("computed", stored=False),
    Beside("resident", resident=True),
    Beside("default bits"),
    Beside("default bits, 20 MB/s", mbps=20),
    Beside("exact, 80 MB/s", mbps=80, custom=EXACT),
)
SHOWN = (
    *("beside", "longest_ms", "second_ms", "median_ms", "tokens_meanwhile", "ttft_ms"),
    *("read_mb", "cached_tokens"),
)
OPTIONS = (
    Option("prefix-tokens", 3000, "of a random prefix", quick=1000),
    Option("answer-tokens", 150, "of a stream", quick=60),
    Option("repeats", 3, "of each gap", quick=1),
    SERVER_FLAG,
    MODEL,
    DTYPE,
    SEED,
    KEEP,
)


def run(args: argparse.Namespace) -> Result:
    """Measure it."""
    model = model_folder(args.model)
    with servers(args) as pool:
        flags = [*SIZES, *store_flags(pool.folder / "kv"), *args.server_flag]
        with pool.running("beside", model, args.dtype, *flags) as server:
            work = Work(args, server)
            with step("storing and warming up"):
                work.prepare()
            with step("gaps"):
                rows = work.gaps()
            server.check_log()
    return Result({"model": model.name, "gaps": rows}, [Table(plain(*SHOWN), rows)])


class Work:
    """A server that has a prefix in its store."""

    def __init__(self, args: argparse.Namespace, server: Server) -> None:
        self._args, self._server = args, server
        self._chance = random.Random(f"{args.seed} beside")
        self._prefix = self._fresh(args.prefix_tokens)
        self._short = self._fresh(SHORT_TOKENS)

    def prepare(self) -> None:
        """Store the prefix, and take each way once: first requests take longer."""
        self._server.store(self._question(self._prefix))
        for custom in (NOT_STORED, EXACT):
            self._server.generate(self._question(self._prefix), custom=custom)
            self._server.flush()

    def gaps(self) -> list[Row]:
        """Of a stream, beside each kind of request."""
        found: dict[str, list[Row]] = {beside.name: [] for beside in GAPS}
        for _ in range(self._args.repeats):
            for beside in GAPS:
                found[beside.name].append(self._gap(beside))
        return [{"beside": own, **medians(rows), "repeats": rows} for own, rows in found.items()]

    def _gap(self, beside: Beside) -> Row:
        """A stream with a request beside it."""
        row: Row = {}
        with self._drive(beside.mbps):
            before = self._read_bytes()
            if beside.resident:
                self._server.generate(self._question(self._prefix), custom=NOT_STORED)
            stream = Stream(self._server, self._short, self._args.answer_tokens, NOT_STORED)
            stream.wait(BEFORE_TOKENS)
            if beside.stored is not None:
                prefix = self._prefix if beside.stored else self._fresh(self._args.prefix_tokens)
                began = time.perf_counter()
                answer = self._server.generate(self._question(prefix), custom=beside.custom)
                ended = time.perf_counter()
                cached = answer["meta_info"]["cached_tokens"]
                row |= {"ttft_ms": (ended - began) * 1e3, "cached_tokens": cached}
            came, read = stream.join(), self._read_bytes() - before
        if beside.stored is not None:
            row["tokens_meanwhile"] = tokens_between(came, began, ended)
            row["read_mb"] = read / 1e6
        return rounded(row | describe_gaps(gaps_of(came)))

    def _read_bytes(self) -> int:
        """Of requests that have ended."""
        return int(self._server.stats()["totals"]["ssd_bytes"])

    def _fresh(self, count: int) -> list[int]:
        """Ids of ordinary words of the demo's model that nobody has seen together."""
        return self._chance.choices(range(100, 40000), k=count)

    def _question(self, prefix: Sequence[int]) -> list[int]:
        return [*prefix, *self._fresh(QUESTION_TOKENS)]

    @contextlib.contextmanager
    def _drive(self, mbps: float) -> Iterator[None]:
        """An empty pool and a drive of that rate; both are put right afterwards."""
        self._server.flush()
        self._server.emulate_ssd(mbps)
        try:
            yield
        finally:
            self._server.emulate_ssd(0)
            self._server.flush()


def describe_gaps(gaps: Sequence[float]) -> Row:
    """In milliseconds: the longest, the second and the median one."""
    *_, second, longest = ordered = sorted(gaps)
    named = {"longest_ms": longest, "second_ms": second, "median_ms": ordered[len(ordered) // 2]}
    return {name: gap * 1e3 for name, gap in named.items()}


def medians(rows: Sequence[Row]) -> Row:
    """Of each figure that the rows have."""
    return rounded({name: statistics.median(row[name] for row in rows) for name in rows[0]})


def rounded(row: Row) -> Row:
    """Figures with one digit."""
    return {name: round(value, 1) for name, value in row.items()}
