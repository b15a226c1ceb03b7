"""Documents in another order: how far answers are from a full recompute, and what they cost.

Each question has some documents. All documents are stored once, several in a prompt. Then questions
are asked about them in another order, with each `--shares` of their tokens computed again: those
whose KVs deviate most. Share 0 reuses all as it is; share 1 computes everything and is exact.

KL         to the exact distributions before each of the next --continuation tokens that exact KVs
           give, in nats per token, over the 100 likeliest tokens and the rest, with a 95% interval
           over questions (bootstrap)
F1, right  words that a greedy answer of --answer-tokens has in common with the right one (its best
           variant), and the share of answers that contain it; 95% intervals of the difference of
           `right` to the exact answers' are in the file
TTFT       the median, one request at a time

`musique_cacheblend` (with --data) has CacheBlend's own documents and questions.
"""

from __future__ import annotations

import argparse
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
from bench.core.options import ASKING, Option
from bench.core.report import Result, Table, interval
from bench.core.servers import Server, servers
from bench.core.session import BenchFailed, step
from impress_sglang.config import EXACTLY, OFF

OPTIONS = (
    Option("questions", 40, "how many", quick=2),
    Option("documents", 6, "of each question", quick=3),
    Option("tokens", 512, "of a document, at most", quick=200),
    Option("shares", (0.05, 0.15, 0.3), "of their tokens to compute again, beside 0 and 1"),
    Option("continuation", 32, "tokens that exact KVs give, to compare", quick=8),
    Option("answer-tokens", 12, "of answers that are generated; 0: none are", quick=4),
    Option("set", "squad_xquad_en", "data set with documents, questions and answers"),
    *ASKING,
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
    """Tokens of a prompt: its documents, of which an order is stored, and the right answers."""

    head: list[int]
    documents: list[list[int]]
    order: list[int]
    """In which they are asked about; they are stored in another one."""
    question: list[int]
    answers: list[str]

    def documents_in(self, order: Sequence[int]) -> list[int]:
        """The prompt up to the question, with documents in some order."""
        return [*self.head, *(token for number in order for token in self.documents[number])]

    @property
    def prompt(self) -> list[int]:
        """Up to the answer."""
        return [*self.documents_in(self.order), *self.question]


class Answer(NamedTuple):
    """What a server says before each token that exact KVs give, and when it begins to."""

    distributions: list[Distribution]
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
                found = ask_all(server, asked, shares, args)
            server.check_log()
    for share, answers in found.items():
        lacking = sum(not answer.blended_tokens for answer in answers)
        if share < 1.0 and lacking > FEW * len(asked):
            raise BenchFailed(f"{lacking} of {len(asked)} requests were not blended")
    rows = [_row(share, answers, found[1.0]) for share, answers in found.items()]
    lengths = [len(question.documents_in(question.order)) for question in asked]
    figures = {"model": model.name, "prompt_tokens": lengths, "rows": rows}
    return Result(figures, [Table(rows)])


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
        question = tokenize(f"{SHOTS}Question: {row['question']}\nAnswer:")
        answers = row["answers"]
        answers = list(answers if isinstance(answers, list) else answers["text"])
        questions.append(Question(tokenize(HEAD), documents, order, question, answers))
    return questions


def ask_all(
    server: Server, asked: Sequence[Question], shares: Sequence[float], args: argparse.Namespace
) -> dict[float, list[Answer]]:
    """Answers by share; each alone and to an empty pool."""
    found: dict[float, list[Answer]] = {share: [] for share in shares}
    for question in asked:
        said = server.generate(question.prompt, args.continuation, custom=_custom(1.0))
        server.flush()
        for share, answers in found.items():
            answers.append(_ask(server, question, said["output_ids"], share, args.answer_tokens))
            server.flush()
    return found


def packs_of(asked: Sequence[Question], size: int) -> Iterator[list[int]]:
    """Prompts with so many documents each, in which all stand once."""
    documents = list(
        {
            tuple(document): document for question in asked for document in question.documents
        }.values()
    )
    for start in range(0, len(documents), size):
        yield [
            *asked[0].head,
            *(token for document in documents[start : start + size] for token in document),
        ]


def _ask(
    server: Server, question: Question, continuation: list[int], share: float, answer_tokens: int
) -> Answer:
    """One question with such a share; nothing of it is stored, but it may stay in the pool.

    Raises:
        BenchFailed: it asked for exact KVs and was blended.
    """
    prompt, custom = question.prompt, _custom(share)
    began = time.perf_counter()
    logs = {"return_logprob": True, "logprob_start_len": len(prompt) - 1, "top_logprobs_num": TOP}
    first = server.generate([*prompt, *continuation], custom=custom, **logs)["meta_info"]
    seconds = time.perf_counter() - began
    blended = first["impress"]["blended_tokens"]
    if blended and share == 1.0:
        raise BenchFailed(f"an exact request was blended: {first['impress']}")
    text = ""
    if answer_tokens:
        text = server.generate(prompt, answer_tokens, custom=custom)["text"]
    tops = [top for top in first["input_top_logprobs"] if top]
    distributions = [{entry[1]: entry[0] for entry in top} for top in tops]
    return Answer(distributions, seconds, blended, *score(text, question.answers))


def _custom(share: float) -> dict[str, Any]:
    """A request of which such a share is computed; nothing of it is stored."""
    if share == 1.0:
        return {"impress_store": False, "impress_blend": OFF, "impress_bits": EXACTLY}
    return {"impress_store": False, "impress_blend": share}


def _row(share: float, answers: Sequence[Answer], exact: Sequence[Answer]) -> Row:
    right = [float(b.right) - a.right for a, b in zip(exact, answers, strict=True)]
    divergences = [
        statistics.fmean(map(divergence, a.distributions, b.distributions))
        for a, b in zip(exact, answers, strict=True)
    ]
    low, high = interval([divergences])
    return {
        "share": share,
        "KL": round(statistics.fmean(divergences), 5),
        "from": round(low, 5),
        "to": round(high, 5),
        "F1": round(statistics.fmean(one.f1 for one in answers), 4),
        "right": round(statistics.fmean(one.right for one in answers), 4),
        "right_difference": [round(statistics.fmean(right), 4), *interval([right])],
        "blended": round(statistics.fmean(one.blended_tokens for one in answers)),
        "TTFT": round(statistics.median(one.seconds for one in answers), 4),
        "divergences": [round(one, 6) for one in divergences],
    }


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
    plain_text = "".join(" " if letter in string.punctuation else letter for letter in text.lower())
    return re.sub(r"\b(a|an|the)\b", " ", plain_text).split()


def divergence(exact: Distribution, found: Distribution) -> float:
    """KL in nats over the tokens that both name, and all others as one."""
    common = exact.keys() & found.keys()
    total = sum(math.exp(exact[token]) * (exact[token] - found[token]) for token in common)
    rest, other = (
        max(1e-9, 1.0 - sum(math.exp(named[token]) for token in common)) for named in (exact, found)
    )
    return total + rest * math.log(rest / other)
