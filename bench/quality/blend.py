"""Documents in another order: how far answers are from a full recompute, and what they cost.

Each question has some documents. All documents are stored once, several in a prompt. Then questions
are asked about them in another order, with each `--shares` of their tokens computed again, chosen
by each `--select`: the first tokens of each document, those whose KVs deviate most, or random ones.
Share 0 reuses all as it is, whatever the rule; share 1 computes everything and is exact.

KL         to the exact distributions before each of the next --continuation tokens that exact KVs
           give, in nats per token, over the 100 likeliest tokens and the rest, with a 95% interval
           over questions (bootstrap); *median*: of the questions
of reuse   how much of the KL of share 0 is gone; *over random*: the mean of what the KL is less
           than that of random tokens of the same questions, with its interval
loss       of the log-likelihood of these tokens; with --continuation 0 all this is of the right
           answer, in place of them
agreement  of the likeliest token
F1, right  words that a greedy answer of --answer-tokens has in common with the right one (its best
           variant), and the share of answers that contain it; 95% intervals of the difference of
           `right` to the exact answers' are in the file
TTFT       the median, one request at a time; *many*, *per s*: the median of --clients, each of
           which asks for one token as soon as it has its last one, and how many they get
drives     the median TTFT of each share, and of what `auto` takes, with emulated SSDs of --ssd-mbps
           and no caches; each has been asked once with a drive before

`musique_cacheblend` (with --data) has CacheBlend's own documents and questions.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import re
import statistics
import string
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.core.data import SEPARATOR, Row, Tokenize, load_tokenize, model_folder, read_rows
from bench.core.options import DATA, DTYPE, KEEP, MODEL, SEED, SERVER_FLAG, Option, one_of
from bench.core.report import Result, Table, plain
from bench.core.servers import Server, Servers, servers
from bench.core.session import BenchFailed, step
from impress_sglang.options import AUTO, BLEND_SELECTORS, EXACTLY, OFF, RANDOM

OPTIONS = (
    Option("questions", 40, "how many", quick=2),
    Option("documents", 6, "of each question", quick=3),
    Option("tokens", 512, "of a document, at most", quick=200),
    Option("shares", (0.05, 0.15, 0.3), "of their tokens to compute again, beside 0 and 1"),
    Option("select", BLEND_SELECTORS, "which of them", parse=one_of(BLEND_SELECTORS)),
    Option(
        "continuation", 32, "tokens that exact KVs give, to compare; 0: the right answer", quick=8
    ),
    Option("answers-only", False, "measure no distributions and no TTFT; ask eight at a time"),
    Option("answer-tokens", 12, "of answers that are generated; 0: none are", quick=4),
    Option("clients", 4, "at a time, for the throughput; 0: it is not measured", quick=2),
    Option("ssd-mbps", (), "bandwidths of emulated SSDs in MB/s, to compare auto on", parse=float),
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
AT_ONCE = 8
# Of the questions, such a share may have too short passages to be found, or find a whole prefix.
FEW = 0.05
HEAD = f"Answer the question from these passages.{SEPARATOR}"
# Between the documents and the question: without them small models do not answer in few words.
SHOTS = (
    f"Question: What is the capital of France?\nAnswer: Paris{SEPARATOR}"
    f"Question: When did the Second World War end?\nAnswer: 1945{SEPARATOR}"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """Tokens of a prompt: its documents, of which an order is stored, and the right answer."""

    head: list[int]
    documents: list[list[int]]
    order: list[int]
    """In which they are asked about; they are stored in another one."""
    question: list[int]
    answer: list[int]
    """What is compared behind it: the first right one, or what exact KVs give."""
    answers: list[str]
    """All that are right."""

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
    f1: float
    right: bool


def run(args: argparse.Namespace) -> Result:
    """Ask all questions, once with each rule and share."""
    if args.answers_only and not args.answer_tokens:
        raise BenchFailed("--answers-only needs --answer-tokens")
    model = model_folder(args.model)
    asked = draw(read_rows(args.data, args.set), load_tokenize(model), args)
    found: dict[tuple[str, float], list[Answer]] = {}
    rates: dict[tuple[str, float], Row] = {}
    drives: list[Row] = []
    with servers(args) as pool:
        for select in args.select:
            ways = [(select, share) for share in args.shares]
            if not found:
                ways = [("", 1.0), ("", 0.0), *ways]
            found |= _ask_all(args, pool, model, select, asked, ways, rates)
            drives += _on_drives(args, pool, model, select, asked)
    rows = [_row(way, answers, found) | rates.get(way, {}) for way, answers in found.items()]
    lengths = [len(own.prompt(own.order)) for own in asked]
    figures = {"model": model.name, "prompt_tokens": lengths, "rows": rows, "drives": drives}
    names = ("KL", "from", "to", "median", "of reuse", "over random", "low", "high", "loss")
    last = ("agreement", "F1", "right", "blended", "TTFT", "many", "per s")
    tables = [Table(plain("select", "share", *names, *last), rows)]
    if drives:
        tables.append(Table(plain(*(key for key in drives[0] if key != "seconds")), drives))
    return Result(figures, tables)


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
        question = tokenize(f"{SHOTS}Question: {row['question']}\nAnswer:")
        answers = list(answers if isinstance(answers, list) else answers["text"])
        answer = tokenize(f" {answers[0]}")
        questions.append(Question(tokenize(HEAD), documents, order, question, answer, answers))
    return questions


def _ask_all(
    args: argparse.Namespace,
    pool: Servers,
    model: Any,
    select: str,
    asked: list[Question],
    ways: Sequence[tuple[str, float]],
    rates: dict[tuple[str, float], Row],
) -> dict[tuple[str, float], list[Answer]]:
    """Answers by rule and share; fills `rates`.

    The first server stores the documents for all, and continues what is `asked`.
    """
    flags = _flags(args, pool, select)
    first = not _store(pool).exists()
    with pool.running(select, model, args.dtype, *flags) as server, step(f"{select}: asking"):
        for prompt in packs_of(asked, args.documents) if first else ():
            server.store(prompt, custom={"impress_blend": OFF})
        if args.answers_only:
            found = {way: _ask_together(server, asked, way[1], args) for way in ways}
        else:
            found = {way: [] for way in ways}
            for number, question in enumerate(asked):
                if first and args.continuation:
                    asked[number] = question = _continued(server, question, args.continuation)
                for way in ways:
                    found[way].append(_ask(server, question, way[1], args))
                    server.flush()
        for way in ways if args.clients else ():
            rates[way] = _rate(server, asked, way[1], args.clients)
        server.check_log()
    for way in ways:
        lacking = sum(not own.report["blended_tokens"] for own in found[way])
        if way[1] < 1.0 and lacking > FEW * len(asked):
            raise BenchFailed(f"{lacking} of {len(asked)} requests were not blended")
    return found


def packs_of(asked: Sequence[Question], size: int) -> Iterator[list[int]]:
    """Prompts with so many documents each, in which all stand once."""
    documents = list({tuple(own): own for question in asked for own in question.documents}.values())
    for start in range(0, len(documents), size):
        yield [*asked[0].head, *(token for own in documents[start : start + size] for token in own)]


def _continued(server: Server, question: Question, tokens: int) -> Question:
    """With what exact KVs give in the place of the right answer."""
    prompt = [*question.prompt(question.order), *question.question]
    said = server.generate(prompt, tokens, custom=_custom(1.0))
    # Else the first TTFT would be that of a hit in the pool.
    server.flush()
    return dataclasses.replace(question, answer=list(said["output_ids"]))


def _store(pool: Servers) -> Path:
    return pool.folder / "kv"


def _flags(args: argparse.Namespace, pool: Servers, select: str) -> list[str]:
    return [
        "--max-total-tokens=30000",
        "--enable-impress",
        "--impress-write-after=1",
        "--impress-load=always",
        "--impress-blend=0.15",
        # However slow the machine is, and short the passages, all questions are blended.
        "--impress-blend-seconds=60",
        "--impress-blend-min-tokens=1",
        f"--impress-blend-select={select}",
        f"--impress-ssd-dir={_store(pool)}",
        *args.server_flag,
    ]


def _on_drives(
    args: argparse.Namespace, pool: Servers, model: Any, select: str, asked: Sequence[Question]
) -> Iterator[Row]:
    """A row for each drive and share, in which `auto` is one."""
    if not args.ssd_mbps:
        return
    flags = [*_flags(args, pool, select), "--impress-host-gb=0", "--impress-device-gb=0"]
    with pool.running(f"{select}-drives", model, args.dtype, *flags) as server:
        for mbps in args.ssd_mbps:
            server.emulate_ssd(mbps)
            for share in (*args.shares, AUTO):
                with step(f"{select}: {share} at {mbps:g} MB/s"):
                    _timed(server, asked[0], share)
                    seconds = [_timed(server, own, share) for own in asked]
                yield {
                    "select": select,
                    "MB/s": mbps,
                    "share": share,
                    "TTFT": round(statistics.median(seconds), 4),
                    "seconds": [round(own, 4) for own in seconds],
                }
        server.check_log()


def _timed(server: Server, question: Question, share: float | str) -> float:
    """Seconds to the first token; nothing of it stays.

    Raises:
        BenchFailed: it was not blended.
    """
    prompt = [*question.prompt(question.order), *question.question]
    began = time.perf_counter()
    answer = server.generate(prompt, custom=_custom(share))
    seconds = time.perf_counter() - began
    server.flush()
    if not answer["meta_info"]["impress"]["blended_tokens"]:
        raise BenchFailed(f"a request was not blended: {answer['meta_info']['impress']}")
    return seconds


def _ask(server: Server, question: Question, share: float, args: argparse.Namespace) -> Answer:
    """One question with such a share; nothing of it is stored, but it may stay in the pool.

    Raises:
        BenchFailed: it asked for exact KVs and was blended.
    """
    prompt, custom = [*question.prompt(question.order), *question.question], _custom(share)
    said: list[Row] = []
    seconds = 0.0
    if not args.answers_only:
        began = time.perf_counter()
        said.append(
            server.generate(
                [*prompt, *question.answer],
                custom=custom,
                return_logprob=True,
                logprob_start_len=len(prompt) - 1,
                top_logprobs_num=TOP,
            )
        )
        seconds = time.perf_counter() - began
    if args.answer_tokens:
        said.append(server.generate(prompt, args.answer_tokens, custom=custom))
    first = said[0]["meta_info"]
    if first["impress"]["blended_tokens"] and share == 1.0:
        raise BenchFailed(f"an exact request was blended: {first['impress']}")
    return Answer(
        [dict(_likeliest(own)) for own in first.get("input_top_logprobs", ()) if own],
        sum(entry[0] for entry in first.get("input_token_logprobs", [None])[1:]),
        seconds,
        first["impress"],
        *score(said[-1]["text"] if args.answer_tokens else "", question.answers),
    )


def _ask_together(
    server: Server, asked: Sequence[Question], share: float, args: argparse.Namespace
) -> list[Answer]:
    """All questions with such a share, some at a time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda own: _ask(server, own, share, args), asked))
    server.flush()
    return answers


