"""What a request's load of a stored prefix costs those who run beside it, and itself.

The demo's model, caches of 0 GB, and a device pool with room for all unless a case says otherwise.
Cases, in the order of --cases:

  gaps   one client streams a long answer while another one asks for a prefix of --prefix-tokens
         random tokens, or for the same where it is in the pool and nothing is loaded: the stream's
         longest, second and median gap in ms and tokens that came meanwhile, TTFT of the other one
         and MB it read; medians of --repeats
  ttft   TTFT in ms for a question about the stored handbook, alone, by MB/s of the drive; medians
         of --ttft-repeats
  eight  eight such questions at once: until all are answered, mean TTFT, MB read
  chat   four turns about the handbook, which leaves the pool after the first one: prompt tokens,
         and those that were cached (in the pool, or loaded) and computed, by turn
  load   four clients stream answers of 200 tokens to short prompts over and over, and four ask for
         one of --load-prefixes stored prefixes, for which the pool has no room together, for
         --load-seconds at 20 MB/s: tokens per second and gaps of the streams, requests for prefixes
         that were answered per second (some from the pool: see MB from the drive, of which a prefix
         in default bits takes 25), their TTFT; also on stock SGLang, which computes

For requests that have no use for the store there is `python -m bench overhead`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.core.data import model_folder
from bench.core.options import DTYPE, KEEP, MODEL, SEED, SERVER_FLAG, Option, one_of
from bench.core.report import Result, Row, Table, plain
from bench.core.servers import STOCK, Server, Servers, servers, store_flags
from bench.core.session import step
from bench.traffic.crowd import Crowd
from bench.traffic.prompts import QUESTIONS, Handbook, draw
from bench.traffic.reading import Counts
from bench.traffic.streams import Stream, describe_gaps

NOT_STORED: dict[str, Any] = {"impress_store": False}
EXACT: dict[str, Any] = {"impress_bits": "exact", **NOT_STORED}
POOL_TOKENS = 20000
CHUNK_TOKENS = 512
SHORT_TOKENS = 40
QUESTION_TOKENS = 8
# Of a stream before the other request comes.
BEFORE_TOKENS = 20
TURNS = 4
TURN_TOKENS = 120


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
CASES = ("gaps", "ttft", "eight", "chat", "load")
# Of each kind in the case `load`, and what its pool has room for: four prefixes with their answers.
LOAD_CLIENTS = 4
LOAD_ANSWER_TOKENS = 200
LOAD_SPARE_TOKENS = 2000
OPTIONS = (
    Option("cases", CASES, f"of {', '.join(CASES)}", parse=one_of(CASES)),
    Option("prefix-tokens", 3000, "of a random prefix", quick=1000),
    Option("answer-tokens", 150, "of a stream", quick=60),
    Option("repeats", 3, "of each gap", quick=1),
    Option("ttft-repeats", 5, "of each TTFT alone", quick=2),
    Option("ttft-mbps", (0.0, 130.0, 60.0, 30.0), "0: the drive as it is", quick=(0.0, 60.0)),
    Option("eight-mbps", (0.0, 60.0), "of the drive for eight at once", quick=(60.0,)),
    Option("load-seconds", 40.0, "for which clients ask", quick=8.0),
    Option("load-prefixes", 8, "for which they ask", quick=5),
    Option("load-mbps", 20.0, "of the drive meanwhile"),
    SERVER_FLAG,
    MODEL,
    DTYPE,
    SEED,
    KEEP,
)


def run(args: argparse.Namespace) -> Result:
    """Measure all cases."""
    work = Work(args)
    figures: dict[str, Any] = {"model": work.model.name}
    with servers(args) as pool:
        alone = [case for case in args.cases if case != "load"]
        if alone:
            with work.running(pool, "beside", POOL_TOKENS) as server:
                with step("storing and warming up"):
                    work.prepare(server)
                for case in alone:
                    with step(case):
                        figures[case] = MEASURES[case](work, server)
        if "load" in args.cases:
            figures["load"] = work.load(pool)
    return Result(figures, [Table(plain(*SHOWN[case]), figures[case], case) for case in args.cases])


class Work:
    """Prompts, and servers that have the prefixes in their store."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model = model_folder(args.model)
        self.handbook = Handbook(self.model)
        chance = random.Random(f"{args.seed} beside")
        self.prefix = draw(chance, args.prefix_tokens)
        self.short = draw(chance, SHORT_TOKENS)
        self._chance = chance

    @contextlib.contextmanager
    def running(
        self, pool: Servers, name: str, tokens: int, preload: str | None = None
    ) -> Iterator[Server]:
        """A server with a pool of so many tokens and a store of its own, or with `preload` stock
        SGLang; its log is checked at the end."""
        flags = [f"--max-total-tokens={tokens}", f"--chunked-prefill-size={CHUNK_TOKENS}"]
        how = {"preload": preload} if preload else {}
        if not preload:
            flags += [*store_flags(pool.folder / f"kv-{name}"), *self.args.server_flag]
        with pool.running(name, self.model, self.args.dtype, *flags, **how) as server:
            yield server
            server.check_log()
            server.stop()

    def prepare(self, server: Server) -> None:
        """Store both prefixes, and take each way once: first requests take longer."""
        server.store(self.handbook.ask(QUESTIONS[0]))
        server.store([*self.prefix, *self.fresh(QUESTION_TOKENS)])
        for custom in (NOT_STORED, EXACT):
            server.generate([*self.prefix, *self.fresh(QUESTION_TOKENS)], custom=custom)
            server.flush()
        server.generate(self.handbook.ask(QUESTIONS[1]), 2, custom=NOT_STORED)
        server.flush()

    def fresh(self, count: int) -> list[int]:
        """Tokens that nobody has seen."""
        return draw(self._chance, count)

    def gaps(self, server: Server) -> list[Row]:
        """Of a stream, beside each kind of request."""
        found: dict[str, list[Row]] = {beside.name: [] for beside in GAPS}
        for _ in range(self.args.repeats):
            for beside in GAPS:
                found[beside.name].append(self._gap(server, beside))
        return [{"beside": own, **medians(rows), "repeats": rows} for own, rows in found.items()]

    def ttft(self, server: Server) -> list[Row]:
        """Of a question about the handbook, by the drive."""
        rows: list[Row] = []
        for mbps in self.args.ttft_mbps:
            times, reads = [], []
            for number in range(self.args.ttft_repeats):
                prompt = self.handbook.ask(QUESTIONS[1 + number % (len(QUESTIONS) - 1)])
                with drive(server, mbps) as counts:
                    ((seconds, _),) = server.first_tokens([prompt], at_once=1, custom=NOT_STORED)
                    reads.append(counts.since()["read_bytes"])
                times.append(round(seconds * 1e3, 1))
            rows.append(
                {
                    "mbps": mbps or "as it is",
                    "ttft_ms": statistics.median(times),
                    "from_ms": min(times),
                    "to_ms": max(times),
                    "read_mb": round(statistics.median(reads) / 1e6, 1),
                    "all_ms": times,
                }
            )
        return rows

    def eight(self, server: Server) -> list[Row]:
        """Questions about the handbook at once."""
        rows: list[Row] = []
        prompts = [self.handbook.ask(question) for question in QUESTIONS]
        for mbps in self.args.eight_mbps:
            with drive(server, mbps) as counts:
                began = time.perf_counter()
                answers = server.first_tokens(prompts, at_once=len(prompts), custom=NOT_STORED)
                seconds, read = time.perf_counter() - began, counts.since()
            times = [own for own, _ in answers]
            rows.append(
                {
                    "mbps": mbps or "as it is",
                    "all_ms": round(seconds * 1e3, 1),
                    "mean_ttft_ms": round(statistics.mean(times) * 1e3, 1),
                    "worst_ttft_ms": round(max(times) * 1e3, 1),
                    "read_mb": round(read["read_bytes"] / 1e6, 1),
                    "drive_mb": round(read["drive_bytes"] / 1e6, 1),
                    "cached_tokens": [cached(answer) for _, answer in answers],
                }
            )
        return rows

    def chat(self, server: Server) -> list[Row]:
        """Four turns, of which the first one's KVs leave the pool."""
        rows: list[Row] = []
        with drive(server, 0.0) as counts:
            talk = self.handbook.ask(QUESTIONS[0])
            for turn in range(1, TURNS + 1):
                began = time.perf_counter()
                answer = server.generate(talk, TURN_TOKENS)
                seconds, read = time.perf_counter() - began, counts.since()
                rows.append(
                    {
                        "turn": turn,
                        "prompt": len(talk),
                        "cached": cached(answer),
                        "computed": len(talk) - cached(answer),
                        "seconds": round(seconds, 2),
                        "read_mb": round(read["read_bytes"] / 1e6, 1),
                        "answer": answer["text"],
                    }
                )
                talk = [*talk, *answer["output_ids"], *self.handbook.go_on(QUESTIONS[turn])]
                if turn == 1:
                    server.flush()
        return rows

    def load(self, pool: Servers) -> list[Row]:
        """Clients of both kinds for a fixed time, on our server and on stock SGLang."""
        chance = random.Random(f"{self.args.seed} load")
        length = self.args.prefix_tokens
        prefixes = [draw(chance, length) for _ in range(self.args.load_prefixes)]
        tokens = LOAD_CLIENTS * length + LOAD_SPARE_TOKENS
        crowd = Crowd(
            LOAD_CLIENTS, LOAD_CLIENTS, LOAD_ANSWER_TOKENS, prefixes, NOT_STORED, self.args.seed
        )
        rows: list[Row] = []
        for name, preload in (("ours", None), ("stock", STOCK)):
            with self.running(pool, f"load-{name}", tokens, preload) as server:
                with step(f"{name}: computing prefixes"):
                    for prefix in prefixes[:1] if preload else prefixes:
                        server.store(prefix)
                if not preload:
                    server.emulate_ssd(self.args.load_mbps)
                with step(f"load: {name}"):
                    rows.append({"server": name, **crowd.ask(server, self.args.load_seconds)})
        return rows

    def _gap(self, server: Server, beside: Beside) -> Row:
        """A stream with a request beside it."""
        row: Row = {}
        with drive(server, beside.mbps) as counts:
            if beside.resident:
                server.generate([*self.prefix, *self.fresh(QUESTION_TOKENS)], custom=NOT_STORED)
            stream = Stream(server, self.short, self.args.answer_tokens, NOT_STORED)
            stream.wait(BEFORE_TOKENS)
            if beside.stored is not None:
                prefix = self.prefix if beside.stored else self.fresh(self.args.prefix_tokens)
                began = time.perf_counter()
                answer = server.generate(
                    [*prefix, *self.fresh(QUESTION_TOKENS)], custom=dict(beside.custom)
                )
                ended = time.perf_counter()
                row |= {"ttft_ms": (ended - began) * 1e3, "cached_tokens": cached(answer)}
            stream.join()
            read = counts.since()
        if beside.stored is not None:
            row["tokens_meanwhile"] = stream.tokens_between(began, ended)
            row["stream_over"] = stream.last < ended
            row["read_mb"], row["drive_mb"] = read["read_bytes"] / 1e6, read["drive_bytes"] / 1e6
        row |= describe_gaps(stream.gaps())
        return {name: round(value, 1) for name, value in row.items()}


