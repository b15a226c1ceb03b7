"""TTFT of stored prefixes with the shapes of real models on this machine, without SGLang.

A small engine runs layers with a model's shapes and random weights, and the product's own store and
loader bring the prefixes, before the pass as a load job does (a server can begin the pass before
the last layers are there, which is not done here). Files are real ones in --ssd-dir, read with
O_DIRECT where there is that; --ssd-mbps slows the drive down. All policies serve the same requests
one at a time, on the same prefixes, of normally distributed popularity.

  recompute  prefix and question are computed, of the first six requests
  as         the exact prefix is loaded
  impress    the prefix in few bits

The warm-up loads and runs no model. Cache sizes are shares of the KVs of all prefixes. Columns:
TTFT in ms, of it what loading took, and of that finding and opening the prefix and waiting for the
drive; MB from the drive per request, and the share of chunks by the tier where they were found.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.core.emulation import SlowFileSystem
from bench.core.options import SEED, Option, one_of
from bench.core.report import Result, Row, Table, ratio
from bench.core.session import BenchFailed, step, work_folder
from bench.engine.model import MODELS, Model
from bench.policies.trace import MIN_SIGMA, draw_prefixes
from impress_sglang.codes.coding import Rows
from impress_sglang.config import ImpressConfig
from impress_sglang.storage.files import install
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.writing import Offer, StoreOutcome
from impress_sglang.transfer.codecs import plain_codec, warm_up
from impress_sglang.transfer.filling import fill
from impress_sglang.transfer.sources import ReadStats

POLICIES = ("recompute", "as", "impress")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
RECOMPUTED = 6
OPTIONS = (
    Option("policies", POLICIES, "to compare", parse=one_of(POLICIES)),
    Option("models", ("llama-3-8b",), f"of {', '.join(MODELS)}", parse=one_of(MODELS)),
    Option("device-share", 0.166, "device cache, of all KVs"),
    Option("host-share", 0.531, "host cache, of all KVs"),
    Option("scale", 1.0, "heads, FFN and vocabulary in shares of the model's", quick=0.25),
    Option("layers", None, "instead of the model's", quick=3, parse=int),
    Option("prefixes", 6, "number of prefixes", quick=4),
    Option("prefix-tokens", (2000, 10_000), "of the shortest and the longest", quick=(350, 700)),
    Option("new-tokens", 64, "of a question", quick=32),
    Option("warmup", 96, "loads that fill the caches", quick=20),
    Option("requests", 20, "measured requests", quick=6),
    Option("ssd-dir", None, "on the drive that is meant", parse=Path),
    Option("ssd-mbps", 0.0, "emulate a slower drive; 0: the real one", quick=20.0),
    SEED,
)
NAMESPACE, IDENTITY = "bench", "0" * 32


def run(args: argparse.Namespace) -> Result:
    """Measure all models.

    Raises:
        BenchFailed: a prefix was not stored.
        ImpressError: the store cannot be opened, or its caches do not fit in memory.
    """
    if args.prefixes < 2:
        raise BenchFailed("--prefixes must be at least 2")
    cells, tables = [], []
    for name in args.models:
        with work_folder(None, args.ssd_dir) as folder:
            cells.append(found := measure(args, name, folder))
        shape, lengths = found["model"], found["lengths"]
        caption = (
            f"{name}: {shape['layers']} layers, {shape['query_heads']} query and "
            f"{shape['kv_heads']} KV heads, {DTYPE} on {DEVICE}; {len(lengths)} prefixes "
            f"of {min(lengths)} to {max(lengths)} tokens, {found['kv_bytes'] / 1e9:.2f} GB of KVs"
        )
        tables.append(Table(found["rows"], caption=caption))
    return Result({"emulated_ssd_mbps": args.ssd_mbps or None, "cells": cells}, tables)


def measure(args: argparse.Namespace, name: str, folder: Path) -> dict[str, Any]:
    """The figures of all policies with one model."""
    rng = np.random.default_rng(args.seed)
    shape = MODELS[name].scaled(args.scale, args.layers)
    ends = min(args.prefix_tokens), max(args.prefix_tokens)
    lengths = rng.permutation(np.linspace(*ends, args.prefixes).round().astype(int)).tolist()
    sigma = max(MIN_SIGMA, args.prefixes / 4)
    asked = draw_prefixes(args.warmup + args.requests, args.prefixes, sigma, rng)
    model = Model(shape, DEVICE, DTYPE, max(lengths) + args.new_tokens, args.seed)
    kv_shape = shape.kv_shape(DTYPE)
    kv_bytes = sum(lengths) * kv_shape.token_bytes * shape.layers
    files = SlowFileSystem()
    install(files)
    codec = plain_codec(kv_shape)
    warm_up(kv_shape, model.device, codec)
    rows = []
    for number, policy in enumerate(args.policies):
        config = ImpressConfig(
            policy="as" if policy == "as" else "impress",
            ssd_dir=str(folder),
            ssd_gb=10 * kv_bytes / 1e9 + 1.0,
            min_free_gb=0.0,
            device_gb=args.device_share * kv_bytes / 1e9,
            host_gb=args.host_share * kv_bytes / 1e9,
        )
        files.set_rate(0)
        store = PrefixStore(config, IDENTITY, kv_shape, model.device, codec=codec)
        with contextlib.closing(store), step(policy):
            if not number:
                for prefix, length in enumerate(lengths):
                    save(store, model, tokens_of(prefix, length))
            engine = Engine(model, store, policy, args.new_tokens)
            measured = asked[args.warmup :]
            if policy == "recompute":
                # The first request is only to grow buffers.
                engine.serve(tokens_of(measured[0], lengths[measured[0]]))
                measured = measured[:RECOMPUTED]
            else:
                for prefix in asked[: args.warmup]:
                    engine.load(tokens_of(prefix, lengths[prefix]))
            # Caches fill alike at any speed.
            files.set_rate(args.ssd_mbps)
            engine.reads, engine.plan_seconds = ReadStats(), 0.0
            found = [engine.serve(tokens_of(prefix, lengths[prefix])) for prefix in measured]
            rows.append(make_row(policy, found, engine))
    figures = {"dtype": str(DTYPE), "device": str(DEVICE), "lengths": lengths, "rows": rows}
    return {"model": dataclasses.asdict(shape), "kv_bytes": kv_bytes, **figures}


def tokens_of(prefix: int, length: int) -> Tokens:
    """Token ids of a prefix; no two prefixes begin alike."""
    return (1_000_000 * (prefix + 1) + np.arange(length)).astype(np.int32)


def save(store: PrefixStore, model: Model, tokens: Tokens) -> None:
    """Store random KVs for a prefix.

    Raises:
        BenchFailed: the store did not take them.
    """
    size = len(tokens), model.shape.kv_heads, model.shape.head_dim

    def read(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return model.random(*size).cpu(), model.random(*size).cpu()

    # Nobody waits for the write, and nobody wants its memory back.
    offer = Offer(tokens, lambda start: read, lambda: None, lambda: None, min_tokens=1)
    outcome = store.writes.offer(NAMESPACE, offer)
    store.writes.drain()
    if outcome is not StoreOutcome.ACCEPTED or store.stats.segments_failed:
        raise BenchFailed(f"{len(tokens)} tokens were not stored: {outcome.value}")


class Engine:
    """A model in front of a store, under one policy."""

    def __init__(self, model: Model, store: PrefixStore, policy: str, new_tokens: int) -> None:
        self._model, self._store = model, store
        self._computes = policy == "recompute"
        self._exact = policy != "impress"
        shape = model.shape.kv_shape(model.dtype)
        self._codec = plain_codec(shape)
        self._new = torch.arange(new_tokens, device=model.device)
        self.reads = ReadStats()
        """Of all loads."""
        self.plan_seconds = 0.0
        """That they took to find and open a prefix."""

    def serve(self, tokens: Tokens) -> tuple[float, float]:
        """Milliseconds to the first token behind a prefix and a question, and of loading."""
        prefix = torch.from_numpy(tokens.astype(np.int64)).to(self._model.device)
        self._model.synchronize()
        began = loaded = time.perf_counter()
        if self._computes:
            self._model.forward(torch.cat([prefix, self._new]), 0)
        else:
            self.load(tokens)
            loaded = time.perf_counter()
            self._model.forward(self._new, len(tokens))
        return (time.perf_counter() - began) * 1e3, (loaded - began) * 1e3

    def load(self, tokens: Tokens) -> None:
        """Bring a prefix into the first rows of the pool.

        Raises:
            BenchFailed: not all of it is stored.
            PrefixUnreadable: a chunk is missing, short or corrupt.
        """
        began = time.perf_counter()
        store, slots = self._store, torch.arange(len(tokens), device=self._model.device)
        match = store.match(NAMESPACE, tokens)
        if match.num_tokens != len(tokens):
            raise BenchFailed(f"{match.num_tokens} of {len(tokens)} tokens of a prefix are stored")
        store.tree.touch(match)
        source = store.readers.open(match.spans, exact=self._exact)
        try:
            store.ahead.add_running(source)
            self.plan_seconds += time.perf_counter() - began
            for layer, (keys, values) in enumerate(self._model.pools):
                store.ahead.top_up()
                rows = Rows(keys, values, slots)
                fill(layer, source, source.read(layer), rows, self._codec)
                source.end_layer(layer)
            self._model.synchronize()
        finally:
            store.close_source(source)
        self.reads.add(source.stats)
        store.poll()


def make_row(policy: str, served: list[tuple[float, float]], engine: Engine) -> Row:
    """The figures of a policy; a ratio of nothing is None."""
    reads, ttft = engine.reads, [seconds for seconds, _ in served]
    chunks = {"device": reads.device_chunks, "host": reads.host_chunks, "ssd": reads.ssd_chunks}
    return {
        "policy": policy,
        "requests": len(served),
        "ttft_ms": round(float(np.mean(ttft)), 2),
        "p99_ms": round(float(np.percentile(ttft, 99)), 2),
        "load_ms": round(float(np.mean([seconds for _, seconds in served])), 2),
        "plan_ms": round(engine.plan_seconds / len(served) * 1e3, 2),
        "wait_ms": round(reads.wait_ms / len(served), 2),
        "ssd_mb": round(reads.ssd_bytes / len(served) / 1e6, 2),
        **{name: ratio(count, reads.chunks_accessed) for name, count in chunks.items()},
        "all_ms": [round(seconds, 2) for seconds in ttft],
    }
