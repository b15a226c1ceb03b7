"""Retention 1.0 against stock SGLang on a real model: same tokens, same log-probabilities.

    python -m bench.equality [--dtype float32] [--prompts 20] [--new 32]

Prompts of 500 to 4,000 tokens of text, greedy, in batches of five. Stock SGLang answers each twice
(cold and cached) with the same rectangular attention; IMPRESS computes them, gives them up, and
answers from SSD. Prints the number of answers that differ and the largest difference of the
log-probabilities of output tokens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.machine import describe_machine
from demo.model import model_path
from tests.serving.harness import Server, running

Answer = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="default: the demo model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--longest", type=int, default=4000)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--batch", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = args.model or model_path()
    prompts = make_prompts(model, args.prompts, args.longest)
    with tempfile.TemporaryDirectory() as folder:
        result = _compare(args, model, prompts, Path(folder))
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


def make_prompts(model: Path, count: int, longest: int) -> list[list[int]]:
    """Text of different lengths, from the licences and documents that packages ship."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = Path(__file__).parents[1].joinpath("LICENSE").read_text()
    docs = sorted(Path(__file__).parents[1].glob("docs/*.md"))
    corpus = "\n".join([text, *(path.read_text() for path in docs)])
    ids: list[int] = tokenizer(corpus)["input_ids"]
    ids = ids * (1 + (longest + 997 * count) // len(ids))
    lengths = [500 + (longest - 500) * i // max(1, count - 1) for i in range(count)]
    return [ids[997 * i : 997 * i + length] for i, length in enumerate(lengths)]


def _compare(
    args: argparse.Namespace, model: Path, prompts: list[list[int]], folder: Path
) -> dict[str, Any]:
    flags = (f"--dtype={args.dtype}", "--max-total-tokens=30000", "--max-running-requests=8")
    began = time.time()
    with running(model, folder / "stock.log", *flags, zygote=None, stock=True) as stock:
        cold, cached = [], []
        for batch in _batches(prompts, args.batch):
            cold += _ask(stock, batch, args.new)
            cached += _ask(stock, batch, args.new)
    ours = (
        *flags,
        "--enable-impress",
        "--impress-load=always",
        f"--impress-ssd-dir={folder / 'kv'}",
        "--impress-bits=exact",
    )
    with running(model, folder / "impress.log", *ours, zygote=None) as server:
        stored = []
        for batch in _batches(prompts, args.batch):
            _ask(server, batch, 1)
            server.flush()
            stored += _ask(server, batch, args.new)
        server.assert_quiet()
    assert {a["meta_info"]["impress"]["path"] for a in stored} == {"ssd"}
    return {
        "command": "python -m bench.equality",
        "machine": describe_machine(),
        "dtype": args.dtype,
        "prompts": len(prompts),
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "new_tokens": args.new,
        "seconds": round(time.time() - began),
        "stock_cold_to_ssd": distance(cold, stored),
        "stock_cached_to_ssd": distance(cached, stored),
        "stock_cached_to_stock_cold": distance(cached, cold),
    }


def distance(left: Sequence[Answer], right: Sequence[Answer]) -> dict[str, float]:
    """Answers that differ, tokens after a first difference, and log-probabilities before it."""
    different, tokens, largest = 0, 0, 0.0
    for a, b in zip(left, right, strict=True):
        pairs = list(zip(a["output_ids"], b["output_ids"], strict=True))
        same = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
        different += same < len(pairs)
        tokens += len(pairs) - same
        logprobs = zip(_logprobs(a)[:same], _logprobs(b)[:same], strict=True)
        largest = max([largest, *(abs(x - y) for x, y in logprobs)])
    return {
        "answers_that_differ": different,
        "tokens_after_first_difference": tokens,
        "max_logprob_difference": largest,
    }


def _logprobs(answer: Answer) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def _ask(server: Server, batch: list[list[int]], new_tokens: int) -> list[Answer]:
    return server.generate_together(batch, new_tokens, return_logprob=True)


def _batches(prompts: list[list[int]], size: int) -> list[list[list[int]]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


if __name__ == "__main__":
    main()
