"""Answers that need more of a prefix than the question touches: exact, in few bits, and dropped.

    python -m bench decode [--new 64 --json FILE]

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
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.core.machine import describe_machine
from bench.core.session import Tokenize, load_tokenize
from demo.handbook import prompt
from demo.model import model_path
from tests.serving.harness import Server, running

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--model", type=Path, help="default: the demo model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    model = args.model or model_path()
    prompts = questions(load_tokenize(model))
    with tempfile.TemporaryDirectory(prefix="decode-", dir=Path.cwd()) as folder:
        answers = _ask_all(args, model, prompts, Path(folder))
    rows = [compare(name, answers["exact"], own) for name, own in answers.items()]
    result = {
        "command": " ".join(["python -m bench decode", *sys.argv[1:]]),
        "machine": describe_machine(),
        "questions": len(prompts),
        "new_tokens": args.new,
        "rows": rows,
        "answers": answers,
    }
    Console(width=100).print(make_table(rows))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def questions(tokenize: Tokenize) -> list[list[int]]:
    """Prompts with the handbook, whose questions ask for two places of it."""
    return [
        tokenize(prompt(f"First say {first}, then quote word by word {then}."))
        for first, then in PAIRS
    ]


def _ask_all(
    args: argparse.Namespace, model: Path, prompts: list[list[int]], folder: Path
) -> dict[str, list[list[int]]]:
    flags = (
        f"--dtype={args.dtype}",
        "--max-total-tokens=16384",
        "--max-running-requests=4",
        "--enable-impress",
        "--impress-load=always",
        f"--impress-ssd-dir={folder / 'kv'}",
    )
    found: dict[str, list[list[int]]] = {name: [] for name in WISHES}
    with running(model, folder / "server.log", *flags, zygote=None) as server:
        server.generate(prompts[0], 1)
        for own in prompts:
            for name, wish in WISHES.items():
                server.flush()
                found[name].append(_ask(server, own, args.new, wish))
        server.assert_quiet()
    return found


def _ask(server: Server, tokens: list[int], new: int, wish: dict[str, Any]) -> list[int]:
    answer = server.generate(tokens, new, sampling_params={"custom_params": wish})
    assert answer["meta_info"]["impress"]["path"] == "ssd"
    output: list[int] = answer["output_ids"]
    return output


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


def make_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A row for each way to have the prefix."""
    table = Table(title="Answers beyond what the question touches", box=box.SIMPLE)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    return table


if __name__ == "__main__":
    sys.exit(main())
