"""Conversations that leave the device after each turn: how far answers drift from exact KVs.

Dialogues of MT-Bench-101, joined to conversations of so many turns. At each turn the history and
the next question and answer are one request, and the log-probabilities of the answer's tokens are
compared with those of stock SGLang, which keeps all of it. Then the device pool is emptied, so that
the next turn reads its history back: what was computed exactly in few bits, and what was computed
on top of that (`--impress-approximation-depth`) as far as it may be used.

Per turn: `KL` to the exact distribution in nats per token, over its `--top` likeliest tokens and
the rest; `agreement` of the likeliest token; the share of the history that was read (`loaded`) and
`bits`.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.core.data import Row, Tokenize, load_tokenize, model_folder, read_rows
from bench.core.options import DATA, DTYPE, KEEP, MODEL, SERVER_FLAG, Option
from bench.core.report import Result, Table, plain
from bench.core.servers import OURS, STOCK, Server, Servers, servers
from bench.core.session import BenchFailed, step

DATA_SET = "mtbench101"
OPTIONS = (
    Option("conversations", 10, "how many", quick=1),
    Option("turns", 8, "of each", quick=2),
    Option("top", 100, "likeliest tokens that are compared"),
    SERVER_FLAG,
    DATA,
    MODEL,
    DTYPE,
    KEEP,
)
# So short that a first turn is a prefix.
MIN_PREFIX_TOKENS = 64
LEAST_TURN_TOKENS = 64

Turn = tuple[list[int], list[int]]
"""Tokens of a question with its marks, and of the answer."""
Distribution = Mapping[int, float]
"""Log-probabilities of the likeliest tokens."""


def run(args: argparse.Namespace) -> Result:
    """Hold the conversations with stock, then with ours."""
    model = model_folder(args.model)
    rows = read_rows(args.data, DATA_SET)
    talks = conversations(rows, load_tokenize(model), args.conversations, args.turns)
    with servers(args) as pool:
        exact = _ask_all(args, pool, model, talks, ours=False)
        found = _ask_all(args, pool, model, talks, ours=True)
    drifts = [_row(number, exact, found) for number in range(args.turns)]
    figures = {
        "model": model.name,
        "history_tokens": [sum(map(_length, talk[:-1])) for talk in talks],
        "rows": drifts,
    }
    return Result(figures, [Table(plain(*drifts[0]), drifts)])


def conversations(
    rows: Sequence[Row], tokenize: Tokenize, count: int, turns: int
) -> list[list[Turn]]:
    """Dialogues about the same kind of task, one after another, as turns of tokens.

    Raises:
        BenchFailed: there are not so many.
    """
    talks: list[list[Turn]] = []
    by_task: dict[str, list[Turn]] = {}
    for row in rows:
        own = by_task.setdefault(row["task"], [])
        for turn in row["history"]:
            question = f"<|im_start|>user\n{turn['user']}<|im_end|>\n<|im_start|>assistant\n"
            tokens = tokenize(question), tokenize(f"{turn['bot']}<|im_end|>\n")
            if _length(tokens) >= LEAST_TURN_TOKENS:
                own.append(tokens)
    # Of each task in turn, so that no kind fills the run.
    while len(talks) < count:
        before = len(talks)
        for own in by_task.values():
            if len(own) >= turns and len(talks) < count:
                talks.append(own[:turns])
                del own[:turns]
        if len(talks) == before:
            raise BenchFailed(f"there are {before} conversations of {turns} turns, not {count}")
    return talks


def _length(turn: Turn) -> int:
    return len(turn[0]) + len(turn[1])


def _ask_all(
    args: argparse.Namespace, pool: Servers, model: Path, talks: list[list[Turn]], *, ours: bool
) -> list[list[Row]]:
    """Answers of each turn of each conversation."""
    flags = ["--max-total-tokens=30000", "--max-running-requests=8"]
    if ours:
        flags += [
            "--enable-impress",
            "--impress-write-after=1",
            "--impress-load=always",
            f"--impress-min-prefix-tokens={MIN_PREFIX_TOKENS}",
            f"--impress-ssd-dir={pool.folder / 'kv'}",
            *args.server_flag,
        ]
    name, preload = ("ours", OURS) if ours else ("stock", STOCK)
    with (
        pool.running(name, model, args.dtype, *flags, preload=preload) as server,
        step(f"{name}: talking"),
    ):
        found = [_talk(args, server, talk, empty=ours) for talk in talks]
        server.check_log()
    return found


def _talk(args: argparse.Namespace, server: Server, talk: list[Turn], *, empty: bool) -> list[Row]:
    history: list[int] = []
    answers = []
    for question, answer in talk:
        start = len(history) + len(question)
        history = [*history, *question, *answer]
        answers.append(_ask(server, history, start, args.top))
        if empty:
            server.flush()
    return answers


def _ask(server: Server, tokens: list[int], start: int, top: int) -> dict[str, Any]:
    """Distributions before each token from `start` on, and the report."""
    fields = {"return_logprob": True, "logprob_start_len": start - 1, "top_logprobs_num": top}
    meta = server.generate(tokens, **fields)["meta_info"]
    # The first entry is that of a token that nothing was computed before.
    before = [own for own in meta["input_top_logprobs"] if own]
    return {
        "distributions": [{entry[1]: entry[0] for entry in own} for own in before],
        "report": meta.get("impress"),
    }


def divergence(exact: Distribution, found: Distribution) -> float:
    """KL in nats over the tokens that both name, and all others as one."""
    common = exact.keys() & found.keys()
    total = sum(math.exp(exact[own]) * (exact[own] - found[own]) for own in common)
    rest, other = (
        max(1e-9, 1.0 - sum(math.exp(named[own]) for own in common)) for named in (exact, found)
    )
    return total + rest * math.log(rest / other)


def _row(number: int, exact: list[Any], found: list[Any]) -> dict[str, float | int]:
    divergences, agreements, loaded, bits = [], [], [], []
    for left, right in zip(exact, found, strict=True):
        pairs = list(
            zip(left[number]["distributions"], right[number]["distributions"], strict=True)
        )
        divergences += [divergence(*pair) for pair in pairs]
        agreements += [max(a, key=a.__getitem__) == max(b, key=b.__getitem__) for a, b in pairs]
        report = right[number]["report"]
        loaded.append(report["used_tokens"])
        if report["bits_mean"] is not None:
            bits.append(report["bits_mean"])
    return {
        "turn": number + 1,
        "tokens": len(divergences),
        "loaded": round(statistics.fmean(loaded)),
        "bits": round(statistics.fmean(bits), 2) if bits else 16.0,
        "agreement": round(statistics.fmean(agreements), 4),
        "KL": round(statistics.fmean(divergences), 5),
    }
