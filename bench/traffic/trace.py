"""Published traces of agents and chats, replayed against stock SGLang, HiCache and IMPRESS.

So many sessions are under way at once; each asks, reads the answer, thinks and asks again, and when
one ends the next begins. All lengths are those of the trace divided by --divide, blocks stay
blocks, and their text is WikiText's (`traffic/sessions.py`). The device pool has room for
--pool-share of the working set, all blocks of the sessions that are played, and memory on the host
(HiCache's pool, our cache) is as large, or 1.05 times as large where HiCache asks for that.

  stock    SGLang's own radix cache
  hicache  with host memory and the `file` backend, pages of 64, what is in files waited for
  backend  the same with our backend
  impress  few bits, as a server has them that is told nothing
  exact    --impress-bits=exact

Columns: TTFT in ms over all requests; prompt and answer tokens per second; gaps in ms between
pieces of answers, so what the loads and prefills of others cost; the share of prompt tokens that
was cached, in JSON by where it was; MB read from files and written to them in all; median and mean
TTFT as multiples of the first system's, with 95% intervals (paired bootstrap over requests). --mbps
slows reads of the store or of HiCache's files down to a drive's.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from bench.core.data import load_tokenize, model_folder, read_rows
from bench.core.options import DATA, Option
from bench.core.report import Result, Row, Table, ratio
from bench.core.servers import Piece, Server, gaps_of
from bench.traffic.sessions import TRACE, Scale, Session, Turn, read_sessions
from bench.traffic.systems import OPTIONS as SYSTEMS
from bench.traffic.systems import PAGE_TOKENS, measure

OPTIONS = (
    TRACE,
    Option("divide", 32, "lengths by this", quick=128),
    Option("sessions", 12, "the first ones", quick=2),
    Option("turns", 12, "of each, the first ones", quick=3),
    Option("at-once", 4, "sessions under way", quick=2),
    Option("hurry", 20.0, "think times are divided by this"),
    Option("longest-pause", 3.0, "in seconds"),
    Option("pool-share", 0.1, "room of the device pool, and as much on the host"),
    DATA,
    *SYSTEMS,
)
# A pass may have more than one prompt, and answers need room, too.
LEAST_ROOM = 1.3
SPARE_TOKENS = 256


class Asked(NamedTuple):
    """A request that was answered."""

    began: float
    came: Sequence[Piece]
    prompt_tokens: int
    cached: Counter[str]


def run(args: argparse.Namespace) -> Result:
    """Replay the trace on all systems, at all rates."""
    model = model_folder(args.model)
    text = "\n".join(row["text"] for row in read_rows(args.data, "wikitext2"))
    tokens = load_tokenize(model)(text)
    scale = Scale(tokens, args.divide, args.hurry, args.longest_pause, args.seed)
    sessions = [
        session[: args.turns] for session in choose(read_sessions(args.trace), args.sessions)
    ]
    working_set = scale.working_set(sessions)
    longest = max(len(scale.ask(turn).tokens) for session in sessions for turn in session)
    room = int(max(args.pool_share * working_set, LEAST_ROOM * longest)) + SPARE_TOKENS
    room -= room % PAGE_TOKENS
    told = {
        "trace": args.trace.stem,
        "requests": sum(map(len, sessions)),
        "working_set_tokens": working_set,
        "longest_prompt": longest,
    }
    figures = measure(
        args, model, room, lambda server: replay(server, sessions, scale, args.at_once)
    )
    return Result(told | figures, [Table(figures["rows"], caption=str(told))])


def choose(sessions: Sequence[Session], count: int) -> list[Session]:
    """The first sessions in which somebody asks again."""
    several = [session for session in sessions if len(session) > 1]
    return sorted(several, key=lambda session: session[0].at)[:count]


def replay(server: Server, sessions: Sequence[Session], scale: Scale, at_once: int) -> Row:
    """Play all sessions; the figures of it."""
    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        played = list(pool.map(lambda session: play(server, session, scale), sessions))
    return describe([asked for session in played for asked in session], time.perf_counter() - began)


def play(server: Server, session: Sequence[Turn], scale: Scale) -> list[Asked]:
    """Ask what a session asks, one after the other."""
    found: list[Asked] = []
    for turn in session:
        ask = scale.ask(turn)
        time.sleep(ask.pause_seconds if found else 0.0)
        began = time.perf_counter()
        came = list(server.stream(ask.tokens, ask.answer_tokens))
        meta = came[-1].meta
        details = meta.get("cached_tokens_details") or {"device": meta["cached_tokens"]}
        cached = Counter({name: count for name, count in details.items() if isinstance(count, int)})
        found.append(Asked(began, came, len(ask.tokens), cached))
    return found


def describe(asked: Sequence[Asked], seconds: float) -> Row:
    """The figures of requests."""
    first = [(request.came[0].at - request.began) * 1e3 for request in asked]
    gaps = [gap * 1e3 for request in asked for gap in gaps_of(request.came)] or [0.0]
    prompts = sum(request.prompt_tokens for request in asked)
    cached = sum((request.cached for request in asked), Counter[str]())
    tokens = prompts + sum(request.came[-1].tokens for request in asked)
    ttft = {
        f"ttft_p{percent}": round(float(np.percentile(first, percent)), 1)
        for percent in (50, 95, 99)
    }
    return ttft | {
        "tokens_per_s": round(tokens / seconds, 1),
        "gap_p99": round(float(np.percentile(gaps, 99)), 1),
        "gap_max": round(max(gaps), 1),
        "cached": ratio(cached.total(), prompts),
        "cached_tokens": dict(cached),
        "seconds": round(seconds, 1),
        "ttfts": [round(ttft, 2) for ttft in first],
    }
