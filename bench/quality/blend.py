"""Documents in another order: how far answers are from a full recompute, and what they cost.

Each question has some documents. All documents are stored once, several in a prompt. Then questions
are asked about them in another order, with each `--shares` of their tokens computed again: those
whose KVs deviate most. Share 0 reuses all as it is; share 1 computes everything and is exact.

KL         to the exact distributions before each of the next --continuation tokens that exact KVs
           give, in nats per token, over the 100 likeliest tokens and the rest, with a 95% interval
           over questions (bootstrap); *median*: of the questions
of reuse   how much of the KL of share 0 is gone
loss       of the log-likelihood of these tokens; with --continuation 0 all this is of the right
           answer, in place of them
agreement  of the likeliest token
F1, right  words that a greedy answer of --answer-tokens has in common with the right one (its best
           variant), and the share of answers that contain it; 95% intervals of the difference of
           `right` to the exact answers' are in the file
TTFT       the median, one request at a time

`musique_cacheblend` (with --data) has CacheBlend's own documents and questions.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import re
import statistics
import string
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench.core.data import SEPARATOR, Row, Tokenize, load_tokenize, model_folder, read_rows
from bench.core.options import DATA, DTYPE, KEEP, MODEL, SEED, SERVER_FLAG, Option
from bench.core.report import Result, Table, interval, plain
from bench.core.servers import Server, servers
from bench.core.session import BenchFailed, step
from impress_sglang.options import EXACTLY, OFF

OPTIONS = (
    Option("questions", 40, "how many", quick=2),
    Option("documents", 6, "of each question", quick=3),
    Option("tokens", 512, "of a document, at most", quick=200),
    Option("shares", (0.05, 0.15, 0.3), "of their tokens to compute again, beside 0 and 1"),
    Option(
        "continuation", 32, "tokens that exact KVs give, to compare; 0: the right answer", quick=8
    ),
    Option("answer-tokens", 12, "of answers that are generated; 0: none are", quick=4),
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
# Of the questions, such a share may have too short passages to be found, or find a whole prefix.
FEW = 0.05
FLAGS = (
    "--max-total-tokens=30000",
    "--enable-impress",
    "--impress-write-after=1",
    "--impress-load=always",
    "--impress-blend=0.15",
    # However slow the machine is, and short the passages, all questions are blended.
    "--impress-blend-seconds=60",
    "--impress-blend-min-tokens=1",
)
HEAD = f"Answer the question from these passages.{SEPARATOR}"
# Between the documents and the question: without them small models do not answer in few words.
SHOTS = (
    f"Question: What is the capital of France?\nAnswer: Paris{SEPARATOR}"
    f"Question: When did the Second World War end?\nAnswer: 1945{SEPARATOR}"
)


class Question(NamedTuple):
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

    def documents_in(self, order: Sequence[int]) -> list[int]:
        """The prompt up to the question, with documents in some order."""
        return [*self.head, *(token for number in order for token in self.documents[number])]

    @property
    def prompt(self) -> list[int]:
        """Up to the answer."""
        return [*self.documents_in(self.order), *self.question]


class Answer(NamedTuple):
    """What a server says before each token of the right answer, and when it begins to."""

    distributions: list[Distribution]
    loglik: float
    seconds: float
    blended_tokens: int
    f1: float
    right: bool


def run(args: argparse.Namespace) -> Result:
    """Ask all questions, once with each share.

    Raises:
        BenchFailed: too many were not blended.
    """
    model = model_folder(args.model)
    asked = draw(read_rows(args.data, args.set), load_tokenize(model), args)
    shares = tuple(dict.fromkeys((1.0, 0.0, *args.shares)))
    with servers(args) as pool:
        flags = [f"--impress-ssd-dir={pool.folder / 'kv'}", *FLAGS, *args.server_flag]
        with pool.running("blend", model, args.dtype, *flags) as server:
            with step("storing the documents"):
                for prompt in packs_of(asked, args.documents):
                    server.store(prompt, custom={"impress_blend": OFF})
            with step("asking"):
                if args.continuation:
                    asked = [_continued(server, own, args.continuation) for own in asked]
                found = ask_all(server, asked, shares, args)
            server.check_log()
    for share, answers in found.items():
        lacking = sum(not own.blended_tokens for own in answers)
        if share < 1.0 and lacking > FEW * len(asked):
            raise BenchFailed(f"{lacking} of {len(asked)} requests were not blended")
    rows = [_row(share, answers, found) for share, answers in found.items()]
    lengths = [len(own.documents_in(own.order)) for own in asked]
    figures = {"model": model.name, "prompt_tokens": lengths, "rows": rows}
    names = ("share", "KL", "from", "to", "median", "of reuse", "loss", "agreement")
    columns = plain(*names, "F1", "right", "blended", "TTFT")
    return Result(figures, [Table(columns, rows)])


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


def ask_all(
    server: Server, asked: Sequence[Question], shares: Sequence[float], args: argparse.Namespace
) -> dict[float, list[Answer]]:
    """Answers by share; each alone and to an empty pool."""
    found: dict[float, list[Answer]] = {share: [] for share in shares}
    for question, share in itertools.product(asked, shares):
        found[share].append(_ask(server, question, share, args))
        server.flush()
    return found


def packs_of(asked: Sequence[Question], size: int) -> Iterator[list[int]]:
    """Prompts with so many documents each, in which all stand once."""
    documents = list({tuple(own): own for question in asked for own in question.documents}.values())
    for start in range(0, len(documents), size):
        yield [*asked[0].head, *(token for own in documents[start : start + size] for token in own)]


def _continued(server: Server, question: Question, tokens: int) -> Question:
    """With what exact KVs give in the place of the right answer."""
    said = server.generate(question.prompt, tokens, custom=_custom(1.0))
    # Else the first TTFT would be that of a hit in the pool.
    server.flush()
    return question._replace(answer=list(said["output_ids"]))


def _ask(server: Server, question: Question, share: float, args: argparse.Namespace) -> Answer:
    """One question with such a share; nothing of it is stored, but it may stay in the pool.

    Raises:
        BenchFailed: it asked for exact KVs and was blended.
    """
    prompt, custom = question.prompt, _custom(share)
    began = time.perf_counter()
    start, whole = len(prompt) - 1, [*prompt, *question.answer]
    logs = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": TOP}
    said: list[Row] = [server.generate(whole, custom=custom, **logs)]
    seconds = time.perf_counter() - began
    if args.answer_tokens:
        said.append(server.generate(prompt, args.answer_tokens, custom=custom))
    first = said[0]["meta_info"]
    blended = first["impress"]["blended_tokens"]
    if blended and share == 1.0:
        raise BenchFailed(f"an exact request was blended: {first['impress']}")
    tops = [own for own in first.get("input_top_logprobs", ()) if own]
    return Answer(
        [{entry[1]: entry[0] for entry in own} for own in tops],
        sum(entry[0] for entry in first.get("input_token_logprobs", [None])[1:]),
        seconds,
        blended,
        *score(said[-1]["text"] if args.answer_tokens else "", question.answers),
    )


def _custom(share: float) -> dict[str, Any]:
    """A request of which such a share is computed; nothing of it is stored."""
    if share == 1.0:
        return {"impress_store": False, "impress_blend": OFF, "impress_bits": EXACTLY}
    return {"impress_store": False, "impress_blend": share}


def _row(share: float, answers: Sequence[Answer], found: Mapping[float, Sequence[Answer]]) -> Row:
    exact = found[1.0]
    right = [float(b.right) - a.right for a, b in zip(exact, answers, strict=True)]
    row = {
        "share": share,
        "F1": _mean([one.f1 for one in answers]),
        "right": _mean([one.right for one in answers]),
        "right_difference": [_mean(right), *interval([right])],
        "blended": round(statistics.fmean(one.blended_tokens for one in answers)),
    }
    own, reuse = _divergences(exact, answers), _divergences(exact, found[0.0])
    low, high = interval([own])
    same = [
        max(a, key=a.__getitem__) == max(b, key=b.__getitem__)
        for left, right in zip(exact, answers, strict=True)
        for a, b in zip(left.distributions, right.distributions, strict=True)
    ]
    return row | {
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