def _likeliest(entries: Sequence[Sequence[Any]]) -> Iterator[tuple[int, float]]:
    return ((entry[1], entry[0]) for entry in entries)


def _rate(server: Server, asked: Sequence[Question], share: float, clients: int) -> Row:
    """How fast several clients get the first tokens of all questions."""
    custom = _custom(share)
    prompts = [[*own.prompt(own.order), *own.question] for own in asked]
    server.flush()
    began = time.perf_counter()
    answers = server.first_tokens(prompts, at_once=clients, custom=custom)
    seconds = time.perf_counter() - began
    server.flush()
    return {
        "many": round(statistics.median(own for own, _ in answers), 4),
        "per s": round(len(prompts) / seconds, 3),
    }


def _custom(share: float | str) -> dict[str, Any]:
    """A request of which such a share is computed; nothing of it is stored."""
    if share == 1.0:
        return {"impress_store": False, "impress_blend": OFF, "impress_bits": EXACTLY}
    return {"impress_store": False, "impress_blend": share}


def _row(
    way: tuple[str, float],
    answers: Sequence[Answer],
    found: Mapping[tuple[str, float], Sequence[Answer]],
) -> Row:
    exact = found["", 1.0]
    right = [float(b.right) - a.right for a, b in zip(exact, answers, strict=True)]
    row = {
        "select": way[0],
        "share": way[1],
        "F1": _mean([one.f1 for one in answers]),
        "right": _mean([one.right for one in answers]),
        "right_difference": [_mean(right), *interval(right)],
        "blended": round(statistics.fmean(one.report["blended_tokens"] for one in answers)),
    }
    return row | (_distances(way, answers, found) if answers[0].distributions else {})


