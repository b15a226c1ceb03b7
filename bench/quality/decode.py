"""Answers that need more of a prefix than the question touches: exact, in few bits, and dropped.

Questions about the demo's handbook of 3,000 tokens: "first ..., then quote ...". What bits a prefix
has, and which tokens of it stay, is decided by the question; the quote is decoded with that. Each
question is asked with the prefix as it was computed, in 5 bits, and with a quarter of its tokens,
each time read back from SSD.

`same` is how many tokens an answer has in common with the exact one before they part, of those that
were asked for; `alike` the share of the exact answer's tokens that stand in the same order in both;
`equal` how many answers are the same to the end.
"""

from __future__ import annotations

import argparse
import difflib
import statistics
from pathlib import Path
from typing import Any

from bench.core.data import Tokenize, load_tokenize, model_folder
from bench.core.options import DTYPE, KEEP, MODEL, Option
from bench.core.report import Result, Table, plain
from bench.core.servers import Servers, servers
from bench.core.session import BenchFailed, step
from demo.handbook import prompt

WISHES: dict[str, dict[str, Any]] = {
    "exact": {"impress_bits": "exact"},
    "5 bits": {"impress_bits": 5},
    "a quarter": {"impress_retention": 0.25, "impress_bits": 5},
}
PAIRS = (
    ("when does the workshop open", "what is said about the company dog"),
    ("who meets visitors", "what is said about Brass"),
    ("when are salaries paid", "what is said about bicycles"),
    ("who lives above the stable", "what is said about the choir"),
    ("how is glass from Murano stored", "what is said about the winter model"),
    ("who built her first lantern in a fishing boat", "what is said about lunch"),
    ("when does the mail boat leave", "what is said about new apprentices"),
    ("what does one get for a mistake in the handbook", "what is said about ladders"),
    ("where is oil kept", "what is said about parcels for the mountains"),
    ("what is in the iron cabinet", "what is said about hot chocolate"),
    ("what happens in case of fire", "what is said about holidays"),
    ("what do divers have", "what is said about broken windows"),
)
OPTIONS = (
    Option("questions", len(PAIRS), "how many", quick=1),
    Option("new", 64, "tokens of each answer", quick=8),
    MODEL,
    DTYPE,
    KEEP,
)


def run(args: argparse.Namespace) -> Result:
    """Ask all questions in all ways."""
    model = model_folder(args.model)
    prompts = questions(load_tokenize(model))[: args.questions]
    with servers(args) as pool:
        answers = _ask_all(args, pool, model, prompts)
    rows = [compare(name, answers["exact"], own) for name, own in answers.items()]
    figures = {
        "questions": len(prompts),
        "new_tokens": args.new,
        "rows": rows,
        "answers": answers,
    }
    return Result(figures, [Table(plain(*rows[0]), rows)])


def questions(tokenize: Tokenize) -> list[list[int]]:
    """Prompts with the handbook, whose questions ask for two places of it."""
    return [
        tokenize(prompt(f"First say {first}, then quote word by word {then}."))
        for first, then in PAIRS
    ]


def _ask_all(
    args: argparse.Namespace, pool: Servers, model: Path, prompts: list[list[int]]
) -> dict[str, list[list[int]]]:
    flags = (
        "--max-total-tokens=16384",
        "--max-running-requests=4",
        "--enable-impress",
        "--impress-write-after=1",
        "--impress-load=always",
        f"--impress-ssd-dir={pool.folder / 'kv'}",
    )
    found: dict[str, list[list[int]]] = {name: [] for name in WISHES}
    with pool.running("server", model, args.dtype, *flags) as server, step("asking"):
        server.generate(prompts[0])
        for own in prompts:
            for name, wanted in WISHES.items():
                server.flush()
                answer = server.generate(own, args.new, custom=wanted)
                if answer["meta_info"]["impress"]["path"] != "ssd":
                    raise BenchFailed("a prefix was not read from SSD")
                found[name].append(answer["output_ids"])
        server.check_log()
    return found


def compare(name: str, exact: list[list[int]], found: list[list[int]]) -> dict[str, Any]:
    """How near answers are to the exact ones."""
    same, alike = [], []
    for one, other in zip(exact, found, strict=True):
        pairs = list(zip(one, other, strict=True))
        same.append(next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs)))
        blocks = difflib.SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
        alike.append(sum(block.size for block in blocks) / len(one))
    return {
        "prefix": name,
        "same": round(statistics.fmean(same), 1),
        "alike": round(statistics.fmean(alike), 3),
        "equal": sum(one == other for one, other in zip(exact, found, strict=True)),
    }
