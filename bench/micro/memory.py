"""What a server takes of memory while many requests load long prefixes at once.

Distinct prefixes are computed one after the other, the device pool is emptied, and then all
clients ask at the same time, each a question after a prefix of its own. The resident memory of the
scheduler's process (here also that of the device: a CPU) is looked at all the time, in a stock
server and in ours. What ours takes beyond stock must be what its options say: the caches and the
buffer. The model is made up, with few and narrow layers: what counts is the size of a token's KVs,
and computing the prefixes is what takes the time.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from pathlib import Path

import numpy as np
import psutil

from bench.core.data import make_model
from bench.core.options import KEEP, SERVER_FLAG, Option
from bench.core.report import Result, Table, plain
from bench.core.servers import OURS, STOCK, Server, Servers, servers
from bench.core.session import BenchFailed, step

OPTIONS = (
    Option("clients", 32, "that ask at the same time", quick=3),
    Option("prefix-tokens", 7000, "of each", quick=600),
    Option("device-gb", 0.2, "device cache"),
    Option("host-gb", 0.3, "host cache"),
    Option("buffer-gb", 0.1, "memory that reads fill"),
    SERVER_FLAG,
    KEEP,
)
QUESTION_TOKENS = 48
LOOK_SECONDS = 0.02
VOCAB = 1000
# 12 KB of KVs per token, in float32.
SHAPE = {
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32768,
}


def run(args: argparse.Namespace) -> Result:
    """Measure stock and ours, one after the other."""
    with servers(args) as pool:
        model = make_model(pool.folder / "model", **SHAPE)
        stock = _measure(args, pool, model, ours=False)
        ours = _measure(args, pool, model, ours=True)
    allowed = args.device_gb + args.host_gb + args.buffer_gb
    figures = {
        "model": SHAPE,
        "stock_gb": stock,
        "ours_gb": ours,
        "options_gb": allowed,
        "beyond_stock_gb": round(ours["together"] - stock["together"], 3),
        "of_all": round(ours["together"] / (stock["together"] + allowed), 3),
    }
    caption = (
        f"most resident memory in GB; beyond stock {figures['beyond_stock_gb']}, by its options "
        f"{allowed:.2f}; {figures['of_all']} of stock and options"
    )
    rows = [{"server": "stock", **stock}, {"server": "ours", **ours}]
    return Result(figures, [Table(plain(*rows[0]), rows, caption)])


def _measure(
    args: argparse.Namespace, pool: Servers, model: Path, *, ours: bool
) -> dict[str, float]:
    """Most resident memory in GB, until the server is up and by the end of each phase."""
    flags = [
        "--skip-tokenizer-init",
        f"--max-total-tokens={args.clients * (args.prefix_tokens + 2 * QUESTION_TOKENS)}",
        f"--max-running-requests={args.clients}",
    ]
    if ours:
        flags += [
            "--enable-impress",
            "--impress-write-after=1",
            "--impress-load=always",
            f"--impress-device-gb={args.device_gb}",
            f"--impress-host-gb={args.host_gb}",
            f"--impress-buffer-gb={args.buffer_gb}",
            f"--impress-ssd-dir={pool.folder / 'kv'}",
            *args.server_flag,
        ]
    rng = np.random.default_rng(7)
    prefixes = rng.integers(3, VOCAB, (args.clients, args.prefix_tokens)).tolist()
    questions = rng.integers(3, VOCAB, (args.clients, QUESTION_TOKENS)).tolist()
    name, preload = ("ours", OURS) if ours else ("stock", STOCK)
    with (
        pool.running(name, model, "float32", *flags, preload=preload) as server,
        contextlib.closing(_Watch(server)) as watch,
        step(f"{name}: measuring"),
    ):
        found = {"start": watch.mark()}
        for prefix in prefixes:
            server.generate(prefix)
        found["computed"] = watch.mark()
        server.flush()
        watch.mark()
        prompts = [[*prefix, *new] for prefix, new in zip(prefixes, questions, strict=True)]
        began = time.perf_counter()
        answers = server.generate_together(prompts, 4)
        found["together"] = watch.mark()
        found["seconds"] = round(time.perf_counter() - began, 1)
        server.check_log()
    if ours:
        loaded = [answer["meta_info"]["impress"]["prefix_tokens"] for answer in answers]
        if min(loaded) <= args.prefix_tokens - 128:
            raise BenchFailed(f"not all prefixes were loaded: {sorted(loaded)}")
    return found


class _Watch:
    """The largest resident memory of a server's scheduler, its largest process."""

    def __init__(self, server: Server) -> None:
        main_process = psutil.Process(server.pid)
        tree = [main_process, *main_process.children(recursive=True)]
        self._process = max(tree, key=lambda process: process.memory_info().rss)
        self._most = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join()

    def mark(self) -> float:
        """The most since the last mark, in GB."""
        most, self._most = max(self._most, self._process.memory_info().rss), 0
        return round(most / 1e9, 3)

    def _look(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._most = max(self._most, self._process.memory_info().rss)