def _distances(
    way: tuple[str, float],
    answers: Sequence[Answer],
    found: Mapping[tuple[str, float], Sequence[Answer]],
) -> Row:
    """How far distributions are from the exact ones, and the TTFT."""
    exact, control = found["", 1.0], found.get((RANDOM, way[1]), ())
    own, reuse = _divergences(exact, answers), _divergences(exact, found["", 0.0])
    low, high = interval(own)
    same = [
        max(a, key=a.__getitem__) == max(b, key=b.__getitem__)
        for left, right in zip(exact, answers, strict=True)
        for a, b in zip(left.distributions, right.distributions, strict=True)
    ]
    row = {
        "KL": round(statistics.fmean(own), 5),
        "from": round(low, 5),
        "to": round(high, 5),
        "median": round(statistics.median(own), 5),
        "of reuse": round(1.0 - statistics.fmean(own) / statistics.fmean(reuse), 3),
        "loss": _mean([a.loglik - b.loglik for a, b in zip(exact, answers, strict=True)]),
        "agreement": _mean(same),
        "TTFT": round(statistics.median(one.seconds for one in answers), 4),
        "divergences": [round(one, 6) for one in own],
    }
    if control and way[0] != RANDOM:
        less = [a - b for a, b in zip(_divergences(exact, control), own, strict=True)]
        low, high = interval(less)
        row |= {"over random": _mean(less), "low": round(low, 4), "high": round(high, 4)}
    return row


def _divergences(exact: Sequence[Answer], found: Sequence[Answer]) -> list[float]:
    return [
        statistics.fmean(map(divergence, a.distributions, b.distributions))
        for a, b in zip(exact, found, strict=True)
    ]


def _mean(values: Sequence[float]) -> float:
    return round(statistics.fmean(values), 4)


def score(text: str, answers: Sequence[str]) -> tuple[float, bool]:
    """F1 of the words of a first line to the best of some answers, and whether it contains one.

    Words are compared as SQuAD does: in small letters, without punctuation and articles.
    """
    said = words(text.strip().split("\n")[0])
    best, contained = 0.0, False
    for answer in answers:
        wanted = words(answer)
        common = sum((Counter(said) & Counter(wanted)).values())
        best = max(best, 2 * common / max(len(said) + len(wanted), 1))
        contained |= f" {' '.join(wanted)} " in f" {' '.join(said)} "
    return best, contained


def words(text: str) -> list[str]:
    """What of a text counts."""
    plain_text = "".join(" " if own in string.punctuation else own for own in text.lower())
    return re.sub(r"\b(a|an|the)\b", " ", plain_text).split()


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
