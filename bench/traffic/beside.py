"""What a request's load of a stored prefix costs those who run beside it, and itself.

The demo's model, caches of 0 GB, and a device pool with room for all. One client streams a long
answer while another one asks for a prefix of --prefix-tokens random tokens, or for the same where
it is in the pool and nothing is loaded: the stream's longest and median gap in ms, TTFT of the
other one and MB it read; medians of --repeats.

Many clients at once and chats are in `python -m bench trace`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.core.data import model_folder
from bench.core.options import DTYPE, KEEP, MODEL, SEED, SERVER_FLAG, Option
from bench.core.report import Result, Row, Table
from bench.core.servers import Server, Stream, gaps_of, servers, store_flags
from bench.core.session import step

NOT_STORED: dict[str, Any] = {"impress_store": False}
EXACT: dict[str, Any] = {"impress_bits": "exact", **NOT_STORED}
SIZES = ("--max-total-tokens=20000", "--chunked-prefill-size=512")
SHORT_TOKENS = 40
QUESTION_TOKENS = 8
# Of a stream before the other request comes.
BEFORE_TOKENS = 20


class Beside(NamedTuple):
    """What somebody asks for beside a stream: a stored prefix or a new one, or nothing at all.

    `resident`: the prefix is in the pool already, so that nothing is loaded.
    """

    name: str
    stored: bool | None = True
    resident: bool = False
    mbps: float = 0.0
    custom: Mapping[str, Any] = NOT_STORED


GAPS = (
    Beside("nothing", stored=None),
    Beside("computed", stored=False),
    Beside("resident", resident=True),
    Beside("default bits"),
    Beside("default bits, 20 MB/s", mbps=20),
    Beside("exact, 80 MB/s", mbps=80, custom=EXACT),
)
OPTIONS = (
    Option("prefix-tokens", 3000, "of a random prefix", quick=1000),
    Option("answer-tokens", 150, "of a stream", quick=60),
    Option("repeats", 3, "of each gap", quick=1),
    *(SERVER_FLAG, MODEL, DTYPE, SEED, KEEP),
)


def run(args: argparse.Namespace) -> Result:
    """Measure it."""
    model = model_folder(args.model)
    with servers(args) as pool:
        flags = [*SIZES, *store_flags(pool.folder / "kv"), *args.server_flag]
        with pool.running("beside", model, args.dtype, *flags) as server:
            work = Work(args, server)
            with step("gaps"):
                found = [[work.gap(gap) for gap in GAPS] for _ in range(args.repeats)]
            server.check_log()
    rows = []
    for gap, repeats in zip(GAPS, zip(*found, strict=True), strict=True):
        medians = {key: statistics.median(one[key] for one in repeats) for key in repeats[0]}
        rows.append({"beside": gap.name, **medians, "repeats": list(repeats)})
    return Result({"model": model.name, "gaps": rows}, [Table(rows)])


class Work:
    """A server that has a prefix in its store, and has served each way once, as the first requests
    take longer."""

    def __init__(self, args: argparse.Namespace, server: Server) -> None:
        self._args, self._server = args, server
        self._chance = random.Random(f"{args.seed} beside")
        self._prefix = self._fresh(args.prefix_tokens)
        self._short = self._fresh(SHORT_TOKENS)
        server.store(self._question(self._prefix))
        for custom in (NOT_STORED, EXACT):
            server.generate(self._question(self._prefix), custom=custom)
            server.flush()

    def gap(self, beside: Beside) -> Row:
        """The figures of a stream with a request beside it; the pool is empty before and after."""
        server, row = self._server, Row()
        before = self._read_bytes()
        server.emulate_ssd(beside.mbps)
        if beside.resident:
            server.generate(self._question(self._prefix), custom=NOT_STORED)
        stream = Stream(server, self._short, self._args.answer_tokens, NOT_STORED)
        stream.wait(BEFORE_TOKENS)
        if beside.stored is not None:
            prefix = self._prefix if beside.stored else self._fresh(self._args.prefix_tokens)
            began = time.perf_counter()
            answer = server.generate(self._question(prefix), custom=beside.custom)
            row["ttft_ms"] = round((time.perf_counter() - began) * 1e3, 1)
            row["cached_tokens"] = answer["meta_info"]["cached_tokens"]
        gaps = [gap * 1e3 for gap in gaps_of(stream.join())]
        row |= {"longest_ms": round(max(gaps), 1), "median_ms": round(statistics.median(gaps), 1)}
        row["read_mb"] = round((self._read_bytes() - before) / 1e6, 1)
        server.emulate_ssd(0)
        server.flush()
        return row

    def _read_bytes(self) -> int:
        """Of requests that have ended."""
        return int(self._server.stats()["totals"]["ssd_bytes"])

    def _fresh(self, count: int) -> list[int]:
        """Ids of ordinary words of the demo's model that nobody has seen together."""
        return self._chance.choices(range(100, 40000), k=count)

    def _question(self, prefix: Sequence[int]) -> list[int]:
        return [*prefix, *self._fresh(QUESTION_TOKENS)]
