"""Conversations that leave the device after each turn: how far answers drift from exact KVs.

    python -m bench drift [--conversations 12 --turns 8 --json FILE]

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
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.core.machine import describe_machine
from bench.core.session import Tokenize, load_tokenize
from bench.policies.serving_options import DEFAULT_DATA
from bench.quality.data import read_rows
from demo.model import model_path
from tests.serving.harness import Server, running

DATA_SET = "mtbench101"
# So short that a first turn is a prefix.
MIN_PREFIX_TOKENS = 64
LEAST_TURN_TOKENS = 64

Turn = tuple[list[int], list[int]]
"""Tokens of a question with its marks, and of the answer."""
Distribution = Mapping[int, float]
"""Log-probabilities of the likeliest tokens."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    args = _parse(arguments)
    began = time.monotonic()
    model = args.model or model_path()
    talks = conversations(
        read_rows(args.data, DATA_SET), load_tokenize(model), args.conversations, args.turns
    )
    with tempfile.TemporaryDirectory(prefix="drift-", dir=Path.cwd()) as folder:
        exact = _ask_all(args, model, talks, Path(folder), ours=False)
        found = _ask_all(args, model, talks, Path(folder), ours=True)
    rows = [_row(number, exact, found) for number in range(args.turns)]
    result = {
        "command": " ".join(["python -m bench drift", *sys.argv[1:]]),
        "machine": describe_machine(),
        "model": str(model.name),
        "history_tokens": [sum(map(_length, talk[:-1])) for talk in talks],
        "seconds": round(time.monotonic() - began),
        "rows": rows,
    }
    Console(width=100).print(make_table(rows))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench drift",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--top", type=int, default=100)
    parser.add_argument("--data", default=DEFAULT_DATA)
    parser.add_argument("--model", type=Path, help="default: the demo model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--server-flag", action="append", default=[], help="one more, e.g. --impress-bits=6"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def conversations(
    rows: Sequence[Mapping[str, Any]], tokenize: Tokenize, count: int, turns: int
) -> list[list[Turn]]:
    """Dialogues about the same kind of task, one after another, as turns of tokens."""
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
        assert len(talks) > before, "there are not so many conversations"
    return talks


def _length(turn: Turn) -> int:
    return len(turn[0]) + len(turn[1])


def _ask_all(
    args: argparse.Namespace, model: Path, talks: list[list[Turn]], folder: Path, *, ours: bool
) -> list[list[dict[str, Any]]]:
    """Answers of each turn of each conversation."""
    flags = [f"--dtype={args.dtype}", "--max-total-tokens=30000", "--max-running-requests=8"]
    if ours:
        flags += [
            "--enable-impress",
            "--impress-load=always",
            f"--impress-min-prefix-tokens={MIN_PREFIX_TOKENS}",
            f"--impress-ssd-dir={folder / 'kv'}",
            *args.server_flag,
        ]
    log = folder / ("ours.log" if ours else "stock.log")
    with running(model, log, *flags, zygote=None, stock=not ours) as server:
        found = []
        for talk in talks:
            history: list[int] = []
            answers = []
            for question, answer in talk:
                start = len(history) + len(question)
                history = [*history, *question, *answer]
                answers.append(_ask(server, history, start, args.top))
                if ours:
                    server.flush()
            found.append(answers)
        if ours:
            server.assert_quiet()
    return found


def _ask(server: Server, tokens: list[int], start: int, top: int) -> dict[str, Any]:
    """Distributions before each token from `start` on, and the report."""
    (found,) = server.generate_together(
        [tokens],
        1,
        return_logprob=True,
        logprob_start_len=start - 1,
        top_logprobs_num=top,
    )
    meta = found["meta_info"]
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


def make_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each turn."""
    table = Table(title="Drift, turn by turn", box=box.SIMPLE)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{value:,}" for value in row.values()))
    return table


if __name__ == "__main__":
    sys.exit(main())
