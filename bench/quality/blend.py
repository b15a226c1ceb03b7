"""Documents in another order: how far answers are from a full recompute, and what they cost.

Each question has some documents. They are stored as one prompt; then the same ones are asked about
in another order, with each `--shares` of their tokens computed again, chosen by each `--select`:
the first tokens of each document, those whose KVs deviate most, or random ones. Share 1 is the
exact answer, which computes everything.

`KL` to the exact distributions before each token of the right answer, in nats per token, over the
100 likeliest tokens and the rest, with a 95% interval over questions (bootstrap); `gold` is what
the log-likelihood of the right answer loses, and `agreement` that of the likeliest token; `TTFT` is
the median, one request at a time. `musique_cacheblend` (with --data) has CacheBlend's own documents
and questions.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.core.data import SEPARATOR, Row, Tokenize, load_tokenize, model_folder, read_rows
from bench.core.options import DATA, DTYPE, KEEP, MODEL, SEED, SERVER_FLAG, Option, one_of
from bench.core.report import Result, Table, plain
from bench.core.servers import Server, Servers, servers
from bench.core.session import BenchFailed, step
from impress_sglang.options import BLEND_SELECTORS, EXACTLY, OFF

OPTIONS = (
    Option("questions", 40, "how many", quick=2),
    Option("documents", 6, "of each question", quick=3),
    Option("tokens", 512, "of a document, at most", quick=200),
    Option("shares", (0.0, 0.05, 0.15, 0.3), "of their tokens to compute again"),
    Option("select", BLEND_SELECTORS, "which of them", parse=one_of(BLEND_SELECTORS)),
    Option("set", "squad_xquad_en", "data set with documents, questions and answers"),
    SEED,
    SERVER_FLAG,
    DATA,
    MODEL,
    DTYPE,
    KEEP,
)
Distribution = Mapping[int, float]
"""Log-probabilities of the likeliest tokens."""
TOP = 100
RESAMPLES = 2000
HEAD = f"Answer the question from these passages.{SEPARATOR}"


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """Tokens of a prompt: its documents, of which an order is stored, and the right answer."""

    head: list[int]
    documents: list[list[int]]
    order: list[int]
    """In which they are asked about; they are stored in another one."""
    question: list[int]
    answer: list[int]

    def prompt(self, order: Sequence[int]) -> list[int]:
        """Up to the question."""
        return [*self.head, *(token for number in order for token in self.documents[number])]


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What a server says before each token of the right answer, and when it begins to."""

    distributions: list[Distribution]
    loglik: float
    seconds: float
    report: Row


def run(args: argparse.Namespace) -> Result:
    """Ask all questions, once with each rule and share."""
    model = model_folder(args.model)
    rows, tokenize = read_rows(args.data, args.set), load_tokenize(model)
    asked = draw(rows, tokenize, args)
    exact: list[Answer] = []
    found: list[Row] = []
    with servers(args) as pool:
        for select in args.select:
            own = _ask_all(args, pool, model, select, asked, exact)
            found += [_row(select, share, exact, answers) for share, answers in own.items()]
    found.append(_row("", 1.0, exact, exact))
    lengths = [len(own.prompt(own.order)) for own in asked]
    figures = {"model": model.name, "prompt_tokens": lengths, "rows": found}
    columns = plain("select", "share", "KL", "from", "to", "gold", "agreement", "blended", "TTFT")
    return Result(figures, [Table(columns, found)])


def draw(rows: Sequence[Row], tokenize: Tokenize, args: argparse.Namespace) -> list[Question]:
    """Questions and their documents, of other questions' where a row has one of its own.

    Raises:
        BenchFailed: there are not so many.
    """
    rng = random.Random(args.seed)
    if len(rows) < max(args.questions, args.documents):
        raise BenchFailed(f"{args.set} has {len(rows)} rows")
    contexts = sorted({row["context"] for row in rows if "context" in row})
    questions = []
    for row in rng.sample(list(rows), args.questions):
        texts = list(row["ctxs"]) if "ctxs" in row else [row["context"]]
        others = [text for text in contexts if text not in texts]
        texts += rng.sample(others, min(len(others), max(args.documents - len(texts), 0)))
        rng.shuffle(texts)
        documents = [
            [*tokenize(text)[: args.tokens], *tokenize(SEPARATOR)]
            for text in texts[: args.documents]
        ]
        order = list(range(len(documents)))
        while order == sorted(order) and len(order) > 1:
            rng.shuffle(order)
        answers = row["answers"]
        question = tokenize(f"Question: {row['question']}\nAnswer:")
        answer = tokenize(f" {answers[0] if isinstance(answers, list) else answers['text'][0]}")
        questions.append(Question(tokenize(HEAD), documents, order, question, answer))
    return questions