MEASURES: dict[str, Callable[[Work, Server], list[Row]]] = {
    "gaps": Work.gaps,
    "ttft": Work.ttft,
    "eight": Work.eight,
    "chat": Work.chat,
}
SHOWN = {
    "gaps": (
        *("beside", "longest_ms", "second_ms", "median_ms", "tokens_meanwhile", "ttft_ms"),
        *("read_mb", "cached_tokens"),
    ),
    "ttft": ("mbps", "ttft_ms", "from_ms", "to_ms", "read_mb"),
    "eight": ("mbps", "all_ms", "mean_ttft_ms", "worst_ttft_ms", "read_mb", "drive_mb"),
    "load": (
        *("server", "tokens_per_s", "gap_p50_ms", "gap_p99_ms", "gap_max_ms", "first_p50_ms"),
        *("answered_per_s", "ttft_p50_ms", "ttft_max_ms", "cached_share", "drive_mb_per_s"),
    ),
    "chat": ("turn", "prompt", "cached", "computed", "seconds", "read_mb"),
}


@contextlib.contextmanager
def drive(server: Server, mbps: float) -> Iterator[Counts]:
    """An empty pool and a drive of that rate; both are put right afterwards."""
    server.flush()
    server.emulate_ssd(mbps)
    try:
        yield Counts(server)
    finally:
        server.emulate_ssd(0)
        server.flush()


def cached(answer: Mapping[str, Any]) -> int:
    """Tokens of a prompt that were not computed."""
    return int(answer["meta_info"]["cached_tokens"])


def medians(rows: Sequence[Row]) -> Row:
    """Of each figure that the rows have."""
    return {name: round(statistics.median(row[name] for row in rows), 1) for name in rows[0]}
