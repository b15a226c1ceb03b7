"""What a server takes of memory while many requests load long prefixes at once.

    python -m bench memory [--clients 32 --prefix-tokens 7000 --json FILE]

Distinct prefixes are computed one after the other, the device pool is emptied, and then all
clients ask at the same time, each a question after a prefix of its own. The resident memory of the
scheduler's process (here also that of the device: a CPU) is looked at all the time, in a stock
server and in ours. What ours takes beyond stock must be what its options say: the caches and the
buffer. The model is made up, with few and narrow layers: what counts is the size of a token's KVs,
and computing the prefixes is what takes the time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from bench.core.machine import describe_machine
from tests.serving.harness import Server, running
from tests.serving.tiny_models import VOCAB, make_model

QUESTION_TOKENS = 48
LOOK_SECONDS = 0.02
# 12 KB of KVs per token, in float32.
SHAPE = {
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_size": 64,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    args = _parse(arguments)
    with tempfile.TemporaryDirectory(prefix="memory-", dir=Path.cwd()) as folder:
        model = make_model("llama", Path(folder) / "model", **SHAPE)
        stock = _measure(args, model, Path(folder), ours=False)
        ours = _measure(args, model, Path(folder), ours=True)
    allowed = args.device_gb + args.host_gb + args.buffer_gb
    result = {
        "command": " ".join(["python -m bench memory", *sys.argv[1:]]),
        "machine": describe_machine(),
        "model": SHAPE,
        "stock_gb": stock,
        "ours_gb": ours,
        "options_gb": allowed,
        "beyond_stock_gb": round(ours["together"] - stock["together"], 3),
        "of_all": round(ours["together"] / (stock["together"] + allowed), 3),
    }
    Console(width=100).print(make_table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--prefix-tokens", type=int, default=7000)
    parser.add_argument("--device-gb", type=float, default=0.2)
    parser.add_argument("--host-gb", type=float, default=0.3)
    parser.add_argument("--buffer-gb", type=float, default=0.1)
    parser.add_argument(
        "--server-flag", action="append", default=[], help="one more, e.g. --impress-retention=0.25"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def _measure(
    args: argparse.Namespace, model: Path, folder: Path, *, ours: bool
) -> dict[str, float]:
    """Most resident memory in GB, until the server is up and by the end of each phase."""
    slots = args.clients * (args.prefix_tokens + 2 * QUESTION_TOKENS)
    flags = [
        "--dtype=float32",
        "--skip-tokenizer-init",
        f"--max-total-tokens={slots}",
        f"--max-running-requests={args.clients}",
    ]
    if ours:
        flags += [
            "--enable-impress",
            "--impress-load=always",
            f"--impress-device-gb={args.device_gb}",
            f"--impress-host-gb={args.host_gb}",
            f"--impress-buffer-gb={args.buffer_gb}",
            f"--impress-ssd-dir={folder / 'kv'}",
            *args.server_flag,
        ]
    rng = np.random.default_rng(7)
    prefixes = rng.integers(3, VOCAB, (args.clients, args.prefix_tokens)).tolist()
    questions = rng.integers(3, VOCAB, (args.clients, QUESTION_TOKENS)).tolist()
    log = folder / ("ours.log" if ours else "stock.log")
    with running(model, log, *flags, zygote=None, stock=not ours) as server, _watched(server) as w:
        found = {"start": w.mark()}
        for prefix in prefixes:
            server.generate(prefix, 1)
        found["computed"] = w.mark()
        server.flush()
        w.mark()
        prompts = [[*own, *new] for own, new in zip(prefixes, questions, strict=True)]
        began = time.perf_counter()
        answers = server.generate_together(prompts, 4)
        found["together"] = w.mark()
        found["seconds"] = round(time.perf_counter() - began, 1)
        server.assert_quiet()
        if ours:
            _check_loaded(answers, args.prefix_tokens)
    return found


def _check_loaded(answers: Sequence[dict[str, Any]], prefix_tokens: int) -> None:
    loaded = [answer["meta_info"]["impress"]["prefix_tokens"] for answer in answers]
    assert min(loaded) > prefix_tokens - 128, f"not all prefixes were loaded: {sorted(loaded)}"


class _Watch:
    """The largest resident memory of a process since the last mark."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._most = 0
        self.ended = threading.Event()

    def run(self) -> None:
        """Until `ended`."""
        while not self.ended.wait(LOOK_SECONDS):
            self._most = max(self._most, self._process.memory_info().rss)

    def mark(self) -> float:
        """In GB; what comes later counts anew."""
        most, self._most = max(self._most, self._process.memory_info().rss), 0
        return round(most / 1e9, 3)


@contextmanager
def _watched(server: Server) -> Iterator[_Watch]:
    """Looks at the scheduler, which is the largest process of a server."""
    main_process = psutil.Process(server.process.pid)
    tree = [main_process, *main_process.children(recursive=True)]
    watch = _Watch(max(tree, key=lambda own: own.memory_info().rss))
    thread = threading.Thread(target=watch.run, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        watch.ended.set()
        thread.join()


def make_table(result: dict[str, Any]) -> Table:
    """A row for each server."""
    table = Table(title="Most resident memory, GB", box=box.SIMPLE)
    for name in ("server", *result["stock_gb"]):
        table.add_column(name, justify="right")
    for name in ("stock_gb", "ours_gb"):
        table.add_row(name.removesuffix("_gb"), *(f"{own:,}" for own in result[name].values()))
    table.caption = (
        f"beyond stock {result['beyond_stock_gb']} GB, by its options {result['options_gb']:.2f}; "
        f"{result['of_all']:.3f} of stock and options"
    )
    return table


if __name__ == "__main__":
    sys.exit(main())