def _ask_all(
    args: argparse.Namespace,
    pool: Servers,
    model: Any,
    select: str,
    asked: Sequence[Question],
    exact: list[Answer],
) -> dict[float, list[Answer]]:
    """Answers with each share; fills `exact` if it is empty."""
    flags = [
        "--max-total-tokens=30000",
        "--enable-impress",
        "--impress-write-after=1",
        "--impress-load=always",
        "--impress-blend=0.15",
        f"--impress-blend-select={select}",
        f"--impress-ssd-dir={pool.folder / f'kv-{select}'}",
        *args.server_flag,
    ]
    found: dict[float, list[Answer]] = {share: [] for share in args.shares}
    complete = bool(exact)
    with pool.running(select, model, args.dtype, *flags) as server, step(f"{select}: asking"):
        for question in asked:
            whole = [*question.prompt(range(len(question.documents))), *question.question]
            server.generate(whole, custom={"impress_blend": OFF})
            server.flush()
            for share in args.shares:
                found[share].append(_ask(server, question, {"impress_blend": share}))
            # It is stored, so that it comes last.
            if not complete:
                custom = {"impress_blend": OFF, "impress_bits": EXACTLY}
                exact.append(_ask(server, question, custom, store=True))
        server.check_log()
    return found


def _ask(
    server: Server, question: Question, custom: dict[str, Any], *, store: bool = False
) -> Answer:
    prompt = [*question.prompt(question.order), *question.question]
    began = time.perf_counter()
    server.generate(prompt, custom=custom)
    seconds = time.perf_counter() - began
    if not store:
        server.flush()
    meta = server.generate(
        [*prompt, *question.answer],
        custom=custom,
        return_logprob=True,
        logprob_start_len=len(prompt) - 1,
        top_logprobs_num=TOP,
    )["meta_info"]
    server.flush()
    return Answer(
        [{entry[1]: entry[0] for entry in own} for own in meta["input_top_logprobs"] if own],
        sum(entry[0] for entry in meta["input_token_logprobs"][1:]),
        seconds,
        meta["impress"],
    )


def _row(select: str, share: float, exact: Sequence[Answer], found: Sequence[Answer]) -> Row:
    divergences, agreements = [], []
    for left, right in zip(exact, found, strict=True):
        pairs = list(zip(left.distributions, right.distributions, strict=True))
        divergences.append(statistics.fmean(divergence(*pair) for pair in pairs))
        agreements += [max(a, key=a.__getitem__) == max(b, key=b.__getitem__) for a, b in pairs]
    low, high = interval(divergences)
    gold = [left.loglik - right.loglik for left, right in zip(exact, found, strict=True)]
    return {
        "select": select,
        "share": share,
        "KL": round(statistics.fmean(divergences), 5),
        "from": round(low, 5),
        "to": round(high, 5),
        "gold": round(statistics.fmean(gold), 4),
        "agreement": round(statistics.fmean(agreements), 4),
        "blended": round(statistics.fmean(own.report["blended_tokens"] for own in found)),
        "TTFT": round(statistics.median(own.seconds for own in found), 4),
        "divergences": [round(own, 6) for own in divergences],
    }


def divergence(exact: Distribution, found: Distribution) -> float:
    """KL in nats over the tokens that both name, and all others as one."""
    common = exact.keys() & found.keys()
    total = sum(math.exp(exact[own]) * (exact[own] - found[own]) for own in common)
    rest, other = (
        max(1e-9, 1.0 - sum(math.exp(named[own]) for own in common)) for named in (exact, found)
    )
    return total + rest * math.log(rest / other)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95% of the means of values that are drawn again from these."""
    rng, sample = np.random.default_rng(0), np.asarray(values)
    means = sample[rng.integers(0, len(sample), (RESAMPLES, len(sample)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
